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

from sftplay.sandbox.executors import bootstrap
from sftplay.sandbox.executors.executor import Executor, new_pipes, start_box
from sftplay.sandbox.verdicts.box import Box
from sftplay.sandbox.verdicts.job import Limits


class PlainProcess(Executor):
    """Opens a process in an empty folder for each program."""

    name = "none"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """`packages`: those that programs may import. With them come all others in the same folder."""
        self._site = os.pathsep.join({str(folder.parent): "" for folder in bootstrap.package_folders(packages)})

    def open(self, limits: Limits) -> Box:
        """Start a process and wait until it is ready. It is ended with its session, and its folder is removed.

        Raises:
            Lost: `infra`, it did not start.
        """
        with new_pipes() as (pipes, far, writing):
            folder = tempfile.mkdtemp(prefix="sftplay-unboxed-")
            process = subprocess.Popen(
                bootstrap.boot_command(str(bootstrap.interpreter()), far.fileno()),
                env=bootstrap.environment(folder, site=self._site),
                stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, cwd="/",
                pass_fds=(far.fileno(),), start_new_session=True,
            )  # fmt: skip

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

        hello = bootstrap.make_hello(limits, folder=folder)
        return start_box(Box(pipes, limits=limits, kill=kill), bootstrap.first_message(hello))
