"""Answers to copies of a task, turned back and counted: which answers stand first, and which tasks are solved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.arc.augment import parse_name
from sftplay.data.puzzles.arc.canvas import cropped
from sftplay.data.puzzles.arc.task import Grid, Task

KS = (1, 2, 10, 100, 1000)


@dataclass(frozen=True)
class Answer:
    """What a model says to one test input of one copy."""

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


@dataclass
class _Votes:
    grid: Grid
    confidences: list[float] = field(default_factory=list)


Ballots = dict[tuple[str, bytes], list[Candidate]]
"""Task and test input -> the answers, the first the best."""


def count_votes(answers: Iterable[Answer]) -> Ballots:
    """The answers to each test input: most votes first, then the highest mean confidence.

    An empty answer has no vote.
    """
    boxes: dict[tuple[str, bytes], dict[bytes, _Votes]] = {}
    for answer in answers:
        task, change = parse_name(answer.identifier)
        box = boxes.setdefault((task, grid_key(change.undo(cropped(answer.inputs)))), {})
        grid = change.undo(cropped(answer.predicted))
        if grid.size:
            box.setdefault(grid_key(grid), _Votes(grid)).confidences.append(_sigmoid(answer.q_halt))
    return {place: _ranked(list(box.values())) for place, box in boxes.items()}


def solved_at(task: Task, ballots: Ballots) -> float:
    """The least k with which the task is solved: each test input has its output among its first k; inf for never."""
    ranks = []
    for pair in task.test:
        ranked = ballots.get((task.id, grid_key(pair.input)), [])
        keys = [grid_key(candidate.grid) for candidate in ranked]
        right = grid_key(pair.output)
        ranks.append(keys.index(right) + 1 if right in keys else math.inf)
    return max(ranks)


def pass_at(tasks: Mapping[str, Task], ballots: Ballots, *, ks: Sequence[int] = KS) -> dict[int, float]:
    """The share of all tasks that is solved with k tries."""
    needed = np.array([solved_at(task, ballots) for task in tasks.values()])
    return {k: float((needed <= k).mean()) for k in ks}


def grid_key(grid: Grid) -> bytes:
    """The same for equal grids only."""
    return bytes(grid.shape) + grid.astype(np.uint8).tobytes()


def _ranked(found: list[_Votes]) -> list[Candidate]:
    candidates = [
        Candidate(each.grid, len(each.confidences), math.fsum(each.confidences) / len(each.confidences))
        for each in found
    ]
    return sorted(candidates, key=lambda each: (-each.votes, -each.confidence, grid_key(each.grid)))


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
