"""Sudoku on 9x9 grids: what makes a row of a file unusable, and its copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.kind import Cells
from sftplay.data.puzzles.sudoku.solver import find_solutions, units_of
from sftplay.data.puzzles.sudoku.symmetry import draw_changes, is_copy, keys_of
from sftplay.data.puzzles.writer import Alphabet

UNIT_NAMES = ("row", "column", "box")


class Sudoku:
    """9x9 grids; `.` or 0 is a blank."""

    alphabet = Alphabet(kind="sudoku", symbols=" .123456789", shape=(9, 9))
    copies = 1000
    most_copies: int | None = None
    also_blank = "0"

    def problems(self, questions: Cells, answers: Cells) -> Iterator[tuple[int, str]]:
        """Answers with blanks, that break a rule or change a given; questions with none or several solutions."""
        has_blank = (answers == 0).any(axis=1)
        in_units = np.sort(answers[:, units_of(9)], axis=2)
        breaks = (in_units != np.arange(1, 10)).any(axis=2)
        changes = ((questions > 0) & (questions != answers)).any(axis=1)
        found = find_solutions(questions)
        for row in np.flatnonzero(has_blank | breaks.any(axis=1) | changes | (found.counts != 1)).tolist():
            count = found.counts[row]
            if found.given_up[row] and count == 0:
                yield row, "took too long to solve: it could not be shown that it has one solution"
            elif count == 0:
                yield row, "the question has no solution"
            elif count > 1:
                yield row, f"the question has {count} solutions or more"
            elif found.given_up[row]:
                yield row, "it could not be shown in time that the question has no other solution"
            else:
                yield row, self._wrong_answer(questions[row], answers[row], broken=breaks[row])

    def _wrong_answer(
        self, question: NDArray[np.uint8], answer: NDArray[np.uint8], *, broken: NDArray[np.bool_]
    ) -> str:
        if (answer == 0).any():
            return "the answer has blanks"
        changed = np.flatnonzero((question > 0) & (question != answer))
        if len(changed):
            row, column = divmod(int(changed[0]), 9)
            return (
                f"the answer has {answer[changed[0]]} in row {row + 1}, column {column + 1}, "
                f"where the question gives {question[changed[0]]}"
            )
        unit = int(broken.argmax())
        return f"the answer does not have all digits in {UNIT_NAMES[unit // 9]} {unit % 9 + 1}"

    def question_keys(self, questions: Cells) -> NDArray[np.uint64]:
        """Of the clues."""
        return keys_of(questions)

    def answer_keys(self, answers: Cells) -> NDArray[np.uint64]:
        """Of the solution: all puzzles with one solution fall on one side."""
        return keys_of(answers)

    def is_copy(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
        """Whether digits, rows and columns can be exchanged so that the one becomes the other."""
        return is_copy(one, other)

    def copies_of(self, pair: Cells, n: int, *, stream: np.random.Generator) -> tuple[Cells, Cells]:
        """Copies with digits, bands, rows, stacks and columns exchanged; every second one is transposed."""
        changes = draw_changes(n, stream)
        return changes.apply(np.tile(pair[0], (n, 1))), changes.apply(np.tile(pair[1], (n, 1)))
