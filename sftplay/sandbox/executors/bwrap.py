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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sftplay.errors import MachineError
from sftplay.sandbox.executors.bootstrap import (
    Arrival,
    boot_command,
    environment,
    interpreter,
    is_part_of_system,
    library_path,
    package_folders,
    unused_user,
)  # fmt: skip
from sftplay.sandbox.executors.executor import new_pipes, start_box
from sftplay.sandbox.executors.kernel_limits import build_filter
from sftplay.sandbox.verdicts.box import Box
from sftplay.sandbox.verdicts.job import Limits

WORK, PREFIX, SITE = "/w", "/py", "/site"
"""The folder that a program may write to, and where the interpreter lies, and the packages."""

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu) or dnf install bubblewrap (Fedora)"

SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""What an interpreter needs of the system. No programs: there is nothing to run but Python."""

PARENTS = ("/usr", "/usr/bin", "/usr/share", "/etc", "/dev", "/site")

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Bwrap:
    """Opens a fresh box by bubblewrap for each program."""

    name = "bwrap"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """`packages` are those that programs may import beside Python's own."""
        found = shutil.which("bwrap")
        if not found:
            raise MachineError("bubblewrap is not installed", where="sandbox", fix=INSTALL)
        self._program = found
        self._filter = build_filter()
        self._packages = package_folders(packages)
        self._environment = inner_environment(site=SITE if packages else "")

    def open(self, limits: Limits) -> Box:
        """A box that stands.

        Raises:
            Lost: `infra`, the box did not start.
        """
        user = unused_user()
        with new_pipes() as (pipes, theirs, writing), open(os.memfd_create("filter"), "w+b") as code:
            code.write(self._filter)
            code.seek(0)
            argv = [
                self._program, *box_arguments(limits, self._packages, is_root=user != 0), "--seccomp",
                str(code.fileno()), "--", *boot_command(inner_interpreter(), theirs.fileno()),
            ]  # fmt: skip
            process = subprocess.Popen(
                argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, cwd="/",
                pass_fds=(theirs.fileno(), code.fileno()), start_new_session=True,
            )  # fmt: skip

        def kill() -> None:
            process.kill()
            process.wait()

        def is_cut() -> bool:
            return process.poll() == -signal.SIGKILL  # no program sees bubblewrap: another did it

        return start_box(pipes, limits=limits, kill=kill, arrival=Arrival(folder=WORK, user=user), is_cut=is_cut)

    def renew(self) -> bool:
        """Nothing runs between boxes that could die."""
        return False

    def close(self) -> None:
        """Nothing runs between boxes."""


def inner_interpreter() -> str:
    """The interpreter's path inside the box."""
    python = interpreter()
    if is_part_of_system():
        return str(python)
    return f"{PREFIX}/{python.relative_to(Path(sys.base_prefix).resolve())}"


def inner_environment(*, site: str = "") -> dict[str, str]:
    """The environment of bubblewrap itself: it stays the first process in the box, where its own could be read."""
    variables = environment(WORK, site=site)
    prefix, libraries = str(Path(sys.base_prefix).resolve()), library_path()
    if not is_part_of_system() and libraries.startswith(prefix):
        variables["LD_LIBRARY_PATH"] = PREFIX + libraries.removeprefix(prefix)
    return variables


def box_arguments(limits: Limits, packages: Sequence[Path], *, is_root: bool, has_proc: bool = False) -> list[str]:
    """bubblewrap's arguments: namespaces, rights, and what the box sees of the file system.

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
    for parent in PARENTS:  # those that bubblewrap makes by itself are closed to everybody but root
        words += ["--perms", "0755", "--dir", parent]
    for path in map(Path, SYSTEM):
        if path.is_symlink() and path.parent == Path("/"):
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    if is_part_of_system():
        python = str(interpreter())
        words += ["--ro-bind", python, python]
    else:
        words += ["--ro-bind", str(Path(sys.base_prefix).resolve()), PREFIX]
    return tuple(words)
