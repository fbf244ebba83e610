"""Which source gives the next row: a fixed rule on what the rows teach, without any draw.

A source's block stands where half of it is due: at (what the source has taught before it + half of what it teaches) /
weight. Rows are the blocks of all sources in the order of these places; of equal ones the source that is listed first
goes first. This is the divisor method of Webster and Sainte-Lague: at any row each source is within about one block of
its share. A source's places depend on that source alone, so blocks are merged by sorting, and any row is found without
going through those before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sftplay.data.mix.blocks import Blocks
from sftplay.data.mix.documents import Ints


class Schedule:
    """The rows of a run, from the first on, as (source, block)."""

    def __init__(self, sources: Sequence[Blocks], weights: Sequence[float]) -> None:
        """`weights` must be greater than 0."""
        assert min(weights, default=1.0) > 0
        self._sources, self._weights = sources, weights
        self._waiting = [_Waiting() for _ in sources]
        self._is_over = False
        self._firsts: list[int] = []
        """The first row of each part."""

        self._parts: list[tuple[Ints, Ints]] = []
        self.n_rows = 0
        """Rows whose place is known."""

    def at(self, row: int) -> tuple[int, int]:
        """Source and block of a row.

        Raises:
            IndexError: there are not so many rows.
        """
        self.reach(row + 1)
        if not 0 <= row < self.n_rows:
            raise IndexError(row)
        part = bisect_right(self._firsts, row) - 1
        sources, blocks = self._parts[part]
        return int(sources[row - self._firsts[part]]), int(blocks[row - self._firsts[part]])

    def reach(self, n_rows: int) -> None:
        """Find the places of so many rows, or of all where there are fewer."""
        while self.n_rows < n_rows and not self._is_over:
            self._extend()

    def rows_until(self, source: int, epochs: Fraction) -> int:
        """How many rows there are until a source has been read so many times."""
        while (n_blocks := self._sources[source].n_until(epochs)) is None:
            self._extend()
        return self.row_of(source, n_blocks - 1) + 1

    def n_blocks(self, n_rows: int) -> list[int]:
        """How many of the first rows each source gives."""
        self.reach(n_rows)
        counts = np.zeros(len(self._sources), np.int64)
        for first, (sources, _) in zip(self._firsts, self._parts, strict=True):
            counts += np.bincount(sources[: max(n_rows - first, 0)], minlength=len(counts))
        return [int(count) for count in counts]

    def row_of(self, source: int, block: int) -> int:
        """The row that is this block."""
        part = 0
        while True:
            while part == len(self._parts):
                assert not self._is_over, "there is no such block"
                self._extend()
            sources, blocks = self._parts[part]
            (found,) = np.nonzero((sources == source) & (blocks == block))
            if len(found):
                return self._firsts[part] + int(found[0])
            part += 1

    def _extend(self) -> None:
        """Measure more of the source that is known least far, then place what no unknown block can come before."""
        known = [waiting.known for waiting in self._waiting]
        least = known.index(min(known))
        if known[least] == np.inf:
            self._is_over = True
        else:
            self._waiting[least].add(self._sources[least].grow(), self._weights[least])
        limit = min(waiting.known for waiting in self._waiting)
        parts = [waiting.take(limit) for waiting in self._waiting]
        sources = np.repeat(np.arange(len(parts)), [len(places) for places, _ in parts])
        order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
        if len(order):
            self._firsts.append(self.n_rows)
            blocks = np.concatenate([np.arange(first, first + len(places)) for places, first in parts])
            self._parts.append((sources[order], blocks[order]))
            self.n_rows += len(order)


class _Waiting:
    """The blocks of a source that are measured and have no row yet."""

    def __init__(self) -> None:
        self._places = np.empty(0)
        self._first = 0
        self._taught = 0
        self.known = 0.0
        """No block that is not measured yet can stand before this place."""

    def add(self, sizes: Ints | None, weight: float) -> None:
        """Take what the next blocks teach; None where there are no more."""
        if sizes is None:
            self.known = np.inf
            return
        ends = self._taught + np.cumsum(sizes)
        # Twice the middle is a whole number, and a division is the same on every machine (IEEE 754).
        self._places = np.concatenate((self._places, (2 * ends - sizes) / weight))
        self._taught = int(ends[-1]) if len(ends) else self._taught
        self.known = 2 * self._taught / weight

    def take(self, limit: float) -> tuple[NDArray[np.float64], int]:
        """The places before `limit`, and the number of the first block among them; they wait no longer."""
        n = len(self._places) if limit == np.inf else int(np.searchsorted(self._places, limit))
        taken, first = self._places[:n], self._first
        self._places, self._first = self._places[n:], first + n
        return taken, first
