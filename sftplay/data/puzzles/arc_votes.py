"""Votes over the answers to the copies of a task of ARC."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.arc import ArcTask, Grid, cropped, parse_name, parse_task
from sftplay.errors import DataError

NAMES = "identifiers.json"
"""The name of each identifier; see `arc.Change.name`."""

ASKED = "test_puzzles.json"
"""The tasks of the test, by their names."""

BLANK = "<blank>"


def read_names(split: Path) -> list[str]:
    """Read the names of the identifiers of a split, next to its folder `split`; raise DataError without them."""
    names = _read(split, NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _fault(split.parent / NAMES, "is no list of names")
    return names


def read_asked(split: Path) -> dict[str, ArcTask]:
    """Read the tasks of the test pairs of a split, next to its folder `split`; raise DataError without them."""
    path, tasks = split.parent / ASKED, _read(split, ASKED)
    if not isinstance(tasks, dict) or not tasks:
        raise _fault(path, "holds no tasks")
    return {name: parse_task(task, name, where=f"{path} {name}") for name, task in tasks.items()}


def _read(split: Path, name: str) -> Any:
    path = split.absolute().parent / name
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _fault(path, "is missing") from None
    except (ValueError, RecursionError):
        raise _fault(path, "is no JSON") from None


def _fault(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), fix="write the folder again with make puzzle-data KIND=arc")


KS = (1, 2, 10, 100, 1000)


@dataclass(frozen=True)
class CopyAnswer:
    """The answer of a model to one test input of one copy."""

    identifier: str
    """The copy's name, as `identifiers.json` has it."""

    inputs: NDArray[Any]
    """[900]: the tokens of the question."""

    predicted: NDArray[Any]
    """[900]: the tokens of the answer."""

    q_halt: float
    """The score for halting, before the sigmoid."""


@dataclass(frozen=True)
class Candidate:
    """An answer to a test input with its votes."""

    grid: Grid
    votes: int
    confidence: float
    """The mean of sigmoid(q_halt)."""


TestInput = tuple[str, bytes]
"""ArcTask and test input."""

Ballots = dict[TestInput, list[Candidate]]
"""Test input -> the answers, the first the best."""


class Tally:
    """The votes for each answer to each test input, while they come in. An empty answer has no vote."""

    def __init__(self) -> None:
        self.boxes: dict[TestInput, dict[bytes, tuple[Grid, list[float]]]] = {}
        """Test input -> key of an answer -> the answer, and the confidences of its votes."""

    def add(self, answer: CopyAnswer) -> None:
        task, change = parse_name(answer.identifier)
        box = self.boxes.setdefault((task, grid_key(change.undo(cropped(answer.inputs)))), {})
        grid = change.undo(cropped(answer.predicted))
        if grid.size:
            score = math.exp(-abs(answer.q_halt))  # exp(x) with x <= 0 cannot overflow
            sigmoid = (1 if answer.q_halt >= 0 else score) / (1 + score)
            box.setdefault(grid_key(grid), (grid, []))[1].append(sigmoid)

    def shares(self, n: int) -> list[Tally]:
        """Return the same votes in `n` tallies. All votes for a task are in the one that `assign_share` names."""
        found = [Tally() for _ in range(n)]
        for question, box in self.boxes.items():
            found[assign_share(question[0], n)].boxes[question] = box
        return found

    def merge(self, other: Tally) -> None:
        for question, other_box in other.boxes.items():
            box = self.boxes.setdefault(question, {})
            for key, (grid, confidences) in other_box.items():
                box.setdefault(key, (grid, []))[1].extend(confidences)

    def ballots(self) -> Ballots:
        """Return the answers to each test input: most votes first, then the highest mean confidence."""
        ballots = {}
        for question, box in self.boxes.items():
            found = ((len(votes), math.fsum(votes) / len(votes), key, grid) for key, (grid, votes) in box.items())
            ranked = sorted(found, key=lambda answer: (-answer[0], -answer[1], answer[2]))
            ballots[question] = [Candidate(grid, n, confidence) for n, confidence, _, grid in ranked]
        return ballots


def assign_share(task: str, n: int) -> int:
    """Return which of `n` shares the votes for a task belong to: the same in every process."""
    return zlib.crc32(task.encode()) % n


def compute_ranks(task: ArcTask, ballots: Ballots) -> list[float]:
    """Compute for each test input the least k with its output among the first k answers; inf for never."""
    ranks: list[float] = []
    for pair in task.test:
        keys = [grid_key(candidate.grid) for candidate in ballots.get((task.id, grid_key(pair.input)), [])]
        right = grid_key(pair.output)
        ranks.append(keys.index(right) + 1 if right in keys else math.inf)
    return ranks


def share_solved(tries: Sequence[float], *, ks: Sequence[int] = KS) -> dict[int, float]:
    """Return the share of tasks that is solved with k tries, from the least k of each."""
    needed = np.array(tries)
    return {k: float((needed <= k).mean()) for k in ks}


def share_of_inputs_solved(ranks: Sequence[Sequence[float]], *, ks: Sequence[int] = KS) -> dict[int, float]:
    """Return the mean over tasks of the share of test inputs that is solved with k tries, from the least k of each.

    TRM's published figures count so (evaluators/arc.py): half a task of two test inputs is half a point.
    """
    return {k: float(np.mean([(np.array(task_ranks) <= k).mean() for task_ranks in ranks])) for k in ks}


def grid_key(grid: Grid) -> bytes:
    """Return the same for equal grids only."""
    return bytes(grid.shape) + grid.astype(np.uint8).tobytes()
