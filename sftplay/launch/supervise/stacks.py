"""Stacks of a run's ranks: on a signal of its parent a rank writes the stacks of its threads to logs/rankN.stacks.

This works even while a rank is in foreign code that never returns, with or without the interpreter's lock. This module
does not judge which rank is at fault.
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

STACKS_SIGNAL = signal.SIGUSR2

ANSWER_S = 2.0
"""How long an answer may take. A process that is stopped or waits inside the kernel does not answer."""

SETTLED_S = 0.1
"""A stack file that has grown and then stays the same for this long is complete. Writing one takes a millisecond."""

COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""Every collective that Python code starts goes through this file of torch."""

NATIVE_COLLECTIVES = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py", "torch/autograd/graph.py")
"""DDP starts collectives in native code from these files: buffers before the forward pass, gradients inside the
backward pass. A rank whose innermost call is in one of them may wait in a collective or may compute."""

_FRAME = re.compile(r'  File "(.*)", line \S+ in .*')


@dataclass(frozen=True)
class Stack:
    """The stack of a process's main thread."""

    lines: tuple[str, ...] = ()
    """Innermost call first, as `faulthandler` writes them. Empty: there was no answer."""

    @property
    def is_in_collective(self) -> bool:
        return any(file.endswith(COLLECTIVES) for file in self._files())

    @property
    def may_be_in_collective(self) -> bool:
        return any(file.endswith(NATIVE_COLLECTIVES) for file in self._files()[:1])

    def _files(self) -> list[str]:
        return [match[1] for line in self.lines if (match := _FRAME.fullmatch(line))]


def stacks_path(logs: Path, rank: int) -> Path:
    """Where rank `rank` writes its stacks; `logs` is the run's folder of logs."""
    return logs / f"rank{rank}.stacks"


def answer_with_stacks(logs: Path, rank: int) -> None:
    """Make this process answer `STACKS_SIGNAL` with the stacks of all its threads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    faulthandler.register(STACKS_SIGNAL, file=os.open(stacks_path(logs, rank), flags, 0o644), all_threads=True)


def ask_for_stacks(logs: Path, pids: Mapping[int, int]) -> dict[int, Stack]:
    """Rank -> the present stack of its main thread. `pids` are the processes of the ranks. Takes at most `ANSWER_S`."""
    files = {rank: stacks_path(logs, rank) for rank in pids}
    old_sizes = {rank: path.stat().st_size for rank, path in files.items() if path.exists()}
    for rank in old_sizes:  # a rank without its file does not handle the signal yet, and would die of it
        with suppress(ProcessLookupError):
            os.kill(pids[rank], STACKS_SIGNAL)
    _await_growth({files[rank]: size for rank, size in old_sizes.items()})
    stacks = dict.fromkeys(pids, Stack())
    for rank, size in old_sizes.items():
        stacks[rank] = main_stack(files[rank].read_bytes()[size:].decode("utf-8", "replace"))
    return stacks


def main_stack(text: str) -> Stack:
    """The main thread's part of one answer. It is the last part: threads are listed from the newest to the oldest.

    Source: _Py_DumpTracebackThreads in CPython's Python/traceback.c. After a hundred threads it writes "..." and leaves
    the others out. Then the main thread's stack is not known.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            lines.append(line)
        elif line:
            lines = []
    return Stack(tuple(lines))


def _await_growth(old_sizes: Mapping[Path, int]) -> None:
    """Wait until all files have grown and no longer change."""
    deadline = time.monotonic() + ANSWER_S
    previous: dict[Path, int] = {}
    while time.monotonic() < deadline:
        sizes = {path: path.stat().st_size for path in old_sizes}
        if sizes == previous and all(sizes[path] > size for path, size in old_sizes.items()):
            return
        previous = sizes
        time.sleep(SETTLED_S)
