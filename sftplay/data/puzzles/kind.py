"""The interface of a kind of puzzle that is written as two texts, a question and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.folder import Alphabet

Cells = NDArray[np.uint8]
"""[puzzles, cells]"""


class PuzzleKind(Protocol):
    """Cells hold the place of their character in `alphabet.symbols`, less one: 0 is the first behind the padding's."""

    alphabet: Alphabet
    copies: int
    """Copies of each training puzzle where the user names no number."""

    most_copies: int | None
    """None: as many as one wants."""

    also_blank: str
    """Other characters for the alphabet's first behind the padding's."""

    def problems(self, questions: Cells, answers: Cells) -> Iterator[tuple[int, str]]:
        """Yield rows that cannot be used, and why."""

    def question_keys(self, questions: Cells) -> NDArray[np.uint64]:
        """Return numbers that all copies of a question share, and few others."""

    def answer_keys(self, answers: Cells) -> NDArray[np.uint64]:
        """Return the same for what decides on which side of the split a puzzle falls: that of one solution."""

    def is_copy(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
        """Return whether the one question is a copy of the other."""

    def make_copies(self, pair: Cells, n: int, *, stream: np.random.Generator) -> tuple[Cells, Cells]:
        """Return `n` copies, at least one, of a question and its answer, the rows of `pair`, changed alike."""
