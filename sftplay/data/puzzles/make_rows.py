"""Sudoku and mazes: from files of texts to both splits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.data.puzzles.folder import Group, write_folder
from sftplay.data.puzzles.kind import PuzzleKind
from sftplay.data.puzzles.make_checks import KINDS, PuzzleKeys, PuzzleSettings, check_held_out, check_puzzles
from sftplay.data.puzzles.make_texts import Puzzles, find_files, read_puzzles
from sftplay.data.puzzles.sampler import make_generator
from sftplay.errors import ConfigError, DataError

KeyedPuzzles = tuple[Puzzles, PuzzleKeys]


def write_rows(settings: PuzzleSettings, folder: Path) -> dict[str, Any]:
    """Write the splits `train` and `test` below `folder`; return what the report adds to their counts.
    Raise ConfigError where a setting does not fit the data, DataError where a file cannot be used.
    """
    kind = KINDS[settings.kind]
    copies = kind.copies if settings.copies is None else settings.copies
    if kind.most_copies is not None and copies > kind.most_copies:
        what = f"is {copies:,}; a {settings.kind} has {kind.most_copies} copies that differ"
        raise ConfigError(what, where="--aug", fix=f"take up to {kind.most_copies}")
    assert settings.source is not None
    train, test = _read_splits(settings, kind, files=find_files(settings.source))
    check_held_out(train, test, kind=kind)
    for split, puzzles, n in (("train", train[0], copies), ("test", test[0], 0)):
        (folder / split).mkdir()
        groups = _make_groups(puzzles, kind, copies=n, seed=settings.seed, split=split)
        write_folder(folder / split, groups, alphabet=kind.alphabet)
    shared = int(np.isin(test[1].answers, train[1].answers).sum())
    return {"copies": copies, "test_puzzles_with_a_training_solution": shared}


def _read_splits(
    settings: PuzzleSettings, kind: PuzzleKind, *, files: dict[str, Path]
) -> tuple[KeyedPuzzles, KeyedPuzzles]:
    """Read the puzzles of training and of the test, and check that all can be used."""
    workers = settings.workers
    if "all" not in files:
        train = read_puzzles(files["train"], kind)
        train = train.take(_choose_rows(len(train), settings))
        test = read_puzzles(files["test"], kind)
        keys = check_puzzles(train, kind, workers=workers)
        return (train, keys), (test, check_puzzles(test, kind, workers=workers))
    everything = read_puzzles(files["all"], kind)
    keys = check_puzzles(everything, kind, workers=workers)
    # The solution alone decides, so that all puzzles with one solution are on one side.
    solutions, back = np.unique(keys.answers, return_inverse=True)
    numbers = [make_generator(solution.tobytes(), settings.seed).random() for solution in solutions]
    is_test = (np.array(numbers) < settings.held_out)[back]
    if is_test.all() or not is_test.any():
        side = "training" if is_test.all() else "the test"
        what = f"leaves no puzzle for {side}: {len(everything):,} puzzles, a share of {settings.held_out:g} held out"
        raise DataError(what, where=everything.path, fix="name more puzzles, or another share with --held-out")
    rows = np.flatnonzero(~is_test)
    rows = rows[_choose_rows(len(rows), settings)]
    return (everything.take(rows), keys.take(rows)), (everything.take(is_test), keys.take(is_test))


def _choose_rows(n: int, settings: PuzzleSettings) -> NDArray[np.int64]:
    """Choose the training puzzles that are used, in the order of the file."""
    if settings.subsample is None:
        return np.arange(n)
    if not 0 < settings.subsample <= n:
        what = f"is {settings.subsample:,}; there are {n:,} training puzzles"
        raise ConfigError(what, where="--subsample", fix=f"take 1 to {n}, or leave it out")
    return np.sort(make_generator(b"subsample", settings.seed).permutation(n)[: settings.subsample])


def _make_groups(puzzles: Puzzles, kind: PuzzleKind, *, copies: int, seed: int, split: str) -> Iterator[Group]:
    """Yield each original with its copies behind it, as tokens."""
    for done, (question, answer) in enumerate(zip(puzzles.questions, puzzles.answers, strict=True), 1):
        pair = np.stack([question, answer])
        none = (pair[:0], pair[:0])
        made = kind.make_copies(pair, copies, stream=make_generator(question.tobytes(), seed)) if copies else none
        inputs, labels = (np.concatenate([one[None], more]) + np.uint8(1) for one, more in zip(pair, made, strict=True))
        yield Group(inputs, labels)
        if done % 100 == 0 or done == len(puzzles):
            log.progress(done, len(puzzles), what=f"writing {split}", tag="puzzle-data")
