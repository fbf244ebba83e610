"""Where the threads of a run's ranks stand: a rank writes it into logs/rankN.stacks when its parent asks by a signal.

It works while a rank sits in foreign code that never comes back, with the interpreter's lock held or not. It says what
is seen, not whose fault it is.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ASK = signal.SIGUSR2

ANSWER_S = 2.0
"""How long an answer may take. A process that is stopped, or waits inside the kernel, gives none."""

SETTLED_S = 0.1
"""A file that has grown and stays the same for so long is written; dumps take a millisecond."""

COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""Every rendezvous of ranks that Python code asks for goes through this file of torch."""

MEETINGS_BELOW = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py", "torch/autograd/graph.py")
"""Where DDP's own meetings begin in native code: buffers before the forward pass, gradients inside the backward one.
With nothing above them on the stack a rank may wait there, or may be at work."""

_FRAME = re.compile(r'  File "(.*)", line \S+ in .*')


@dataclass(frozen=True)
class Stack:
    """Where a process's main thread stands."""

    lines: tuple[str, ...] = ()
    """Innermost call first, as `faulthandler` words them. Empty: there was no answer."""

    @property
    def is_in_collective(self) -> bool:
        return any(file.endswith(COLLECTIVES) for file in self._files())

    @property
    def may_be_in_collective(self) -> bool:
        return self._files()[:1] != [] and self._files()[0].endswith(MEETINGS_BELOW)

    def _files(self) -> list[str]:
        return [match[1] for line in self.lines if (match := _FRAME.fullmatch(line))]


def stacks_path(logs: Path, rank: int) -> Path:
    """Where rank `rank` writes its stacks; `logs` is the run's folder of logs."""
    return logs / f"rank{rank}.stacks"


def answer_with_stacks(logs: Path, rank: int) -> None:
    """From here on this process answers `ASK` with the stacks of all its threads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    faulthandler.register(ASK, file=os.open(stacks_path(logs, rank), flags, 0o644), all_threads=True)


def ask_for_stacks(logs: Path, pids: Mapping[int, int]) -> dict[int, Stack]:
    """Rank -> where its main thread stands now; `pids` are the processes of the ranks. Takes at most `ANSWER_S`."""
    files = {rank: stacks_path(logs, rank) for rank in pids}
    before = {rank: path.stat().st_size for rank, path in files.items() if path.exists()}
    for rank in before:  # without its file it does not listen yet, and the signal would end it
        with suppress(ProcessLookupError):
            os.kill(pids[rank], ASK)
    _await_growth({files[rank]: size for rank, size in before.items()})
    return {
        rank: main_stack(path.read_bytes()[before[rank] :].decode("utf-8", "replace")) if rank in before else Stack()
        for rank, path in files.items()
    }


def main_stack(text: str) -> Stack:
    """The main thread's part of one answer: its last one, as threads are listed from the newest to the oldest.

    Source: _Py_DumpTracebackThreads in CPython's Python/traceback.c. Behind a hundred threads it writes "..." and
    leaves the rest out; then nothing is known.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            lines.append(line)
        elif line:
            lines = []
    return Stack(tuple(lines))


def _await_growth(sizes: Mapping[Path, int]) -> None:
    deadline = time.monotonic() + ANSWER_S
    seen: dict[Path, int] = {}
    while time.monotonic() < deadline:
        now = {path: path.stat().st_size for path in sizes}
        if now == seen and all(now[path] > size for path, size in sizes.items()):
            return
        seen = now
        time.sleep(SETTLED_S)
