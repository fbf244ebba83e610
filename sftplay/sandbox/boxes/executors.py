"""Boxes by bubblewrap, by limits of the kernel, by a plain process, and kept warm; and what starts inside them."""

from __future__ import annotations

import marshal
import os
import platform
import random
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from sftplay.errors import ConfigError, MachineError
from sftplay.sandbox.boxes.box import START_S, Box, Lost, Pipes, is_ready
from sftplay.sandbox.boxes.job import Limits
from sftplay.sandbox.inside import agent, plain, server

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
    for module in dict.fromkeys((plain, agent, last)):
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
    """Start the box and return it. Raise Lost with `infra` where it did not start."""
    try:
        box.start(first_message)
    except BaseException:
        box.close()
        raise
    return box


ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38
EQUAL, AT_LEAST, ANY_BIT = 0x15, 0x35, 0x45

# Numbers on x86_64 and on aarch64, None where there is no such call. Source: the kernel's syscall tables.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "shmget": (29, 194), "shmctl": (31, 195), "shmat": (30, 196), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "process_madvise": (440, 440), "pidfd_send_signal": (424, 424),
    "syslog": (103, 116), "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "io_setup": (206, 0), "flock": (73, 32), "quotactl_fd": (443, 443),
    "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip

MARKS: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
"""Calls that change a file's mode, owner, times or attributes. Landlock holds none of them back: a program that stays
the user may change those of all his files."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56, 302, 72), "aarch64": (1, 0xC00000B7, 220, 261, 25)}
"""Column of DENIED, the kernel's mark of the architecture, the numbers of clone(2), prlimit64(2) and fcntl(2)."""


def build_filter(*, keeps_marks: bool = False) -> bytes:
    """Build the filter for this machine's architecture: a `struct sock_filter` array, for kernel and bubblewrap.

    With `keeps_marks` it refuses MARKS too. Raise MachineError where the numbers of this architecture are not known
    here.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise MachineError(f"no system call filter for {machine}", where="sandbox", fix=f"use a machine with {known}")
    column, mark, clone, prlimit, fcntl = ARCHITECTURES[machine]
    code = [_load(4), _jump(mark, skip_if_not=0, skip_if=1), _answer(KILL), _load(0)]
    # Calls from 451 on came after Linux 6.4, or belong to another binary interface of x86_64. They do not exist in the
    # box: C libraries do without them, and nobody has looked at what they open.
    code += [_jump(451, how=AT_LEAST, skip_if_not=1), _answer(FAIL | ENOSYS)]
    for numbers in (DENIED | MARKS if keeps_marks else DENIED).values():
        if (number := numbers[column]) is not None:
            code += [_jump(number, skip_if_not=1), _answer(FAIL | EPERM)]
    # The flags of clone3 lie in memory, where no filter sees them. C libraries take clone(2) where it does not exist.
    code += [_jump(435, skip_if_not=1), _answer(FAIL | ENOSYS)]
    # F_SETLEASE: with a lease on a file that the user owns, all who open it wait.
    code += [_jump(fcntl, skip_if_not=3), _load(24), _jump(1024, skip_if_not=1), _answer(FAIL | EPERM), _load(0)]
    # A program may limit itself, which is process 0, and no other.
    code += [_jump(prlimit, skip_if_not=3), _load(16), _jump(0, skip_if=1, skip_if_not=0), _answer(FAIL | EPERM)]
    code += [_load(0), _jump(clone, skip_if_not=3), _load(16)]  # the flags of clone(2) that make a namespace
    code += [_jump(0x7E020000, how=ANY_BIT, skip_if_not=1), _answer(FAIL | EPERM)]
    return b"".join([*code, _answer(ALLOW)])


def _load(offset: int) -> bytes:
    """Take 32 bits of `struct seccomp_data`: the call's number at 0, the architecture at 4, arguments from 16 on."""
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(value: int, *, how: int = EQUAL, skip_if: int = 0, skip_if_not: int) -> bytes:
    """Compare what was loaded with the value, and leave so many of the next instructions out."""
    return struct.pack("HBBI", how, skip_if, skip_if_not, value)


def _answer(action: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, action)


READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Landlock(Executor):
    """Opens a box of this process's own namespaces for each program, with landlock around it."""

    name = "landlock"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """Programs may import `packages` besides Python's own."""
        if find_spec("sandlock") is None:
            raise MachineError("sandlock is not installed", where="sandbox", fix="make install EXTRAS=sandbox")
        import sandlock

        has, needs = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if has < needs:
            raise MachineError(f"the kernel's landlock is version {has} of {needs}", where="sandbox", fix="use bwrap")
        self._filter = build_filter(keeps_marks=os.getuid() != 0)
        self._packages = package_folders(packages)

    def open(self, limits: Limits) -> Box:
        import sandlock

        top = self._folders()
        work, storage, site = top / "work", top / "storage", top / "site"
        user = unused_user()
        python = interpreter() if is_part_of_system() else Path(sys.base_prefix).resolve()
        readable = [*map(Path, (*READABLE, *DEVICES)), python, *self._packages]
        box = sandlock.Sandbox(
            fs_readable=[*(str(path) for path in readable if path.exists()), str(site)],
            fs_writable=[str(work)], cwd=str(work), workdir=str(work),
            fs_storage=str(storage), max_disk=limits.disk_bytes, on_exit=sandlock.BranchAction.ABORT,
            on_error=sandlock.BranchAction.ABORT, clean_env=True,
            env=environment(str(work), site=str(site) if self._packages else ""),
            max_processes=limits.processes, no_coredump=True,
        )  # fmt: skip
        piped = sandlock.StdioMode.PIPED
        try:
            command = boot_command(str(interpreter()), 0)
            process = box.popen(command, stdin=piped, stdout=piped, stderr=piped)
            fds = [os.dup(stream.fileno()) for stream in (process.stdout, process.stdin, process.stderr)]
        except (RuntimeError, OSError, sandlock.SandlockError) as error:
            shutil.rmtree(top, ignore_errors=True)
            raise Lost("infra", f"the box did not start: {error}") from error
        for stream in (process.stdout, process.stdin, process.stderr):
            stream.close()

        def kill() -> None:
            process.kill()
            process.wait(timeout=60.0)
            shutil.rmtree(top, ignore_errors=True)

        hello = make_hello(
            limits, folder=str(work), user=user, keeps_reading=user != 0 and is_closed_to_others(),
            limits_processes=user != 0, filter=self._filter,
        )  # fmt: skip
        return start_box(Box(Pipes(*fds), limits=limits, kill=kill), first_message(hello))

    def _folders(self) -> Path:
        """Make a folder, and in it one to work in, one for what sandlock keeps, and one with links to the packages."""
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


