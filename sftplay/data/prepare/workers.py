"""Processes that treat batches side by side and hand the outcomes back in order.

They are started anew, not forked, so they hold neither torch nor the caller's memory. Small inputs need none: there
the caller does the work itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from sftplay.data.encode.render import Recipe, Renderer
from sftplay.data.layouts.convert import Reading
from sftplay.data.prepare.batch import Fit, Outcome, RowReport, Treatment
from sftplay.data.read.sources import files_of, is_hub_name
from sftplay.errors import MachineError
from sftplay.machine.probe import usable_cores
from sftplay.signals import die_with_parent

ALONE_BYTES = 4 << 20
"""Below this starting processes takes longer than the work."""

MOST = 6
"""More would only wait for the one process that reads and writes."""

AHEAD = 2
"""Batches in flight for each process: enough to keep it busy, few enough to bound memory."""

UNPACKED = {".gz": 5, ".parquet": 4}
"""About how much larger the rows are than a file of that kind."""

Work = tuple[list[RowReport], float]
"""A batch and the share of its prompts that is held out."""

OURS = (signal.SIGINT, signal.SIGUSR1)
"""Signals that a terminal or a scheduler sends to all processes, and that only the parent answers."""

_treatment: list[Treatment] = []
"""What a started process works with; empty in every other process."""


def n_workers(paths: Iterable[str]) -> int:
    """How many processes are worth starting for these inputs; 1 means none beside the caller."""
    named = list(paths)
    if any(is_hub_name(path) for path in named):
        return min(usable_cores(), MOST)
    n_bytes = sum(_unpacked_bytes(file) for path in named for file in files_of(path))
    return 1 if n_bytes < ALONE_BYTES else min(usable_cores(), MOST)


def treat_all(
    batches: Iterable[Work], renderer: Renderer, reading: Reading, fit: Fit, *, processes: int
) -> Generator[list[Outcome]]:
    """The outcomes of each batch, in order; the batches are drawn only a little ahead. Close it to end its processes.

    Raises:
        MachineError: one of the processes was killed.
    """
    if processes == 1:
        treatment = Treatment(renderer, reading, fit)
        yield from (treatment.treat(lines, share) for lines, share in batches)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(renderer.recipe(), reading, fit, os.getpid()),
    )
    try:
        yield from _in_order(pool, batches, AHEAD * processes)
    except BrokenProcessPool as error:
        fix = "free memory, or prepare the data on a larger machine with `make process`"
        raise MachineError("a process that tokenises was killed from outside", where="data", fix=fix) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[Work], most: int) -> Iterator[list[Outcome]]:
    waiting: deque[Future[list[Outcome]]] = deque()
    for lines, share in batches:
        with _deaf():  # this may start a process
            waiting.append(pool.submit(_treat, lines, share))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _deaf() -> Iterator[None]:
    """Hold OURS back: a process started meanwhile never gets them, and would else die of them as it imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(recipe: Recipe, reading: Reading, fit: Fit, parent: int) -> None:
    die_with_parent(parent)
    for stop in OURS:  # the parent decides when to stop, and ends this process by SIGTERM
        signal.signal(stop, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the cores are shared out already
    _treatment.append(Treatment(Renderer.from_recipe(recipe), reading, fit))


def _treat(lines: list[RowReport], share: float) -> list[Outcome]:
    return _treatment[0].treat(lines, share)


def _unpacked_bytes(file: Path) -> int:
    return file.stat().st_size * UNPACKED.get(file.suffix.lower(), 1)
