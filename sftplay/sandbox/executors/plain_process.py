"""No box: a process with limits. It isolates nothing, and is taken only by name.

The program can read and write what this user can, reach the network, and leave processes behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence

from sftplay.sandbox.executors.bootstrap import Arrival, boot_command, environment, interpreter, package_folders
from sftplay.sandbox.executors.executor import new_pipes, start_box
from sftplay.sandbox.verdicts.box import Box
from sftplay.sandbox.verdicts.job import Limits


class PlainProcess:
    """Opens a process in an empty folder for each program."""

    name = "none"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """`packages`: those that programs may import. With them come all others beside them."""
        self._site = os.pathsep.join({str(folder.parent): "" for folder in package_folders(packages)})

    def open(self, limits: Limits) -> Box:
        """A process that is ready. It is ended with its session, and its folder is removed.

        Raises:
            Lost: `infra`, it did not start.
        """
        with new_pipes() as (pipes, theirs, writing):
            folder = tempfile.mkdtemp(prefix="sftplay-unboxed-")
            process = subprocess.Popen(
                boot_command(str(interpreter()), theirs.fileno()), env=environment(folder, site=self._site),
                stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, cwd="/",
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

        return start_box(pipes, limits=limits, kill=kill, arrival=Arrival(folder=folder))

    def renew(self) -> bool:
        """Nothing runs between boxes that could die."""
        return False

    def close(self) -> None:
        """Nothing runs between boxes."""
