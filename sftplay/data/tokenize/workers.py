"""Batches of rows become outcomes in processes side by side. For small inputs the caller does the work itself."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable

from sftplay.data.read.files import list_files
from sftplay.data.read.sources import is_hub_name
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.tokenize.batch import RawRow, RowOptions, RowOutcome, RowProcessor
from sftplay.data.tokenize.pool import work_through
from sftplay.errors import MachineError
from sftplay.machine.probe import usable_cores

WORTH_WORKERS_BYTES = 4 << 20  # below this size, starting processes takes longer than the work
MOST_WORKERS = 6  # more workers would only wait for the one process that reads and writes
UNPACKED = {".gz": 5, ".parquet": 4}  # approximate size of the rows relative to a file of that kind
Work = tuple[list[RawRow], float]  # a batch and the share of its prompts that is held out
_processor: list[RowProcessor] = []  # the processor of a started process; empty in every other process


def n_workers(paths: Iterable[str]) -> int:
    """Return how many processes are worth starting for these inputs; 1 means only the caller."""
    named = list(paths)
    if any(is_hub_name(path) for path in named):
        return min(usable_cores(), MOST_WORKERS)
    files = [file for path in named for file in list_files(path)]
    n_bytes = sum(file.stat().st_size * UNPACKED.get(file.suffix.lower(), 1) for file in files)
    return 1 if n_bytes < WORTH_WORKERS_BYTES else min(usable_cores(), MOST_WORKERS)


def process_all(
    batches: Iterable[Work], renderer: Renderer, *, options: RowOptions, processes: int
) -> Generator[list[RowOutcome]]:
    """Yield the outcomes of each batch, in order; batches are read only a little ahead. Close it to end its processes.

    Raises MachineError: one of the processes was killed.
    """
    if processes == 1:
        processor = RowProcessor(renderer, options)
        yield from (processor.process(rows, share) for rows, share in batches)
        return
    fix = "free memory, or prepare the data on a larger machine with `make process`"
    yield from work_through(
        batches,
        _process,
        processes=processes,
        killed=MachineError("a process that tokenises was killed from outside", where="data", fix=fix),
        initializer=_begin,
        initargs=(renderer.recipe(), options),
    )


def _begin(recipe: Recipe, options: RowOptions) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the cores are shared out already
    _processor.append(RowProcessor(Renderer.from_recipe(recipe), options))


def _process(work: Work) -> list[RowOutcome]:
    rows, share = work
    return _processor[0].process(rows, share)
