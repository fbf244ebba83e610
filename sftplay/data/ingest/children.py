"""Child processes that read documents: forked from one server, within bounds of time and memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from sftplay.atomic import write_text
from sftplay.errors import MachineError
from sftplay.places import ROOT
from sftplay.signals import TiedPopen, die_with_parent

PR_SET_CHILD_SUBREAPER = 36

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM_CODE = 28
"""Exit code of a child that found the disk full. The file that it reads is not at fault."""


def serve(requests: int, answers: int) -> None:
    """Start the requested tasks until the request pipe is closed."""
    children: dict[int, dict[str, Any]] = {}  # pid -> its task, with what is known of the child
    rest = b""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the requesting process handles Ctrl-C of a terminal
    if sys.platform == "linux":  # orphans of a child become ours, so that we find them
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    while True:
        # While there are children, their memory is checked every 0.05 s.
        ready, _, _ = select.select([requests, woken], [], [], 0.05 if children else None)
        if woken in ready:
            os.read(woken, 1 << 12)
        if requests in ready:
            given = os.read(requests, 1 << 16)
            if not given:
                break
            *lines, rest = (rest + given).split(b"\n")
            for task in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    _run(task, os.getppid())
                children[pid] = {**task, "began": time.monotonic(), "peak_bytes": 0, "killed_for": ""}
        _reap(children, answers)
        for pid, child in children.items():
            held = _held_bytes(pid)
            child["peak_bytes"] = max(child["peak_bytes"], held)
            if child["memory_bytes"] and held > child["memory_bytes"]:
                child["killed_for"] = "memory"
            elif child["limit_s"] and time.monotonic() - child["began"] > child["limit_s"]:
                child["killed_for"] = child["killed_for"] or "timeout"
            if child["killed_for"]:
                _kill(pid)
    for pid in list(children):
        _kill(pid)


def _reap(children: dict[int, dict[str, Any]], answers: int) -> None:
    """Report how children have ended, and kill the processes that they left."""
    while children:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        child = children.pop(pid, None)
        if child is not None:
            answer = {
                "number": child["number"], "exit_code": os.waitstatus_to_exitcode(status),
                "killed_for": child["killed_for"], "seconds": time.monotonic() - child["began"],
                "peak_bytes": max(used.ru_maxrss * 1024, child["peak_bytes"]),
            }  # fmt: skip
            os.write(answers, json.dumps(answer).encode() + b"\n")
        for stray in set(_list_children(os.getpid())) - set(children):
            _kill(stray)


def _run(task: dict[str, Any], server: int) -> NoReturn:
    """Run the child: set bounds, run the task, write its answer to a file. Never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(server)
        quiet, errors = os.open(os.devnull, os.O_RDWR), os.dup(2)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        # RLIMIT_DATA counts the process's private memory, as RLIMIT_AS does, but not mapped libraries and files.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        bounds = {resource.RLIMIT_DATA: task["memory_bytes"], resource.RLIMIT_FSIZE: task["most_file_bytes"]}
        for limit, most in bounds.items():
            if most:
                resource.setrlimit(limit, (most, most))
        module, _, function = task["function"].rpartition(".")
        answer = getattr(import_module(module), function)(**task["arguments"])
        write_text(Path(task["answer"]), json.dumps(answer))
        code = 0
    except BaseException as error:  # noqa: BLE001 - the child ends here: its traceback is kept
        code = NO_ROOM_CODE if isinstance(error, OSError) and error.errno in FULL else 1
        with suppress(OSError, MemoryError):
            os.write(errors, traceback.format_exc(limit=-30).encode())
    finally:
        os._exit(code)


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _list_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _held_bytes(pid: int) -> int:
    """Return the memory of a process and all that it started, with pages of files; 0 where it is unknown."""
    try:
        held = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
    return held + sum(map(_held_bytes, _list_children(pid)))


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # the output of a library must not look like an answer
    for call in sys.argv[1:]:
        module, *words = call.split(":")
        import_module(module).warm_up(*words)
    gc.collect()
    gc.freeze()
    serve(requests, answers)


if __name__ == "__main__":
    main()


ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MALLOC_ARENA_MAX": "2",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The server's environment: who forks must have one thread, and memory must come from the system to be counted."""


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    function: str
    """`package.module.function`; it returns what JSON can hold."""

    arguments: dict[str, Any] = field(default_factory=dict)
    answer: str
    """The file that gets what the function returns."""

    limit_s: float | None = None
    memory_bytes: int | None = None
    most_file_bytes: int | None = None


@dataclass(frozen=True)
class ChildEnd:
    task: ChildTask
    exit_code: int
    """0 where the task's answer is complete."""

    killed_for: str
    """`timeout`, `memory`, or nothing."""

    seconds: float
    peak_bytes: int


class ChildPool:
    """Runs tasks in `size` children side by side."""

    def __init__(self, size: int, *, warmed: Iterable[str], errors: Path) -> None:
        """Call `module.warm_up(word, ...)` once for all children, for each `module:word:...` of `warmed`.

        `errors` gets what libraries print.
        """
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._size, self._errors = size, errors
        with errors.open("ab") as stream:
            self._server = TiedPopen(
                [sys.executable, "-m", __name__, *warmed], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stream, env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> ChildPool:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # the server has ended already
                    stream.close()
        self._server.wait()

    def run(self, tasks: Iterable[ChildTask]) -> Iterator[ChildEnd]:
        """Yield the end of each task, in the order in which they end. A task is taken only when a child is free.
        Raise MachineError where the server was killed.
        """
        running: dict[int, ChildTask] = {}
        assert self._server.stdin is not None
        for number, task in enumerate(tasks):
            running[number] = task
            request = {"number": number, **asdict(task)}
            try:
                self._server.stdin.write(json.dumps(request).encode() + b"\n")
                self._server.stdin.flush()
            except BrokenPipeError:
                raise self._describe_end() from None
            if len(running) == self._size:
                yield self._wait(running)
        while running:
            yield self._wait(running)

    def _wait(self, running: dict[int, ChildTask]) -> ChildEnd:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise self._describe_end()
        answer = json.loads(line)
        return ChildEnd(task=running.pop(answer.pop("number")), **answer)

    def _describe_end(self) -> MachineError:
        code = self._server.wait()
        last_line = self._errors.read_text(errors="replace").strip().rpartition("\n")[2]
        what = f"the process that starts readers has ended (code {code}{': ' + last_line if last_line else ''})"
        return MachineError(what, where="ingest", fix="free memory; the same command goes on where this one stopped")
