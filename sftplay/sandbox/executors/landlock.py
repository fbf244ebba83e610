"""Boxes by landlock and system call filters, for machines where bubblewrap may not make namespaces: most containers.

The library sandlock does it. What it leaves open is added: a limit of the disk, a user without rights where this
process is root, an empty environment, and the same filter as bubblewrap's boxes have.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sftplay.errors import MachineError
from sftplay.sandbox.executors.bootstrap import (
    Arrival,
    boot_command,
    environment,
    interpreter,
    is_closed_to_others,
    package_folders,
    unused_user,
)  # fmt: skip
from sftplay.sandbox.executors.executor import start_box
from sftplay.sandbox.executors.seccomp import build_filter
from sftplay.sandbox.verdicts.box import Box, Lost, Pipes
from sftplay.sandbox.verdicts.job import Limits

READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

GONE_S = 60.0


class Landlock:
    """Opens a box of this process's own namespaces for each program, with landlock around it."""

    name = "landlock"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """`packages` are those that programs may import beside Python's own."""
        if find_spec("sandlock") is None:
            raise MachineError("sandlock is not installed", where="sandbox", fix="make install EXTRAS=sandbox")
        import sandlock

        has, needs = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if has < needs:
            raise MachineError(f"the kernel's landlock is version {has} of {needs}", where="sandbox", fix="use bwrap")
        self._filter = build_filter(keeps_marks=os.getuid() != 0)
        self._packages = package_folders(packages)

    def open(self, limits: Limits) -> Box:
        """A box that stands.

        Raises:
            Lost: `infra`, the box did not start.
        """
        import sandlock

        top = self._folders()
        work, storage, site = top / "work", top / "storage", top / "site"
        user = unused_user()
        box = sandlock.Sandbox(
            fs_readable=[*self._readable(), str(site)], fs_writable=[str(work)], cwd=str(work), workdir=str(work),
            fs_storage=str(storage), max_disk=limits.disk_bytes, on_exit=sandlock.BranchAction.ABORT,
            on_error=sandlock.BranchAction.ABORT, clean_env=True,
            env=environment(str(work), site=str(site) if self._packages else ""),
            max_processes=limits.processes, no_coredump=True,
        )  # fmt: skip
        piped = sandlock.StdioMode.PIPED
        try:
            process = box.popen(boot_command(str(interpreter()), 0), stdin=piped, stdout=piped, stderr=piped)
            fds = [os.dup(each.fileno()) for each in (process.stdout, process.stdin, process.stderr)]
        except (RuntimeError, OSError, sandlock.SandlockError) as error:
            shutil.rmtree(top, ignore_errors=True)
            raise Lost("infra", f"the box did not start: {error}") from error
        for each in (process.stdout, process.stdin, process.stderr):
            each.close()

        def kill() -> None:
            process.kill()
            process.wait(timeout=GONE_S)
            shutil.rmtree(top, ignore_errors=True)

        arrival = Arrival(
            folder=str(work), user=user, keeps_reading=user != 0 and is_closed_to_others(),
            limits_processes=user != 0, filter=self._filter,
        )  # fmt: skip
        return start_box(Pipes(*fds), limits=limits, kill=kill, arrival=arrival)

    def _folders(self) -> Path:
        """A new folder, and in it one to work in, one for what sandlock keeps, and one with links to the packages."""
        try:
            top = Path(tempfile.mkdtemp(prefix=f"sftplay-box-{os.getpid()}-"))
            top.chmod(0o711)
            for name, mode in (("work", 0o777), ("storage", 0o777), ("site", 0o755)):
                (top / name).mkdir()
                (top / name).chmod(mode)
            for package in self._packages:
                (top / "site" / package.name).symlink_to(package)
        except OSError as error:
            raise Lost("infra", f"no folder for the box: {error}") from error
        return top

    def _readable(self) -> list[str]:
        prefix = [str(interpreter())] if sys.base_prefix == "/usr" else [str(Path(sys.base_prefix).resolve())]
        return [path for path in (*READABLE, *DEVICES, *prefix, *map(str, self._packages)) if Path(path).exists()]

    def renew(self) -> bool:
        """Nothing runs between boxes that could die."""
        return False

    def close(self) -> None:
        """Nothing runs between boxes."""
