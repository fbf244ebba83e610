"""Processes that work on batches side by side and hand the outcomes back in order.

They are spawned, not forked, so they hold neither torch nor the caller's memory. For small inputs the caller does the
work itself.
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
from sftplay.data.prepare.batch import RawRow, RowOptions, RowOutcome, RowProcessor
from sftplay.data.read.files import files_of
from sftplay.data.read.sources import is_hub_name
from sftplay.errors import MachineError
from sftplay.machine.probe import usable_cores
from sftplay.signals import die_with_parent

WORTH_WORKERS_BYTES = 4 << 20
"""Below this size, starting processes takes longer than the work."""

MOST_WORKERS = 6
"""More workers would only wait for the one process that reads and writes."""

BATCHES_AHEAD = 2
"""Batches in flight for each process: enough to keep it busy, few enough to bound memory."""

UNPACKED = {".gz": 5, ".parquet": 4}
"""About how much larger the rows are than a file of that kind."""

Work = tuple[list[RawRow], float]
"""A batch and the share of its prompts that is held out."""

SHARED_SIGNALS = (signal.SIGINT, signal.SIGUSR1)
"""Signals that a terminal or a scheduler sends to all processes; only the parent answers them."""

_processor: list[RowProcessor] = []
"""What a started process works with; empty in every other process."""


def n_workers(paths: Iterable[str]) -> int:
    """How many processes are worth starting for these inputs; 1 means none beside the caller."""
    named = list(paths)
    if any(is_hub_name(path) for path in named):
        return min(usable_cores(), MOST_WORKERS)
    n_bytes = sum(_unpacked_bytes(file) for path in named for file in files_of(path))
    return 1 if n_bytes < WORTH_WORKERS_BYTES else min(usable_cores(), MOST_WORKERS)


def process_all(
    batches: Iterable[Work], renderer: Renderer, *, options: RowOptions, processes: int
) -> Generator[list[RowOutcome]]:
    """The outcomes of each batch, in order; batches are read only a little ahead. Close it to end its processes.

    Raises:
        MachineError: one of the processes was killed.
    """
    if processes == 1:
        processor = RowProcessor(renderer, options)
        yield from (processor.process(rows, share) for rows, share in batches)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(renderer.recipe(), options, os.getpid()),
    )
    try:
        yield from _in_order(pool, batches, most=BATCHES_AHEAD * processes)
    except BrokenProcessPool as error:
        fix = "free memory, or prepare the data on a larger machine with `make process`"
        raise MachineError("a process that tokenises was killed from outside", where="data", fix=fix) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[Work], *, most: int) -> Iterator[list[RowOutcome]]:
    waiting: deque[Future[list[RowOutcome]]] = deque()
    for rows, share in batches:
        with _signals_held_back():  # this may start a process
            waiting.append(pool.submit(_process, rows, share))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block SHARED_SIGNALS; a process that starts meanwhile inherits that, or it could die of one while it imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHARED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(recipe: Recipe, options: RowOptions, parent: int) -> None:
    die_with_parent(parent)
    for stop in SHARED_SIGNALS:  # the parent decides when to stop, and ends this process by SIGTERM
        signal.signal(stop, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the cores are shared out already
    _processor.append(RowProcessor(Renderer.from_recipe(recipe), options))


def _process(rows: list[RawRow], share: float) -> list[RowOutcome]:
    return _processor[0].process(rows, share)


def _unpacked_bytes(file: Path) -> int:
    return file.stat().st_size * UNPACKED.get(file.suffix.lower(), 1)
