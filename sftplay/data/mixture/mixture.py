"""A mixture of sources: exact shares of tokens, and the order in which sources take turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sftplay.config.data import SourceType
from sftplay.data.mixture.blocks import Blocks, ChatBlocks, TextBlocks, Unit
from sftplay.data.mixture.documents import Ints
from sftplay.data.mixture.order import ReadingOrder
from sftplay.data.mixture.store import Store
from sftplay.data.records import IGNORE_INDEX, Source
from sftplay.data.tokenize.policies import Side


class Schedule:
    """The rows of a run, from the first on, as (source, block)."""

    def __init__(self, sources: Sequence[Blocks], weights: Sequence[float]) -> None:
        """`weights` must be greater than 0."""
        assert min(weights, default=1.0) > 0
        self._sources, self._is_over = sources, False
        self._waiting = [_Waiting(blocks, weight) for blocks, weight in zip(sources, weights, strict=True)]
        self._firsts: list[int] = []  # the first row of each part
        self._parts: list[tuple[Ints, Ints]] = []
        self.n_rows = 0  # rows with a known place

    def at(self, row: int) -> tuple[int, int]:
        """Return source and block of a row, or raise IndexError where there are fewer rows."""
        self.reach(row + 1)
        if not 0 <= row < self.n_rows:
            raise IndexError(row)
        part = bisect_right(self._firsts, row) - 1
        sources, blocks = self._parts[part]
        place = row - self._firsts[part]
        return int(sources[place]), int(blocks[place])

    def reach(self, n_rows: int) -> None:
        """Find the places of this many rows, or of all if there are fewer."""
        while self.n_rows < n_rows and not self._is_over:
            self._extend()

    def rows_until(self, source: int, epochs: Fraction) -> int:
        """Count the rows until a source has been read this many times."""
        while (n_blocks := self._sources[source].n_until(epochs)) is None:
            self._extend()
        return self.find_row(source, n_blocks - 1) + 1

    def n_blocks(self, n_rows: int) -> list[int]:
        """Count how many of the first rows each source gives."""
        self.reach(n_rows)
        counts = np.zeros(len(self._sources), np.int64)
        for first, (sources, _) in zip(self._firsts, self._parts, strict=True):
            counts += np.bincount(sources[: max(n_rows - first, 0)], minlength=len(counts))
        return [int(count) for count in counts]

    def find_row(self, source: int, block: int) -> int:
        """Find the row of this block."""
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
        """Measure more of the source that is measured least, then place the blocks that no other can precede."""
        known = [waiting.known for waiting in self._waiting]
        least = known.index(min(known))
        if known[least] == np.inf:
            self._is_over = True
        else:
            self._waiting[least].measure_more()
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

    def __init__(self, blocks: Blocks, weight: float) -> None:
        self._blocks, self._weight = blocks, weight
        self._places = np.empty(0)
        self._first = self._taught = 0
        self.known = 0.0  # no block that is not measured yet can stand before this place

    def measure_more(self) -> None:
        """Measure the next blocks."""
        sizes = self._blocks.grow()
        if sizes is None:
            self.known = np.inf
            return
        ends = self._taught + np.cumsum(sizes)
        # Twice the middle is a whole number, and a division is the same on every machine (IEEE 754).
        self._places = np.concatenate((self._places, (2 * ends - sizes) / self._weight))
        self._taught = int(ends[-1]) if len(ends) else self._taught
        self.known = 2 * self._taught / self._weight

    def take(self, limit: float) -> tuple[NDArray[np.float64], int]:
        """Return the places before `limit`, and the number of the first block among them; they wait no longer."""
        n = len(self._places) if limit == np.inf else int(np.searchsorted(self._places, limit))
        taken, first = self._places[:n], self._first
        self._places, self._first = self._places[n:], first + n
        return taken, first


BLOCK_BITS = 40  # a row's id is its source's number, and in the lowest bits the number of its block


class Document(NamedTuple):
    """A whole document or chat."""

    ids: Ints  # int64 [tokens]
    labels: Ints  # the id where it is learned, -100 elsewhere: at the first token, and where a chat is masked
    n_bytes: int  # of its text, as UTF-8; 0 for a chat
    place: Source


@dataclass(frozen=True)
class BlockForm:
    """The settings by which documents become blocks."""

    size: int
    crosses_documents: bool = False
    unit: Unit = "trainable_tokens"


@dataclass(frozen=True)
class MixSource:
    """A source with its store."""

    number: int  # its place in the config, from 0
    name: str
    kind: SourceType
    weight: float
    store: Store

    def blocks(self, side: Side, *, form: BlockForm, seed: int | None) -> Blocks:
        """Return the blocks of one side: endless in a seeded order, or once in the order of the files."""
        order = ReadingOrder(self.store.sides[side], seed=seed, source=self.number)
        if self.kind == "chat":
            return ChatBlocks(order, form.size, unit=form.unit)
        return TextBlocks(order, form.size, crosses_documents=form.crosses_documents, unit=form.unit)

    def documents(self, side: Side) -> Iterator[Document]:
        """Yield every document of one side, whole, in the order of the files."""
        documents = self.store.sides[side]
        for number in range(len(documents.table)):
            span = documents.span(number)
            ids = documents.tokens[span].astype("int64")
            labels = ids.copy()
            if documents.learned is not None:
                labels[documents.learned[span] == 0] = IGNORE_INDEX
            labels[0] = IGNORE_INDEX
            yield Document(ids, labels, int(documents.table["n_bytes"][number]), self.store.place(side, number))


class SourceRows:
    """Blocks of one source as rows: `len`, and `[i]` as a dict of int64 arrays, see `Mixture`."""

    def __init__(self, source: MixSource, side: Side, *, form: BlockForm) -> None:
        self.source, self.side = source, side
        self._blocks = source.blocks(side, form=form, seed=None)
        self.sizes: list[int] = []  # size of each row in `Unit`
        while (sizes := self._blocks.grow()) is not None:
            self.sizes += sizes.tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return _as_dict(self._blocks, self.source.number, block=row)


class Mixture:
    """The rows of a run in training order: `len`, and `[i]` for any row, as a dict.

    It holds `input_ids`, `labels` (-100 where nothing is learned) and `position_ids` (from 0 where attention begins
    anew): int64 [tokens]; and `source`, the source's number in the config, and `row`, the row's id.
    """

    def __init__(self, sources: list[MixSource], form: BlockForm, *, seed: int) -> None:
        """Rows of the sources with a weight above 0. `n_rows` is to be set before they are counted."""
        self.sources = [source for source in sources if source.weight > 0]
        self._blocks = [source.blocks("train", form=form, seed=seed) for source in self.sources]
        self.schedule = Schedule(self._blocks, [source.weight for source in self.sources])
        self.n_rows = 0

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.n_rows:
            raise IndexError(row)
        at, block = self.schedule.at(row)
        return _as_dict(self._blocks[at], self.sources[at].number, block=block)

    def read_times(self) -> dict[int, tuple[int, float]]:
        """Return for each source's number how many rows it gives, and how many times it is read in them."""
        counts = self.schedule.n_blocks(self.n_rows)
        parts = zip(self.sources, self._blocks, counts, strict=True)
        return {source.number: (n_blocks, blocks.epochs_in(n_blocks)) for source, blocks, n_blocks in parts}

    def row_id(self, row: int) -> int:
        """Return the id of a row, without reading its tokens."""
        at, block = self.schedule.at(row)
        return self.sources[at].number << BLOCK_BITS | block

    def pieces(self, row: int) -> list[tuple[Source, int, int]]:
        """Return the parts of documents in a row, in its order: the document's place, and which of its tokens."""
        at, block = self.schedule.at(row)
        found = self._blocks[at].pieces(block)
        places = [self.sources[at].store.place("train", int(number)) for number in found.documents]
        return list(zip(places, found.begins.tolist(), found.ends.tolist(), strict=True))


def source_and_block(row_id: int) -> tuple[int, int]:
    """Return the number of the source, and of the block in it, that an id in metrics.jsonl names."""
    return row_id >> BLOCK_BITS, row_id & ((1 << BLOCK_BITS) - 1)


def _as_dict(blocks: Blocks, number: int, *, block: int) -> dict[str, Any]:
    return {**blocks.row(block)._asdict(), "row": number << BLOCK_BITS | block, "source": number}
