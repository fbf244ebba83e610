"""Starts the kit's processes under test by a fork of a process that has imported torch, transformers, trl and peft.

`install` makes this process's `subprocess.Popen` do so for `python -m MODULE` of the modules below; every process that
is started so does the same for those it starts. Each runs its module as `python -m` would: it is a direct child of who
asked for it, has the same arguments, environment and working folder, its signals are as after exec, sitecustomize.py
on PYTHONPATH runs first, and /proc shows its command line and environment. What differs from a new interpreter: the
libraries are imported and two tables compiled already, and all processes hash strings by the same seed.

What cannot be had so is started as usual: other systems than Linux, files to pass on, variables that Python or the
libraries read when they are imported.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sftplay.launch.command import allocator_environment, offline_environment, quiet_environment

LAUNCHERS = frozenset(
    {
        "sftplay",
        "torch.distributed.run",
        "accelerate.commands.launch",
        "sftplay.launch.deepspeed_runner",
        "deepspeed.launcher.launch",
    }
)
"""Modules that start others: each gets a server of its own, whose children are its own."""

MODULES = LAUNCHERS | {
    "sftplay.tasks.worker", "sftplay.tasks.probe_step", "sftplay.plan.built_shape", "sftplay.train.comm_check",
}  # fmt: skip

HAS_GPU = Path("/dev/nvidiactl").exists()

PRELOADED = (
    "sftplay.tasks.sft.task",
    "sftplay.train.run_task",
    "sftplay.cli",
    "sftplay.config.load",
    "sftplay.commands.train",
    "sftplay.report.report",
    "datasets",
    *(() if HAS_GPU else ("deepspeed",)),  # accelerate imports it at the first step; it settles on a device at once
    "torch.utils.tensorboard",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.utils.serialization",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "sftplay.plan.shape_from_config",
    "stringprep",
)

FIXED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    **({} if HAS_GPU else {"DS_ACCELERATOR": "cpu"}),
}
"""The server's own: a process that forks must have one thread. The last is for the jemalloc in pyarrow."""

IMPORT_TIME = (
    "HF_",
    "TRANSFORMERS_",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
    "LD_",
    "MALLOC_ARENA",
    "COVERAGE",
    "UNSLOTH_",
    "PYTHON",
)
FOLLOWED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
"""The only variables of Python's own that a fork can still follow."""

ROOM = 1 << 16
"""Bytes of /proc/PID/environ and a sixteenth of it for /proc/PID/cmdline, held by a variable and an argument."""

SOCKET_BYTES = 1 << 18
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS = 1, 40
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1

libc = ctypes.PyDLL(None, use_errno=True)
"""Its calls keep the interpreter's lock, as a fork must."""


Connection = tuple[socket.socket, subprocess.Popen[bytes] | None]
"""The end that asks, and the server where it is a child that is waited for."""


class Client:
    """This process's end: asks its server for children."""

    def __init__(self, environment: Mapping[str, str], connect: Callable[[], Connection]) -> None:
        self.environment, self.connect = dict(environment), connect
        self.end: socket.socket | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.owner, self.lock = os.getpid(), threading.Lock()

    def close(self) -> None:
        """End the server; what it has started goes on."""
        if self.end is not None:
            self.end.close()
        if self.server is not None:
            self.server.wait()
        self.end = self.server = None

    def can_start(self, argv: list[str], env: Mapping[str, str]) -> bool:
        """True for a command that a fork can take the place of, in that environment."""
        words = argv[:1] + argv[2:] if argv[1:2] == ["-u"] else argv
        if words[:2] != [sys.executable, "-m"] or words[2:3] == [] or words[2] not in MODULES:
            return False
        if os.getpid() != self.owner:  # a fork of this process, whose children would be this one's
            return False
        read = {key: value for key, value in env.items() if key.startswith(IMPORT_TIME) and key not in FOLLOWED}
        return all(value == self.environment.get(key) for key, value in read.items())

    def start(self, request: dict[str, Any], files: tuple[int, int, int]) -> int:
        """The pid of the new child."""
        message = pickle.dumps(request)
        with self.lock:
            if self.end is None:
                self.end, self.server = self.connect()
            socket.send_fds(self.end, [message], files)
            answer = self.end.recv(64)
        if not answer:
            raise OSError("the fork server has ended")
        return int(answer)


