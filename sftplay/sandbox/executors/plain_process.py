"""No box: a process with limits. It isolates nothing, and is taken only by name.

The program can read and write what this user can, reach the network, and leave processes behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile

from sftplay.sandbox.executors.bootstrap import Arrival, boot_command, environment, interpreter
from sftplay.sandbox.executors.executor import start_box
from sftplay.sandbox.verdicts.box import Box, Pipes
from sftplay.sandbox.verdicts.job import Limits


class PlainProcess:
    """Opens a process in an empty folder for each program."""

    name = "none"

    def open(self, limits: Limits) -> Box:
        """A process that is ready. It is ended with its session, and its folder is removed.

        Raises:
            Lost: `infra`, it did not start.
        """
        folder = tempfile.mkdtemp(prefix="sftplay-unboxed-")
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        process = subprocess.Popen(
            boot_command(str(interpreter()), theirs.fileno()), env=environment(folder), stdin=subprocess.DEVNULL,
            stdout=writing, stderr=writing, cwd="/", pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        theirs.close()

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

        pipes = Pipes(ours.detach(), None, reading)
        return start_box(pipes, limits=limits, kill=kill, arrival=Arrival(folder=folder))

    def renew(self) -> bool:
        """Nothing runs between boxes that could die."""
        return False

    def close(self) -> None:
        """Nothing runs between boxes."""
