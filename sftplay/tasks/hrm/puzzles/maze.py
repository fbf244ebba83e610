"""Mazes: what makes a row of a file unusable, and its copies."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sftplay.tasks.hrm.puzzles.arc import WAYS, turned
from sftplay.tasks.hrm.puzzles.folder import Alphabet, Cells

SIZE = 30
WALL, FREE, START, GOAL, WAY = range(5)


class Maze:
    """`#` is a wall, S the start, G the goal; in the answer `o` marks the cells of the way."""

    alphabet = Alphabet(kind="maze", symbols="?# SGo", shape=(SIZE, SIZE))
    copies = 0
    most_copies: int | None = 7
    also_blank = ""

    def problems(self, questions: Cells, answers: Cells) -> Iterator[tuple[int, str]]:
        """Questions without one start, one goal and a way; answers that are not the maze with a shortest way."""
        for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            if what := _find_problem(question, answer):
                yield row, what

    def question_keys(self, questions: Cells) -> NDArray[np.uint64]:
        digests = [hashlib.blake2b(_find_smallest(question), digest_size=8).digest() for question in questions]
        return np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)

    def answer_keys(self, answers: Cells) -> NDArray[np.uint64]:
        return self.question_keys(answers)

    def is_copy(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
        """Return whether the one maze is the other, turned or mirrored."""
        return _find_smallest(one) == _find_smallest(other)

    def make_copies(self, pair: Cells, n: int, *, stream: np.random.Generator) -> tuple[Cells, Cells]:
        """Return one to seven copies, each turned or mirrored in another way."""
        ways = 1 + stream.permutation(7)[:n]
        grids = pair.reshape(2, SIZE, SIZE)
        questions, answers = (np.stack([turned(grid, int(way)).ravel() for way in ways]) for grid in grids)
        return questions, answers


def _find_problem(question: NDArray[np.uint8], answer: NDArray[np.uint8]) -> str:
    for cell, name in ((START, "S"), (GOAL, "G")):
        if (question == cell).sum() != 1:
            return f"the question has {(question == cell).sum()} cells {name}, not one"
    if (question == WAY).any():
        return "the question has cells o, which only an answer has"
    changed = np.flatnonzero((question != answer) & ~((question == FREE) & (answer == WAY)))
    if len(changed):
        row, column = divmod(int(changed[0]), SIZE)
        return f"the answer changes the maze in row {row + 1}, column {column + 1}"
    shortest = _count_steps(question != WALL, question)
    if shortest is None:
        return "the question has no way from S to G"
    if _count_steps((answer == WAY) | (answer == GOAL), question) is None:
        return "the answer's cells o do not lead from S to G"
    length = int((answer == WAY).sum()) + 1
    if length != shortest:
        return f"the answer's way takes {length} steps, the shortest one {shortest}"
    return ""


def _count_steps(is_open: NDArray[np.bool_], question: NDArray[np.uint8]) -> int | None:
    """Count the steps from the start to the goal over open cells; None where there is no way."""
    width = SIZE + 2  # a wall around the maze
    closed = np.ones((width, width), bool)
    closed[1:-1, 1:-1] = ~is_open.reshape(SIZE, SIZE)
    seen: list[bool] = closed.ravel().tolist()
    ends = (divmod(int(np.argmax(question == cell)), SIZE) for cell in (START, GOAL))
    start, goal = ((row + 1) * width + column + 1 for row, column in ends)
    if seen[goal]:
        return None
    waiting = deque([(start, 0)])
    while waiting:
        cell, steps = waiting.popleft()
        for neighbour in (cell - 1, cell + 1, cell - width, cell + width):
            if neighbour == goal:
                return steps + 1
            if not seen[neighbour]:
                seen[neighbour] = True
                waiting.append((neighbour, steps + 1))
    return None


def _find_smallest(cells: NDArray[np.uint8]) -> bytes:
    grid = cells.reshape(SIZE, SIZE)
    return min(np.ascontiguousarray(turned(grid, way)).tobytes() for way in WAYS)
