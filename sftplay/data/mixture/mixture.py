"""Sources in exact shares of tokens: the order of documents, their blocks, and whose turn it is."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sftplay.config.data import SourceType
from sftplay.data.mixture.store import GROUP_DOCUMENTS, Documents, Ints, Store
from sftplay.data.records import IGNORE_INDEX, Source
from sftplay.data.row_outcomes import Side


def shuffled(n: int, *, seed: int, source: int, group: int, epochs: range) -> Ints:
    """Return the numbers below `n` in the order of each of these epochs: int64 [epochs, n].

    Documents are sorted by the raw output of Philox4x64-10 (Salmon et al. 2011), which numpy promises not to change
    (NEP 19). Its counter finds any epoch at once.
    """
    counters = -(-n // 4)  # Philox4x64 gives four numbers for one value of its counter
    words = hashlib.blake2b(f"{seed} {source} {group}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(words, "little"), counter=epochs.start * counters)
    keys = generator.random_raw(len(epochs) * counters * 4).reshape(len(epochs), -1)[:, :n]
    return np.argsort(keys, axis=1, kind="stable")


@dataclass(frozen=True)
class Chunk:
    """Documents that are read one after the other."""

    first: int  # number of documents that are read before them, in all epochs
    documents: Ints  # their numbers, in reading order
    starts: Ints  # tokens of the chunk before each of them, and last all of them: one more than documents
    learned: Ints  # learned tokens of each of them


class ReadingOrder:
    """The documents of a source as a sequence of chunks, epoch after epoch without an end."""

    def __init__(self, documents: Documents, *, seed: int | None, source: int = 0) -> None:
        """With `seed` None the documents are read once, in the order of their files."""
        self.documents = documents
        self._seed, self._source = seed, source
        self._chunks: list[tuple[int, int, range]] = []
        """Of each chunk: how many documents are read before it, its group, its epochs."""

        self._next = 0, 0, 0
        self._kept: OrderedDict[int, Chunk] = OrderedDict()

    def chunk(self, number: int) -> Chunk | None:
        """Return the chunk of that number; None behind the last one of an order that is read once."""
        while len(self._chunks) <= number:
            # Note the next chunk: a group in one epoch; or in many, where one small group is all there is.
            first, group, epoch = self._next
            if group >= len(self.documents.group_ends):
                if self._seed is None or group == 0:
                    return None
                group, epoch = 0, epoch + 1
            start, end = self.documents.group(group)
            is_all = len(self.documents.group_ends) == 1 and self._seed is not None
            n_epochs = max(1, GROUP_DOCUMENTS // (end - start)) if is_all else 1
            self._chunks.append((first, group, range(epoch, epoch + n_epochs)))
            self._next = first + n_epochs * (end - start), group + 1, epoch + n_epochs - 1
        if number not in self._kept:
            first, group, epochs = self._chunks[number]
            start, end = self.documents.group(group)
            places = np.arange(end - start)
            if self._seed is not None:
                places = shuffled(len(places), seed=self._seed, source=self._source, group=group, epochs=epochs).ravel()
            ends = np.cumsum(self.documents.lengths(start, end)[places])
            starts = np.concatenate((np.zeros(1, np.int64), ends))
            learned = self.documents.lengths(start, end, only_learned=True)[places]
            self._kept[number] = Chunk(first, start + places, starts, learned)
            if len(self._kept) > 4:  # rows are read one after the other
                self._kept.popitem(last=False)
        return self._kept[number]


Unit = Literal["trainable_tokens", "examples"]
"""The unit of shares: labels, or documents and chats that begin in a block."""


class BlockTokens(NamedTuple):
    """The tokens of a block as the model gets them: int64 [tokens] each."""

    input_ids: Ints
    labels: Ints  # the id where it is learned, -100 elsewhere; each is predicted from the tokens before it
    position_ids: Ints  # from 0 in each piece; attention stays inside a piece


class Blocks(Protocol):
    """The blocks of one source, numbered from 0."""

    _order: ReadingOrder
    _crosses: bool = False

    def grow(self) -> Ints | None:
        """Return the size of each of the next few or many blocks in `Unit`; None after the last block."""

    def n_until(self, epochs: Fraction) -> int | None:
        """Return the number of blocks of this many epochs; None if `grow` has not reached them yet."""

    def epochs_in(self, n_blocks: int) -> float:
        """Return how many times the source is read in its first blocks."""

    def pieces(self, block: int) -> tuple[Ints, Ints, Ints]:
        """Return the parts of documents in a block that `grow` has reached, in their order: the documents, and where
        in each of them its tokens begin and end: int64 [pieces] each.
        """

    def row(self, block: int) -> BlockTokens:
        documents, (numbers, begins, ends) = self._order.documents, self.pieces(block)
        lengths = ends - begins
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = np.repeat(documents.starts(numbers) + begins, lengths) + within
        ids = documents.tokens[places].astype(np.int64)
        positions = np.arange(len(ids)) if self._crosses else within
        # Where a piece begins stands the first token of a document, or context.
        is_learned = positions > 0
        if documents.learned is not None:
            is_learned &= documents.learned[places] > 0
        return BlockTokens(ids, np.where(is_learned, ids, IGNORE_INDEX), positions)


class TextBlocks(Blocks):
    """Documents joined into one stream; each block holds the next `block_size` - 1 tokens of it.

    The token before them comes first, as context, if it belongs to the same document. So each token is new in exactly
    one block, and each but a document's first is learned there. `crosses_documents` lets the model
    see over a document's end: then only the first token of all is not learned.
    """

    def __init__(
        self, order: ReadingOrder, block_size: int, *, crosses_documents: bool = False, unit: Unit = "trainable_tokens"
    ) -> None:
        self._order, self._crosses, self._unit = order, crosses_documents, unit
        self._new = block_size - 1
        self._chunk_starts = [0]
        """Tokens of the stream before each measured chunk, and last before the first that is not measured."""

        self._n_blocks = 0
        self._taught = 0  # size of all measured blocks in `Unit`

    def grow(self) -> Ints | None:
        start = self._chunk_starts[-1]
        chunk = self._order.chunk(len(self._chunk_starts) - 1)
        if chunk is not None:
            end = start + int(chunk.starts[-1])
            edges = np.arange((self._n_blocks + 1) * self._new, end + 1, self._new)
            # Documents that begin before an edge: those of the earlier chunks, and of this one.
            documents_begun = chunk.first + np.searchsorted(chunk.starts[:-1], edges - start)
            self._chunk_starts.append(end)
        elif start > self._n_blocks * self._new:  # the shorter block at the end of documents that are read once
            edges, documents_begun = np.array([start]), np.array([len(self._order.documents.table)])
        else:
            return None
        totals = documents_begun if self._unit == "examples" else edges - (1 if self._crosses else documents_begun)
        sizes = np.diff(totals, prepend=self._taught)
        self._n_blocks += len(sizes)
        self._taught += int(sizes.sum())
        return sizes

    def n_until(self, epochs: Fraction) -> int | None:
        n_blocks = math.ceil(epochs * self._order.documents.n_tokens / self._new)
        return n_blocks if n_blocks <= self._n_blocks else None

    def epochs_in(self, n_blocks: int) -> float:
        return n_blocks * self._new / max(self._order.documents.n_tokens, 1)

    def pieces(self, block: int) -> tuple[Ints, Ints, Ints]:
        first, end = block * self._new, (block + 1) * self._new
        if self._crosses and block:
            first -= 1
        parts = []
        low = bisect_right(self._chunk_starts, first) - 1
        for number, chunk_start in enumerate(self._chunk_starts[low:-1], low):
            if number > low and chunk_start >= end:
                break
            chunk = self._order.chunk(number)
            assert chunk is not None  # it has been measured
            begin, stop = first - chunk_start, end - chunk_start
            start = max(int(np.searchsorted(chunk.starts, begin, side="right")) - 1, 0)
            behind = min(int(np.searchsorted(chunk.starts, stop)), len(chunk.documents))
            begins, ends = chunk.starts[start:behind], np.minimum(chunk.starts[start + 1 : behind + 1], stop)
            parts.append((chunk.documents[start:behind], np.maximum(begins, begin) - begins, ends - begins))
        documents, begins, ends = map(np.concatenate, zip(*parts, strict=True))
        if not self._crosses:
            begins[0] -= begins[0] > 0
        return documents, begins, ends


class ChatBlocks(Blocks):
    """Whole chats, one after the other while they fit into `block_size` tokens (next fit).

    Each chat is masked as it is alone, and sees no other one.
    """

    def __init__(self, order: ReadingOrder, block_size: int, *, unit: Unit = "trainable_tokens") -> None:
        self._order, self._room, self._unit = order, block_size, unit
        self._chunk_firsts: list[int] = []  # chats before each measured chunk
        self._firsts: list[int] = [0]  # chats before each block, and last before the open one
        self._filled = self._taught = 0  # tokens of the open block, and its size in `Unit`
        self._is_over = False

    def grow(self) -> Ints | None:
        """As `Blocks.grow`: the blocks that are full before the last chat of the next chunk."""
        chunk = self._order.chunk(len(self._chunk_firsts))
        if chunk is None:
            if self._is_over or not self._filled:
                return None
            self._is_over = True  # the open block, at the end of chats that are read once
            self._firsts.append(len(self._order.documents.table))
            return np.array([self._taught])
        self._chunk_firsts.append(chunk.first)
        # Chat -> the first behind it that does not fit into a block which begins with it.
        starts, room = chunk.starts, self._room
        next_cut = np.searchsorted(starts[1:], starts[:-1] + room, side="right").tolist()
        cuts, at = [], int(np.searchsorted(starts[1:], room - self._filled, side="right"))
        while at < len(chunk.documents):
            cuts.append(at)
            assert next_cut[at] > at, "a chat is longer than a block"
            at = next_cut[at]
        sizes = np.ones_like(chunk.documents) if self._unit == "examples" else chunk.learned
        totals = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        taught = np.diff(totals[cuts], prepend=-self._taught)
        begin = cuts[-1] if cuts else 0
        self._filled = int(starts[-1] - starts[begin]) + (0 if cuts else self._filled)
        self._taught = int(totals[-1] - totals[begin]) + (0 if cuts else self._taught)
        self._firsts += [chunk.first + cut for cut in cuts]
        return taught

    def n_until(self, epochs: Fraction) -> int | None:
        n_chats = math.ceil(epochs * len(self._order.documents.table))
        return bisect_left(self._firsts, n_chats) if self._firsts[-1] >= n_chats else None

    def epochs_in(self, n_blocks: int) -> float:
        return self._firsts[n_blocks] / max(len(self._order.documents.table), 1)

    def pieces(self, block: int) -> tuple[Ints, Ints, Ints]:
        first, end = self._firsts[block], self._firsts[block + 1]
        parts: list[Ints] = []
        number = bisect_right(self._chunk_firsts, first) - 1
        while first < end:
            chunk = self._order.chunk(number)
            assert chunk is not None  # it has been measured
            found = chunk.documents[first - chunk.first : end - chunk.first]
            parts.append(found)
            first, number = first + len(found), number + 1
        documents, source = np.concatenate(parts), self._order.documents
        lengths = source.table["end"][documents] - source.starts(documents)
        return documents, np.zeros_like(documents), lengths


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
        numbers, begins, ends = self._blocks[at].pieces(block)
        places = [self.sources[at].store.place("train", int(number)) for number in numbers]
        return list(zip(places, begins.tolist(), ends.tolist(), strict=True))


def source_and_block(row_id: int) -> tuple[int, int]:
    """Return the number of the source, and of the block in it, that an id in metrics.jsonl names."""
    return row_id >> BLOCK_BITS, row_id & ((1 << BLOCK_BITS) - 1)


def _as_dict(blocks: Blocks, number: int, *, block: int) -> dict[str, Any]:
    return {**blocks.row(block)._asdict(), "row": number << BLOCK_BITS | block, "source": number}
