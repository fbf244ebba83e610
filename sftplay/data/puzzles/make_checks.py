"""Settings of a folder of puzzles, and the checks of its puzzles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.data.puzzles.kind import Cells, PuzzleKind
from sftplay.data.puzzles.make_texts import FIX_LINE, Puzzles
from sftplay.data.puzzles.maze import Maze
from sftplay.data.puzzles.sudoku import Sudoku
from sftplay.data.tokenize.pool import work_through
from sftplay.errors import MOST_PROBLEMS, DataError, MachineError, SeveralErrors


@dataclass(frozen=True, kw_only=True)
class PuzzleSettings:
    kind: str
    source: Path | None
    """A file or a folder; None for puzzles that need none."""

    out: Path
    copies: int | None = None
    """Augmented copies of each original; None takes the kind's usual number."""

    seed: int = 0
    subsample: int | None = None
    """Number of training puzzles to sample; None takes all."""

    held_out: float = 0.1
    """The share of the solutions of a single file that goes to the test."""

    workers: int = 1


KINDS: dict[str, PuzzleKind] = {"sudoku": Sudoku(), "maze": Maze()}
CHUNK_PUZZLES = 2048
"""Puzzles that a process checks at once."""

WORTH_WORKERS = 8 * CHUNK_PUZZLES
"""Below this number of puzzles, starting processes takes longer than the work."""


class PuzzleKeys(NamedTuple):
    """Numbers that copies of each other share, for each puzzle."""

    questions: NDArray[np.uint64]
    answers: NDArray[np.uint64]

    def take(self, rows: NDArray[Any]) -> PuzzleKeys:
        return PuzzleKeys(self.questions[rows], self.answers[rows])


def check_puzzles(puzzles: Puzzles, kind: PuzzleKind, *, workers: int) -> PuzzleKeys:
    """Return the keys of puzzles; raise SeveralErrors, with file and line, for up to a hundred that cannot be used."""
    name, total = kind.alphabet.kind, len(puzzles)
    starts = range(0, total, CHUNK_PUZZLES)
    parts = (slice(at, at + CHUNK_PUZZLES) for at in starts)
    chunks = ((name, puzzles.questions[part], puzzles.answers[part]) for part in parts)
    parallel = work_through(chunks, check_chunk, processes=workers, killed=killed_process())
    outcomes = parallel if workers > 1 and total >= WORTH_WORKERS else map(check_chunk, chunks)
    problems, keys = [], []
    for start, (found, marks) in zip(starts, outcomes, strict=True):
        problems += [DataError(what, where=puzzles.place(start + row), fix=FIX_LINE) for row, what in found]
        keys.append(marks)
        log.progress(min(start + CHUNK_PUZZLES, total), total, what=f"checking {puzzles.path}", tag="puzzle-data")
        if len(problems) > MOST_PROBLEMS:
            break
    parallel.close()
    if problems:
        raise SeveralErrors(problems)
    return PuzzleKeys(*(np.concatenate(parts) for parts in zip(*keys, strict=True)))


def killed_process() -> MachineError:
    fix = "free memory, or take fewer processes with --workers"
    return MachineError("a process that prepares puzzles was killed from outside", where="puzzle-data", fix=fix)


def check_chunk(chunk: tuple[str, Cells, Cells]) -> tuple[list[tuple[int, str]], PuzzleKeys]:
    """Return the problems of a chunk, or the keys of its questions and answers if it has none."""
    name, questions, answers = chunk
    kind, none = KINDS[name], np.zeros(0, np.uint64)
    if problems := list(kind.problems(questions, answers)):
        return problems, PuzzleKeys(none, none)
    return [], PuzzleKeys(kind.question_keys(questions), kind.answer_keys(answers))


def check_held_out(train: tuple[Puzzles, PuzzleKeys], test: tuple[Puzzles, PuzzleKeys], *, kind: PuzzleKind) -> None:
    """Raise SeveralErrors, each with both lines, where a question of the test is a copy of one of training."""
    (train_puzzles, train_keys), (test_puzzles, test_keys) = train, test
    order = np.argsort(train_keys.questions, kind="stable")
    sorted_keys = train_keys.questions[order]
    begins = np.searchsorted(sorted_keys, test_keys.questions, side="left")
    ends = np.searchsorted(sorted_keys, test_keys.questions, side="right")
    problems = []
    for row in np.flatnonzero(ends > begins).tolist():
        question, others = test_puzzles.questions[row], order[begins[row] : ends[row]].tolist()
        like = next((other for other in others if kind.is_copy(train_puzzles.questions[other], question)), None)
        if like is not None:
            what = f"is a copy of the training puzzle {train_puzzles.place(like)}"
            problems.append(DataError(what, where=test_puzzles.place(row), fix="take one of the two out"))
        if len(problems) > MOST_PROBLEMS:
            break
    if problems:
        raise SeveralErrors(problems)
