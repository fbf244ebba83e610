"""Tokenised documents, one after the other, and where each of them begins.

Documents come in groups. A group is the unit in which they are shuffled, and in which a store that is still being
filled shows them. Which documents form a group depends on the documents alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

GROUP_DOCUMENTS, GROUP_TOKENS = 16_384, 1 << 24
"""A group ends at this number of documents, or with the document that reaches this number of tokens."""

ENTRY = np.dtype(
    {"names": ["end", "learned_end", "n_bytes", "row", "line", "record", "path"], "formats": ["<i8"] * 5 + ["<i4"] * 2}
)
"""The record of a document: the tokens of the source up to its end, and those of them that are learned without any
context of other documents; its bytes of UTF-8 (0 for a chat); its row in its file, and its place."""


@dataclass
class Documents:
    """One side of a source, whole in memory or mapped into it."""

    tokens: NDArray[Any]  # ids of all documents, as uint16 or uint32
    table: NDArray[Any]  # one ENTRY a document
    group_ends: list[int]  # number of documents up to the end of each group
    learned: NDArray[np.uint8] | None = None  # 1 where a token is learned; None where all are but a document's first
    is_whole: bool = True  # false while more documents may come
    wait_for_more: Callable[[], None] | None = None  # wait until another process has written more of them

    def has_group(self, number: int) -> bool:
        """Return whether there is a group of that number; wait for it while documents are still coming."""
        while self.wait_for_more and number >= len(self.group_ends) and not self.is_whole:
            self.wait_for_more()
        return number < len(self.group_ends)

    def group(self, number: int) -> tuple[int, int]:
        """Return the first document of a group, and the first behind it."""
        return (self.group_ends[number - 1] if number else 0), self.group_ends[number]

    def lengths(self, first: int, end: int, *, only_learned: bool = False) -> Ints:
        """Count the tokens of each of these consecutive documents, or only the learned ones."""
        return np.diff(self._ends("learned_end" if only_learned else "end", first=first, end=end))

    def starts(self, documents: Ints) -> Ints:
        """Return where in `tokens` these documents begin."""
        before = np.maximum(documents - 1, 0)
        return np.where(documents > 0, self.table["end"][before], 0).astype(np.int64)

    def span(self, document: int) -> slice:
        """Return the range of a document in `tokens`."""
        first, end = self._ends("end", first=document, end=document + 1)
        return slice(int(first), int(end))

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.table["end"][-1]) if len(self.table) else 0

    @property
    def n_learned(self) -> int:
        """Tokens that are learned where no document sees another."""
        return int(self.table["learned_end"][-1]) if len(self.table) else 0

    def _ends(self, name: str, *, first: int, end: int) -> Ints:
        """Return the ends of the documents before `first` .. `end`: one more than documents."""
        known = np.asarray(self.table[name][max(first - 1, 0) : end], np.int64)
        return known if first else np.concatenate((np.zeros(1, np.int64), known))
