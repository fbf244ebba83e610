"""The rows of a run in training order, and the held-out rows of a source: any of them at once, by its number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sftplay.config.schema.mixture import SourceType
from sftplay.data.mix.blocks import Blocks, ChatBlocks, TextBlocks, Unit
from sftplay.data.mix.documents import Ints
from sftplay.data.mix.order import ReadingOrder
from sftplay.data.mix.schedule import Schedule
from sftplay.data.mix.store import Store
from sftplay.data.prepare.policies import Side
from sftplay.data.records import IGNORE_INDEX, Source

BLOCK_BITS = 40
"""A row's id is its source's number, and in the lowest bits the number of its block."""


class Document(NamedTuple):
    """A whole document or chat."""

    ids: Ints
    """int64 [tokens]."""

    labels: Ints
    """The id where it is learned, -100 elsewhere: at the first token, and where a chat is masked."""

    n_bytes: int
    """Of its text, as UTF-8; 0 for a chat."""

    place: Source


@dataclass(frozen=True)
class BlockForm:
    """How documents become blocks."""

    size: int
    crosses_documents: bool = False
    unit: Unit = "trainable_tokens"

    def of(self, order: ReadingOrder, kind: SourceType) -> Blocks:
        """The blocks of a source."""
        if kind == "chat":
            return ChatBlocks(order, self.size, unit=self.unit)
        return TextBlocks(order, self.size, crosses_documents=self.crosses_documents, unit=self.unit)


@dataclass(frozen=True)
class MixSource:
    """A source with its store."""

    number: int
    """Its place in the config, from 0."""

    name: str
    kind: SourceType
    weight: float
    store: Store

    def blocks(self, side: Side, *, form: BlockForm, seed: int | None) -> Blocks:
        """The blocks of one side: endless in a seeded order, or once in the order of the files."""
        return form.of(ReadingOrder(self.store.sides[side], seed=seed, source=self.number), self.kind)

    def documents(self, side: Side) -> Iterator[Document]:
        """Every document of one side, whole, in the order of the files."""
        documents = self.store.sides[side]
        for number in range(len(documents.table)):
            ids = documents.tokens[documents.span(number)].astype("int64")
            labels = ids.copy()
            if documents.learned is not None:
                labels[documents.learned[documents.span(number)] == 0] = IGNORE_INDEX
            labels[0] = IGNORE_INDEX
            yield Document(ids, labels, int(documents.table["n_bytes"][number]), self.store.place(side, number))


class SourceRows:
    """Blocks of one source as rows: `len`, and `[i]` as a dict of int64 arrays, see `Mixture`."""

    def __init__(self, source: MixSource, side: Side, *, form: BlockForm) -> None:
        self.source, self.side = source, side
        self._blocks = source.blocks(side, form=form, seed=None)
        self.sizes: list[int] = []
        """What each row teaches."""

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
        """For each source's number how many rows it gives, and how many times it is read in them."""
        counts = self.schedule.n_blocks(self.n_rows)
        parts = zip(self.sources, self._blocks, counts, strict=True)
        return {source.number: (n_blocks, blocks.epochs_in(n_blocks)) for source, blocks, n_blocks in parts}

    def row_id(self, row: int) -> int:
        """The id of a row, without reading its tokens."""
        at, block = self.schedule.at(row)
        return self.sources[at].number << BLOCK_BITS | block

    def pieces(self, row: int) -> list[tuple[Source, int, int]]:
        """The parts of documents in a row, in its order: where the document stands, and which of its tokens."""
        at, block = self.schedule.at(row)
        found = self._blocks[at].pieces(block)
        return list(zip(self.places(row), found.begins.tolist(), found.ends.tolist(), strict=True))

    def places(self, row: int) -> list[Source]:
        """Where the documents of a row stand, in its order."""
        at, block = self.schedule.at(row)
        documents = self._blocks[at].pieces(block).documents
        return [self.sources[at].store.place("train", int(number)) for number in documents]


def source_and_block(row_id: int) -> tuple[int, int]:
    """The number of the source, and of the block in it, that an id in metrics.jsonl names."""
    return row_id >> BLOCK_BITS, row_id & ((1 << BLOCK_BITS) - 1)


def _as_dict(blocks: Blocks, number: int, *, block: int) -> dict[str, Any]:
    return {**blocks.row(block)._asdict(), "row": number << BLOCK_BITS | block, "source": number}