class PlainProcess(Executor):
    """Opens a process in an empty folder for each program."""

    name = "none"

    def __init__(self, packages: Sequence[str] = ()) -> None:
        """`packages`: those that programs may import. With them come all others in the same folder."""
        self._site = os.pathsep.join({str(folder.parent): "" for folder in package_folders(packages)})

    def open(self, limits: Limits) -> Box:
        with new_pipes() as (pipes, far, writing):
            folder = tempfile.mkdtemp(prefix="sftplay-unboxed-")
            process = subprocess.Popen(
                boot_command(str(interpreter()), far.fileno()),
                env=environment(folder, site=self._site),
                stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, cwd="/",
                pass_fds=(far.fileno(),), start_new_session=True,
            )  # fmt: skip

        def kill() -> None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)

        hello = make_hello(limits, folder=folder)
        return start_box(Box(pipes, limits=limits, kill=kill), first_message(hello))


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
        self._packages = package_folders(packages)
        # Of bubblewrap itself, too: it stays the first process in the box, where its variables can be read.
        self._environment = environment(WORK, site=SITE if packages else "")
        prefix, libraries = str(Path(sys.base_prefix).resolve()), str(sysconfig.get_config_var("LIBDIR") or "")
        if not is_part_of_system() and libraries.startswith(prefix):
            self._environment["LD_LIBRARY_PATH"] = PREFIX + libraries.removeprefix(prefix)

    def open(self, limits: Limits) -> Box:
        user = unused_user()
        with new_pipes() as (pipes, far, writing), open(os.memfd_create("filter"), "w+b") as code:
            code.write(self._filter)
            code.seek(0)
            process = self._spawn(limits, far.fileno(), user=user, filter_fd=code.fileno(), output=writing)

        def kill() -> None:
            process.kill()
            process.wait()

        def is_cut() -> bool:
            return process.poll() == -signal.SIGKILL  # no program sees bubblewrap: another did it

        box = Box(pipes, limits=limits, kill=kill, is_cut=is_cut)
        return start_box(box, first_message(make_hello(limits, folder=WORK, user=user)))

    def _spawn(
        self, limits: Limits, fd: int, *, user: int, filter_fd: int | None = None, output: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start bubblewrap: namespaces, rights, and what the box sees of the file system; /proc only without a filter.

        A signal to a process group crosses namespaces: without a session of its own a program could end bubblewrap,
        where both belong to one ordinary user.
        """
        python = str(interpreter())
        if not is_part_of_system():
            python = f"{PREFIX}/{Path(python).relative_to(Path(sys.base_prefix).resolve())}"
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if not user:
            rights = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        argv = [
            self._program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
            "--hostname", "box", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *rights, *_file_system(),
            *(("--proc", "/proc") if filter_fd is None else ("--seccomp", str(filter_fd))),
            *(word for path in self._packages for word in ("--ro-bind", str(path), f"{SITE}/{path.name}")),
            "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK,
            "--", *boot_command(python, fd),
        ]  # fmt: skip
        return subprocess.Popen(
            argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
            pass_fds=(fd,) if filter_fd is None else (fd, filter_fd), start_new_session=True,
        )  # fmt: skip


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
    if is_part_of_system():
        python = str(interpreter())
        words += ["--ro-bind", python, python]
    else:
        words += ["--ro-bind", str(Path(sys.base_prefix).resolve()), PREFIX]
    return tuple(words)


class WarmBwrap(Bwrap):
    """Forks a box for each program out of one that is kept."""

    def __init__(self, packages: Sequence[str] = ()) -> None:
        super().__init__(packages)
        self._numbers = count()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._has_died = self._is_fresh = False

    def open(self, limits: Limits) -> Box:
        """Open a box that stands. Raise Lost with `infra` where the server or the box did not start, twice."""
        if self._is_fresh:
            return super().open(limits)
        try:
            return self._fork(limits)
        except Lost:
            self._give_up()
            return self._fork(limits)

    def _fork(self, limits: Limits) -> Box:
        orders = self._orders or self._start()
        number = next(self._numbers)
        hello = make_hello(limits, folder=WORK, filter=self._filter)
        with new_pipes() as (pipes, far, writing):
            socket.send_fds(orders, [marshal.dumps(("start", number, hello))], [far.fileno(), writing])
        return start_box(Box(pipes, limits=limits, kill=lambda: self._kill(number, orders)))

    def _kill(self, number: int, orders: socket.socket) -> None:
        """Have the server end a program. A server that does not answer is ended itself, and all programs with it."""
        if orders is not self._orders:
            return  # that server is gone, and all its programs with it
        try:
            orders.send(marshal.dumps(("kill", number, None)))
            if not is_ready(orders.fileno(), select.POLLIN, within_s=60.0) or orders.recv(16) != b"gone":
                self._give_up()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """End a server that does not answer; the next box starts another."""
        self._has_died = True
        self.close()

    def _start(self) -> socket.socket:
        orders, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        user = unused_user()
        self._orders = orders
        hello = make_hello(Limits(), folder=WORK, user=user)
        try:
            with far:
                self._process = self._spawn(Limits(), far.fileno(), user=user)
            orders.sendall(first_message(hello, program=server))
            if not is_ready(orders.fileno(), select.POLLIN, within_s=START_S) or orders.recv(16) != b"ready":
                raise OSError("it did not start")
        except OSError as error:
            self.close()
            raise Lost("infra", f"the server: {error}") from error
        return orders

    def renew(self) -> bool:
        """True where the server has died since the last time.

        The next boxes need none, so that the second verdict hangs on nothing but its program; later ones start another.
        """
        if self._process is not None and self._process.poll() is not None:
            self._give_up()
        self._is_fresh, self._has_died = self._has_died, False
        return self._is_fresh

    def close(self) -> None:
        """End the server, and with it all that came of it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._orders is not None:
            self._orders.close()
        self._process = self._orders = None