def install(client: Client) -> Callable[[], None]:
    """Let `subprocess.Popen` of this process use `client` where it can; what puts it back."""
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: Any, *given: Any) -> None:
        (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _info, _flags, shell, *pipes) = given
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _restore, gid, gids, uid, umask, session, group = pipes
        env = dict(os.environ if env is None else env)
        words = [os.fsdecode(word) for word in args] if isinstance(args, (list, tuple)) else []
        plain = close_fds and not (pass_fds or shell or executable or group >= 0 or umask >= 0)
        try:
            ready = pickle.dumps(preexec_fn)
        except (pickle.PicklingError, AttributeError):
            plain = False
        if not (plain and gid is None and gids is None and uid is None and client.can_start(words, env)):
            usual(self, *given)
            return
        request = {
            "argv": words, "env": {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()},
            "cwd": str(Path.cwd() / os.fspath(cwd or ".")), "session": session, "ready": ready,
            "ignored": [each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
            "mask": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }  # fmt: skip
        wanted = (p2cread, c2pwrite, errwrite)
        files = tuple(place if given == -1 else given for place, given in enumerate(wanted))
        self.pid = client.start(request, files)  # type: ignore[arg-type]
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    def put_back() -> None:
        subprocess.Popen._execute_child = usual  # type: ignore[attr-defined]

    return put_back


def lazy_client(root: Path) -> Client | None:
    """The client of a server for this process and the checkout at `root`, which starts when the first child is asked
    for; None where the system has no such fork."""
    if sys.platform != "linux" or os.uname().machine not in SYS_CLONE:
        return None
    told = quiet_environment() | offline_environment() | allocator_environment()
    environment = {key: value for key, value in os.environ.items() if key not in FOLLOWED} | told | FIXED

    def connect() -> Connection:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fork_server; fork_server.main()"
        argv = [sys.executable, "-c", code, str(theirs.fileno()), str(root), "x" * (ROOM // 16)]
        settings = environment | {"PYTHONPATH": str(root), "FORK_SERVER_ROOM": "x" * ROOM}
        server = subprocess.Popen(argv, env=settings, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        return ours, server

    return Client(environment, connect)


def main() -> None:
    """The server; in a process that it has forked this returns only when that one's module has run."""
    end, root = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    sys.path[:] = [str(root), *(each for each in sys.path if each not in ("", str(root), str(Path(__file__).parent)))]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with _stderr_kept():
        for name in PRELOADED:
            importlib.import_module(name)
        _compile_what_each_run_needs()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork of this process is not safe"
    base = Base(root, os.environ, sys.path[1:])
    gc.collect()
    gc.freeze()
    become(*serve(end, base), base=base)


def _compile_what_each_run_needs() -> None:
    """A thousand patterns of transformers' families, and the template of the report: a fifth of a small run."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from sftplay.report.page import ENVIRONMENT

    get_checkpoint_conversion_mapping("llama")
    ENVIRONMENT.get_template("page.html")


@contextmanager
def _stderr_kept() -> Iterator[None]:
    """What libraries say when they are imported is not shown."""
    shown = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)


class Area:
    """The memory that /proc shows as this process's arguments and environment."""

    def __init__(self) -> None:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        self.arg_start, self.arg_end, self.env_start, self.env_end = map(int, fields[45:49])

    def write(self, argv: list[str], environment: Mapping[str, str]) -> None:
        """Show these; what is longer is cut off."""
        words = b"".join(os.fsencode(word) + b"\0" for word in argv)
        settings = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in environment.items())
        for start, end, content in (
            (self.arg_start, self.arg_end, words),
            (self.env_start, self.env_end, settings),
        ):
            size = end - start
            ctypes.memmove(start, content[: size - 1].ljust(size, b"\0"), size)


class Base:
    """What every process of the server starts from."""

    def __init__(self, root: Path, environment: Mapping[str, str], path: list[str]) -> None:
        self.root, self.environment, self.path = root, dict(environment), path
        self.area = Area()
        self.streams: tuple[Any, ...] = ()


def serve(end: socket.socket, base: Base) -> tuple[dict[str, Any], list[int], int]:
    """Fork at each request; returns in the forked processes only: the request, the three files, and the one to close
    once /proc shows it."""
    base.area.write(["fork-server"], {})
    while True:
        message, files, _, _ = socket.recv_fds(end, SOCKET_BYTES, 3)
        if not message:
            os._exit(0)
        until, ready = os.pipe()
        pid = fork_sibling()
        if pid == 0:
            end.close()
            os.close(until)
            return pickle.loads(message), files, ready
        for file in (*files, ready):
            os.close(file)
        os.read(until, 1)  # its end: the child is what was asked for, or dead
        os.close(until)
        end.send(str(pid).encode())


def fork_sibling() -> int:
    """As os.fork, but the new process is a child of this one's parent. Source: clone(2), CLONE_PARENT."""
    at = ctypes.c_ulong()
    ids = 0
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(at)) == 0 and at.value:
        ids = CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID  # as glibc's own fork
    machine = os.uname().machine
    # The last two arguments have the other order on x86.
    last = (at, ctypes.c_ulong(0)) if machine == "x86_64" else (ctypes.c_ulong(0), at)
    flags = ctypes.c_ulong(CLONE_PARENT | ids | signal.SIGCHLD)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(SYS_CLONE[machine], flags, ctypes.c_ulong(0), ctypes.c_ulong(0), *last)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def become(request: dict[str, Any], files: list[int], ready: int, *, base: Base) -> None:
    """Run what was asked for as the interpreter would; ends as its module does."""
    argv, env = request["argv"], request["env"]
    for place, file in enumerate(files):
        os.dup2(file, place)
    for file in files:
        if file > 2:
            os.close(file)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    ignored = {*request["ignored"], signal.SIGPIPE, signal.SIGXFSZ}
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if each <= 31:
            signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    base.area.write(argv, env)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    words = argv[:1] + argv[2:] if argv[1] == "-u" else argv
    module = words[2]
    if (call := pickle.loads(request["ready"])) is not None:
        call()
    os.close(ready)
    sys.argv, sys.orig_argv = ["-m", *words[3:]], list(argv)
    if module in LAUNCHERS:
        _own_server(base)
    _prepare_interpreter(request, base, is_unbuffered="-u" in argv[1:2] or bool(env.get("PYTHONUNBUFFERED")))
    os._exit(_run(module))


def _run(module: str) -> int:
    """The exit code of `python -m module`. What the interpreter does at its very end, to free each object, is left
    out: it would copy all memory that is shared with the server."""
    code: Any = 0
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _prepare_interpreter(request: dict[str, Any], base: Base, *, is_unbuffered: bool) -> None:
    import random

    import numpy as np
    import torch

    env, cwd = request["env"], request["cwd"]
    base.streams = (sys.stdin, sys.stdout, sys.stderr)  # to end them would write what they hold
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1, base.streams[1].errors, is_unbuffered=is_unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, base.streams[2].errors, is_unbuffered=is_unbuffered)
    random.seed()
    np.random.seed()
    for option, name in ((M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_"), (M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_")):
        if threshold := env.get(name):
            libc.mallopt(option, int(threshold))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or cores))
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    added = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [cwd, *added, *base.path]
    kit = next((Path(each) / "sftplay" for each in sys.path if (Path(each) / "sftplay").is_dir()), None)
    if kit is None or not kit.samefile(base.root / "sftplay"):  # another one than was imported; a link to it is none
        for name in [each for each in sys.modules if each.partition(".")[0] == "sftplay"]:
            del sys.modules[name]
    else:
        for name in (*(MODULES - LAUNCHERS), "sftplay.__main__"):
            sys.modules.pop(name, None)
    if any((Path(each) / "sitecustomize.py").is_file() for each in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _stream(place: int, errors: str, *, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = open(place, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors=errors, newline="\n",
        line_buffering=place == 2 or raw.isatty(), write_through=is_unbuffered,
    )  # fmt: skip


def _own_server(base: Base) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if each <= 31:  # its parent's signals, by the process group, are not meant for it
                signal.signal(each, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(nothing, place)
        os.close(nothing)
        ours.close()
        become(*serve(theirs, base), base=base)
        return
    theirs.close()
    install(Client(base.environment, lambda: (ours, None)))
