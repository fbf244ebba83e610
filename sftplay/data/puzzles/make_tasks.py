"""ARC: from folders of json files to both splits, with the names of all copies and the tasks of the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sftplay import log
from sftplay.data.puzzles.arc import (
    ALPHABET,
    LARGEST,
    ArcTask,
    Change,
    GridPair,
    as_json,
    canonical,
    on_canvas,
    read_tasks,
    sample_changes,
)
from sftplay.data.puzzles.arc_votes import ASKED, BLANK, NAMES
from sftplay.data.puzzles.folder import Group, SplitWriter
from sftplay.data.puzzles.make_checks import PuzzleSettings, killed_process
from sftplay.data.puzzles.sampler import make_generator
from sftplay.data.tokenize.pool import work_through
from sftplay.errors import ConfigError, DataError, SeveralErrors

WORTH_WORKERS = 2000
"""Below this number of copies in all, starting processes takes longer than the work."""


class CopyJob(NamedTuple):
    task: ArcTask
    copies: int
    seed: int
    is_asked: bool
    """Its test pairs go to the test."""


TaskCopies = tuple[list[str], Group, Group | None]
"""The names of a task's copies, and the copies as tokens: of the pairs for training, and of those for the test."""


def write_tasks(settings: PuzzleSettings, folder: Path) -> dict[str, Any]:
    """Write the splits `train` and `test` below `folder`, and what `arc_votes` reads; return what the report adds.
    Raise ConfigError where a setting does not fit, DataError where a file holds no task, or a task is in both parts.

    Training has all pairs of the training tasks and the demonstrations of the evaluation tasks, the test has the test
    pairs of the evaluation tasks, both with all copies. A task has the same identifiers in both. HRM and TRM divide
    the pairs so (dataset/build_arc_dataset.py).
    """
    assert settings.source is not None
    if settings.subsample is not None:
        raise ConfigError("does not fit ARC: take json files out instead", where="--subsample", fix="leave it out")
    copies = 1000 if settings.copies is None else settings.copies
    training, evaluation = (read_tasks(_find_part(settings.source, part)) for part in ("training", "evaluation"))
    repeated = check_tasks(training, evaluation)
    jobs = [CopyJob(task, copies, settings.seed, is_asked=False) for task in training]
    jobs += [CopyJob(task, copies, settings.seed, is_asked=True) for task in evaluation]
    writers = {}
    for split in ("train", "test"):
        (folder / split).mkdir()
        writers[split] = SplitWriter(folder / split, ALPHABET)
    names = [BLANK]
    parallel = work_through(jobs, make_copies, processes=settings.workers, killed=killed_process())
    is_worth = settings.workers > 1 and copies * len(jobs) >= WORTH_WORKERS
    for done, (copied, train, test) in enumerate(parallel if is_worth else map(make_copies, jobs), 1):
        identifiers = range(len(names), len(names) + len(copied))
        names += copied
        for split, group in (("train", train), ("test", test)):
            if group is not None:
                writers[split].add(Group(group.inputs, group.labels, group.sizes, identifiers))
        log.progress(done, len(jobs), what="writing tasks", tag="puzzle-data")
    for writer in writers.values():
        writer.finish(len(names))
    (folder / NAMES).write_text(json.dumps(names), encoding="utf-8")
    (folder / ASKED).write_text(json.dumps({task.id: as_json(task) for task in evaluation}), encoding="utf-8")
    return {"copies": copies, "training_tasks": len(training), "evaluation_tasks": len(evaluation), **repeated}


def _find_part(source: Path, part: str) -> Path:
    """Return the folder of the tasks: below IN, or below its `data`, as ARC's own repository has it."""
    return next((path for path in (source / part, source / "data" / part) if path.is_dir()), source / part)


def check_tasks(training: list[ArcTask], evaluation: list[ArcTask]) -> dict[str, Any]:
    """Report the test pairs of the evaluation that are copies of a learned pair, of their own task or of another.
    Raise SeveralErrors where tasks of training and of the evaluation have one name.

    Published tasks have both: of ARC-AGI-1 a pair of 50a16a69 is one of caa06a1f in other colours, and each pair of
    070dd51e is one of 40853293.
    """
    both = {task.id for task in training} & {task.id for task in evaluation}
    if both:
        what, fix = "is a task of training and of the evaluation", "take one of them out"
        raise SeveralErrors([DataError(what, where=name, fix=fix) for name in sorted(both)])
    learned: dict[bytes, set[str]] = {}
    for task, pairs in [(t, t.pairs) for t in training] + [(t, t.train) for t in evaluation]:
        for pair in pairs:
            learned.setdefault(canonical(pair), set()).add(task.id)
    demonstrated, others = 0, []
    for task in evaluation:
        like = [learned.get(canonical(pair), set()) for pair in task.test]
        demonstrated += sum(task.id in names for names in like)
        others += [
            {"task": task.id, "test_pair": number, "like": sorted(names - {task.id})}
            for number, names in enumerate(like, 1)
            if names - {task.id}
        ]
    counts = {"test_pairs_like_a_demonstration": demonstrated, "test_pairs_like_another_task": len(others)}
    return {**counts, "like_another_task": others}


def make_copies(job: CopyJob) -> TaskCopies:
    """Return a task's copies: learned pairs that lie anywhere on the canvas, asked ones that lie in its corner."""
    task, stream = job.task, make_generator(job.task.id.encode(), job.seed)
    changes = sample_changes(task, job.copies, stream=stream)
    learned = task.train if job.is_asked else task.pairs
    rows = [row for change in changes for row in _place_pairs(learned, change, stream=stream)]
    train, test = _to_group(rows, [len(learned)] * len(changes)), None
    if job.is_asked:
        rows = [(change, pair, 0, 0) for change in changes for pair in task.test]
        test = _to_group(rows, [len(task.test)] * len(changes))
    return [change.name(task.id) for change in changes], train, test


PlacedPair = tuple[Change, GridPair, int, int]
"""A pair with its change, and the row and column of its corner."""


def _place_pairs(pairs: tuple[GridPair, ...], change: Change, *, stream: np.random.Generator) -> list[PlacedPair]:
    """Return the pairs of a copy at random places; one of them stays in the corner, where the test pairs lie."""
    stays = int(stream.integers(len(pairs)))
    placed = []
    for number, pair in enumerate(pairs):
        shapes = [change.apply(grid).shape for grid in (pair.input, pair.output)]
        room = [LARGEST + 1 - max(shape[axis] for shape in shapes) for axis in (0, 1)]
        top, left = (int(stream.integers(size)) for size in room)
        placed.append((change, pair, 0, 0) if number == stays else (change, pair, top, left))
    return placed


def _to_group(rows: list[PlacedPair], sizes: list[int]) -> Group:
    inputs, labels = (
        np.stack([on_canvas(change.apply(getattr(pair, side)), top=top, left=left) for change, pair, top, left in rows])
        for side in ("input", "output")
    )
    return Group(inputs, labels, sizes)
