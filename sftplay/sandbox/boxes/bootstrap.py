"""What starts inside a box, and the interface of what opens one."""

from __future__ import annotations

import marshal
import os
import random
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from sftplay.errors import ConfigError
from sftplay.sandbox.boxes.box import Box, Lost, Pipes
from sftplay.sandbox.boxes.job import Limits
from sftplay.sandbox.inside import agent, plain, rights

BOOT = """
import os, sys, marshal
if FD > 3:
    os.dup2(FD, 3)
    os.close(FD)
    FD = 3
def take():
    size, parts = 4, b""
    while len(parts) < size:
        parts += os.read(FD, size - len(parts)) or os._exit(3)
    size, parts = int.from_bytes(parts, "little"), b""
    while len(parts) < size:
        parts += os.read(FD, size - len(parts)) or os._exit(3)
    return marshal.loads(parts)
modules, hello = take()
for name, code in modules:
    sys.modules[name] = module = type(sys)(name)
    if code: exec(code, vars(module))
del name, code, take
module.main(FD, hello)
"""

OWNER = "SFTPLAY_BOX"
"""The variable by which a process in a box can be told from all others on the machine: the pid of who opened it."""


def package_folders(packages: Sequence[str]) -> tuple[Path, ...]:
    """Find the folders of packages that programs may import, and of the shared libraries that came with them. Raise
    ConfigError where one is not installed here, or is a single file.
    """
    folders = []
    for name in packages:
        found = find_spec(name) if name.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            fix = "install it, or leave it out; give names as `import` takes them"
            raise ConfigError(f"no package is called {name!r} here", where="packages", fix=fix)
        folder = Path(next(iter(found.submodule_search_locations)))
        folders += [path for path in (folder, folder.with_name(f"{name}.libs")) if path.is_dir()]
    return tuple(folders)


def environment(folder: str, *, site: str = "") -> dict[str, str]:
    """Return all the variables of a program in the box; `site` holds the packages that it may import."""
    return {
        **({"PYTHONPATH": site} if site else {}),
        "PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", OWNER: str(os.getpid()),
    }  # fmt: skip


def interpreter() -> Path:
    """Find the Python that runs the programs: the one below this environment, without its packages."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


@cache
def is_part_of_system() -> bool:
    """True when the interpreter belongs to the system's own folders, which a box has anyway."""
    return Path(sys.base_prefix) == Path("/usr")


@cache
def is_closed_to_others() -> bool:
    """True when another user cannot read the interpreter, because it lies below a home folder."""
    prefix = Path(sys.base_prefix).resolve()
    return any(not folder.stat().st_mode & 0o001 for folder in (prefix, *prefix.parents))


@cache
def _modules(last: ModuleType) -> tuple[tuple[str, Any], ...]:
    parents = [(name, None) for name in ("sftplay", "sftplay.sandbox", "sftplay.sandbox.inside")]
    loaded = []
    for module in dict.fromkeys((plain, rights, agent, last)):
        path = Path(str(module.__file__))
        loaded.append((module.__name__, compile(path.read_text(encoding="utf-8"), path.name, "exec")))
    return (*parents, *loaded)


def boot_command(python: str, fd: int) -> list[str]:
    """Return the command of the program inside the box; it takes its modules from the descriptor.

    Inside, the descriptor becomes number 3: a program must find the same box however many files this process has open.
    """
    # Neither the user's packages, nor the site's, nor bytecode files, nor the script's folder. -I would ignore
    # PYTHONHASHSEED, and a program that prints a set would be judged by chance.
    return [python, "-s", "-S", "-B", "-P", "-c", f"FD={fd}\n{BOOT}"]


def first_message(hello: dict[str, Any], *, program: ModuleType = agent) -> bytes:
    """Return what the program inside waits for first: its modules, and what it must give up."""
    content = marshal.dumps((_modules(program), hello))
    return len(content).to_bytes(4, "little") + content


def make_hello(
    limits: Limits,
    *,
    folder: str,
    user: int = 0,
    keeps_reading: bool = False,
    limits_processes: bool = True,
    filter: bytes = b"",
) -> dict[str, Any]:
    """Say what the program inside must do before it runs anything.

    It works in `folder` and becomes `user`; with 0 it stays who it is. With `keeps_reading` it may, as that user, still
    read what a file's mode keeps from others. `filter` refuses system calls, where nothing outside does it. The kernel
    counts processes by user: without a user for the box, `limits_processes` would count the whole machine's.
    """
    rlimits = [
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, int(limits.timeout_s) + 2),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, limits.stack_bytes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (11, 256),  # RLIMIT_SIGPENDING: signals and timers that wait; they count for the user's other processes
    ]
    if limits_processes:
        rlimits.append((resource.RLIMIT_NPROC, limits.processes))
    return {
        "folder": folder, "user": user, "keeps_reading": keeps_reading, "filter": filter, "limits": rlimits,
        "recursion": 1_000, "disk_bytes": limits.disk_bytes,
    }  # fmt: skip


def unused_user() -> int:
    """Choose a user id that nobody has, another one for each box.

    The kernel counts processes by user: boxes of one user would take each other's. Outside a user namespace of its own
    the ids go to 4 billion; in a container often only to 65,535.
    """
    if os.getuid() != 0:
        return 0
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    end = max(first + count for first, _, count in mapped)
    low, high = (1 << 30, (1 << 31) - 2) if end > 1 << 31 else (max(1, end - 4_000), end - 2)
    return random.SystemRandom().randrange(low, high)


class Executor:
    """Opens boxes, for one thread at a time. Nothing is kept running between boxes unless a subclass does so."""

    name: str

    def open(self, limits: Limits) -> Box:
        """Open a box and wait until it stands. It raises `Lost` with `infra` where it does not."""
        raise NotImplementedError

    def renew(self) -> bool:
        """Say whether what is kept running has died since the last time: a program may not be at fault."""
        return False

    def close(self) -> None:
        """End what is kept running between boxes."""


@contextmanager
def new_pipes() -> Iterator[tuple[Pipes, socket.socket, int]]:
    """Make pipes to a new box: our ends, then the box's socket and where its output goes.

    The box's ends are closed here at the end, and ours too where nothing could be started. Raise Lost with `infra`
    where the machine refused: no such program, no more processes, no more open files.
    """
    with ExitStack() as ours, ExitStack() as the_box:
        try:
            near, far = socket.socketpair()
            ours.callback(near.close)
            the_box.callback(far.close)
            reading, writing = os.pipe()
            ours.callback(os.close, reading)
            the_box.callback(os.close, writing)
            yield Pipes(near.fileno(), None, reading), far, writing
        except OSError as error:
            raise Lost("infra", f"the box did not start: {error}") from error
        ours.pop_all()
        near.detach()


def start_box(box: Box, first_message: bytes = b"") -> Box:
    """Send the box what it waits for, if that is not there yet; return it as soon as it stands. Raise Lost with `infra`
    where it did not start.
    """
    try:
        if first_message:
            box.send_first(first_message)
        box.wait_ready()
    except BaseException:
        box.close()
        raise
    return box
