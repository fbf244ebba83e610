"""The process that forks a child for each task, watches its time and memory, and kills it with all that it started.

It is started by `pool`, has one thread and imports only what readers need, so that a child costs a fork and no import.
Tasks come as lines of JSON on its standard input; a line of JSON on its standard output reports how each child ended.
The child writes the result of its task into a file.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from sftplay.atomic import write_text
from sftplay.signals import die_with_parent

PR_SET_CHILD_SUBREAPER = 36

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ROOM_CODE = 28
"""Exit code of a child that found the disk full. The file that it reads is not at fault."""


@dataclass
class Child:
    """A running child and its bounds."""

    number: int
    began: float
    limit_s: float | None
    memory_bytes: int | None
    peak_bytes: int = 0
    killed_for: str = ""


def serve(requests: int, answers: int) -> None:
    """Start the requested tasks until the request pipe is closed."""
    children: dict[int, Child] = {}
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
                children[pid] = Child(task["number"], time.monotonic(), task["limit_s"], task["memory_bytes"])
        _reap(children, answers)
        for pid, child in children.items():
            held = _held_bytes(pid)
            child.peak_bytes = max(child.peak_bytes, held)
            if child.memory_bytes and held > child.memory_bytes:
                child.killed_for = "memory"
            elif child.limit_s and time.monotonic() - child.began > child.limit_s:
                child.killed_for = child.killed_for or "timeout"
            if child.killed_for:
                _kill(pid)
    for pid in list(children):
        _kill(pid)


def _reap(children: dict[int, Child], answers: int) -> None:
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
                "number": child.number, "exit_code": os.waitstatus_to_exitcode(status), "killed_for": child.killed_for,
                "seconds": time.monotonic() - child.began, "peak_bytes": max(used.ru_maxrss * 1024, child.peak_bytes),
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
