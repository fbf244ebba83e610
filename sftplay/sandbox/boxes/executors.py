"""Boxes by bubblewrap, by limits of the kernel, by a plain process, and kept warm."""

from __future__ import annotations

import marshal
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from sftplay.errors import MachineError
from sftplay.sandbox.boxes import bootstrap
from sftplay.sandbox.boxes.bootstrap import Executor, new_pipes, start_box
from sftplay.sandbox.boxes.box import START_S, Box, Lost, Pipes, is_ready
from sftplay.sandbox.boxes.job import Limits
from sftplay.sandbox.inside import server

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
        self._packages = bootstrap.package_folders(packages)

    def open(self, limits: Limits) -> Box:
        import sandlock

        top = self._folders()
        work, storage, site = top / "work", top / "storage", top / "site"
        user = bootstrap.unused_user()
        python = bootstrap.interpreter() if bootstrap.is_part_of_system() else Path(sys.base_prefix).resolve()
        readable = [*map(Path, (*READABLE, *DEVICES)), python, *self._packages]
        box = sandlock.Sandbox(
            fs_readable=[*(str(path) for path in readable if path.exists()), str(site)],
            fs_writable=[str(work)], cwd=str(work), workdir=str(work),
            fs_storage=str(storage), max_disk=limits.disk_bytes, on_exit=sandlock.BranchAction.ABORT,
            on_error=sandlock.BranchAction.ABORT, clean_env=True,
            env=bootstrap.environment(str(work), site=str(site) if self._packages else ""),
            max_processes=limits.processes, no_coredump=True,
        )  # fmt: skip
        piped = sandlock.StdioMode.PIPED
        try:
            command = bootstrap.boot_command(str(bootstrap.interpreter()), 0)
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

        hello = bootstrap.make_hello(
            limits, folder=str(work), user=user, keeps_reading=user != 0 and bootstrap.is_closed_to_others(),
            limits_processes=user != 0, filter=self._filter,
        )  # fmt: skip
        return start_box(Box(Pipes(*fds), limits=limits, kill=kill), bootstrap.first_message(hello))

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
        self._site = os.pathsep.join({str(folder.parent): "" for folder in bootstrap.package_folders(packages)})

    def open(self, limits: Limits) -> Box:
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
        user = bootstrap.unused_user()
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
        return start_box(box, bootstrap.first_message(bootstrap.make_hello(limits, folder=WORK, user=user)))

    def _spawn(
        self, limits: Limits, fd: int, *, user: int, filter_fd: int | None = None, output: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Start bubblewrap: namespaces, rights, and what the box sees of the file system; /proc only without a filter.

        A signal to a process group crosses namespaces: without a session of its own a program could end bubblewrap,
        where both belong to one ordinary user.
        """
        python = str(bootstrap.interpreter())
        if not bootstrap.is_part_of_system():
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
            "--", *bootstrap.boot_command(python, fd),
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
    if bootstrap.is_part_of_system():
        python = str(bootstrap.interpreter())
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
        hello = bootstrap.make_hello(limits, folder=WORK, filter=self._filter)
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
        user = bootstrap.unused_user()
        self._orders = orders
        hello = bootstrap.make_hello(Limits(), folder=WORK, user=user)
        try:
            with far:
                self._process = self._spawn(Limits(), far.fileno(), user=user)
            orders.sendall(bootstrap.first_message(hello, program=server))
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
