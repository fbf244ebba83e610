"""Boxes by bubblewrap: namespaces of their own for users, processes, network, files, names and shared memory.

There is no /proc in it. As root the program becomes a user that nobody is; bubblewrap needs no user namespace then, so
that an interpreter below a home folder can be shown to that user.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sftplay.errors import MachineError
from sftplay.sandbox.executors import bootstrap
from sftplay.sandbox.executors.executor import Executor, new_pipes, start_box
from sftplay.sandbox.executors.kernel_limits import DEVICES, build_filter
from sftplay.sandbox.verdicts.box import Box
from sftplay.sandbox.verdicts.job import Limits

WORK, PREFIX, SITE = "/w", "/py", "/site"
"""The folder that a program may write to, and where the interpreter lies, and the packages."""

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu) or dnf install bubblewrap (Fedora)"

SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""What an interpreter needs of the system. No programs: there is nothing to run but Python."""


class Bwrap(Executor):
    """Opens a fresh box by bubblewrap for each program."""

    name = "bwrap"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """Programs may import `packages` besides Python's own."""
        found = shutil.which("bwrap")
        if not found:
            raise MachineError("bubblewrap is not installed", where="sandbox", fix=INSTALL)
        self._program = found
        self._filter = build_filter()
        self._packages = bootstrap.package_folders(packages)
        # Of bubblewrap itself, too: it stays the first process in the box, where its variables can be read.
        self._environment = bootstrap.environment(WORK, site=SITE if packages else "")
        prefix, libraries = str(Path(sys.base_prefix).resolve()), str(sysconfig.get_config_var("LIBDIR") or "")
        if not bootstrap.is_part_of_system() and libraries.startswith(prefix):
            self._environment["LD_LIBRARY_PATH"] = PREFIX + libraries.removeprefix(prefix)

    def open(self, limits: Limits) -> Box:
        """Open a box that stands.

        Raises:
            Lost: `infra`, the box did not start.
        """
        user = bootstrap.unused_user()
        with new_pipes() as (pipes, far, writing), open(os.memfd_create("filter"), "w+b") as code:
            code.write(self._filter)
            code.seek(0)
            argv = [
                self._program, *box_arguments(limits, self._packages, is_root=user != 0), "--seccomp",
                str(code.fileno()), "--", *bootstrap.boot_command(inner_interpreter(), far.fileno()),
            ]  # fmt: skip
            process = subprocess.Popen(
                argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, cwd="/",
                pass_fds=(far.fileno(), code.fileno()), start_new_session=True,
            )  # fmt: skip

        def kill() -> None:
            process.kill()
            process.wait()

        def is_cut() -> bool:
            return process.poll() == -signal.SIGKILL  # no program sees bubblewrap: another did it

        box = Box(pipes, limits=limits, kill=kill, is_cut=is_cut)
        return start_box(box, bootstrap.first_message(bootstrap.make_hello(limits, folder=WORK, user=user)))


def inner_interpreter() -> str:
    """Find the interpreter's path inside the box."""
    python = bootstrap.interpreter()
    if bootstrap.is_part_of_system():
        return str(python)
    return f"{PREFIX}/{python.relative_to(Path(sys.base_prefix).resolve())}"


def box_arguments(limits: Limits, packages: Sequence[Path], *, is_root: bool, has_proc: bool = False) -> list[str]:
    """Return bubblewrap's arguments: namespaces, rights, and what the box sees of the file system.

    A signal to a process group crosses namespaces: without a session of its own a program could end bubblewrap, where
    both belong to one ordinary user.
    """
    rights = ["--cap-drop", "ALL"]
    if is_root:
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        rights += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    proc = ["--proc", "/proc"] if has_proc else []
    shown = [word for path in packages for word in ("--ro-bind", str(path), f"{SITE}/{path.name}")]
    return [
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "box",
        "--die-with-parent", "--new-session", *rights, *_file_system(), *proc, *shown,
        "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK,
    ]  # fmt: skip


@cache
def _file_system() -> tuple[str, ...]:
    words = []
    for parent in ("/usr", "/usr/bin", "/usr/share", "/etc", "/dev", "/site"):
        # those that bubblewrap makes by itself are closed to everybody but root
        words += ["--perms", "0755", "--dir", parent]
    for path in map(Path, SYSTEM):
        if path.is_symlink() and path.parent == Path("/"):
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    if bootstrap.is_part_of_system():
        python = str(bootstrap.interpreter())
        words += ["--ro-bind", python, python]
    else:
        words += ["--ro-bind", str(Path(sys.base_prefix).resolve()), PREFIX]
    return tuple(words)
