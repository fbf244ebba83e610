"""Cut or pack the documents of a source into blocks: the tokens of a block, and how many of them are in the loss.

Nothing here reads a token before `row` is called: the lengths of the documents alone determine the blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol

import numpy as np

from sftplay.data.mixture.documents import Ints
from sftplay.data.mixture.order import Chunk, ReadingOrder
from sftplay.data.records import IGNORE_INDEX

Unit = Literal["trainable_tokens", "examples"]
"""The unit of shares: labels, or documents and chats that begin in a block."""


class BlockTokens(NamedTuple):
    """The tokens of a block as the model gets them: int64 [tokens] each."""

    input_ids: Ints
    labels: Ints
    """The id where it is learned, -100 elsewhere; each is predicted from the tokens before it."""

    position_ids: Ints
    """From 0 in each piece; attention stays inside a piece."""


@dataclass(frozen=True)
class DocumentSpans:
    """Parts of documents, in the order in which they stand in a block: int64 [pieces] each."""

    documents: Ints
    begins: Ints
    ends: Ints
    """Tokens `begins` to `ends` of each document."""


class Blocks(Protocol):
    """The blocks of one source, numbered from 0."""

    def grow(self) -> Ints | None:
        """Return the size of each of the next few or many blocks in `Unit`; None after the last block."""

    def n_until(self, epochs: Fraction) -> int | None:
        """Return the number of blocks of this many epochs; None if `grow` has not reached them yet."""

    def epochs_in(self, n_blocks: int) -> float:
        """Return how many times the source is read in its first blocks."""

    def pieces(self, block: int) -> DocumentSpans:
        """Return the parts of documents in a block that `grow` has reached."""

    def row(self, block: int) -> BlockTokens:
        """A block's tokens."""


class TextBlocks:
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
        self._taught = 0
        """Size of all measured blocks in `Unit`."""

    def grow(self) -> Ints | None:
        """As `Blocks.grow`: the blocks that end in the next chunk."""
        start = self._chunk_starts[-1]
        chunk = self._order.chunk(len(self._chunk_starts) - 1)
        if chunk is None:
            return self._last(start)
        end = start + int(chunk.starts[-1])
        edges = np.arange((self._n_blocks + 1) * self._new, end + 1, self._new)
        # Documents that begin before an edge: those of the earlier chunks, and of this one.
        documents_begun = chunk.first + np.searchsorted(chunk.starts[:-1], edges - start)
        self._chunk_starts.append(end)
        return self._teach(edges, documents_begun)

    def n_until(self, epochs: Fraction) -> int | None:
        """As `Blocks.n_until`."""
        n_blocks = math.ceil(epochs * self._order.documents.n_tokens / self._new)
        return n_blocks if n_blocks <= self._n_blocks else None

    def epochs_in(self, n_blocks: int) -> float:
        """As `Blocks.epochs_in`."""
        return n_blocks * self._new / max(self._order.documents.n_tokens, 1)

    def pieces(self, block: int) -> DocumentSpans:
        """As `Blocks.pieces`."""
        first, end = block * self._new, (block + 1) * self._new
        if self._crosses and block:
            first -= 1
        parts = [self._cut_chunk(number, first=first, end=end) for number in self._find_chunks(first, end)]
        documents, begins, ends = map(np.concatenate, zip(*parts, strict=True))
        if not self._crosses:
            begins[0] -= begins[0] > 0
        return DocumentSpans(documents, begins, ends)

    def row(self, block: int) -> BlockTokens:
        """As `Blocks.row`."""
        places, within = _laid_out(self._order, self.pieces(block))
        ids = self._order.documents.tokens[places].astype(np.int64)
        positions = np.arange(len(ids)) if self._crosses else within
        # Where a piece begins stands the first token of a document, or context.
        return BlockTokens(ids, np.where(positions == 0, IGNORE_INDEX, ids), positions)

    def _last(self, end: int) -> Ints | None:
        """The shorter block at the end of documents that are read once."""
        if end <= self._n_blocks * self._new:
            return None
        return self._teach(np.array([end]), np.array([len(self._order.documents.table)]))

    def _teach(self, edges: Ints, documents_begun: Ints) -> Ints:
        totals = documents_begun if self._unit == "examples" else edges - (1 if self._crosses else documents_begun)
        sizes = np.diff(totals, prepend=self._taught)
        self._n_blocks += len(sizes)
        self._taught += int(sizes.sum())
        return sizes

    def _find_chunks(self, first: int, end: int) -> range:
        """The chunks in which tokens `first` to `end` of the stream lie."""
        low = bisect_right(self._chunk_starts, first) - 1
        high = low + 1
        while high < len(self._chunk_starts) and self._chunk_starts[high] < end:
            high += 1
        return range(low, min(high, len(self._chunk_starts) - 1))

    def _cut_chunk(self, number: int, *, first: int, end: int) -> tuple[Ints, Ints, Ints]:
        """The parts of one chunk's documents that lie within tokens `first` to `end` of the stream."""
        chunk = self._order.chunk(number)
        assert chunk is not None
        first, end = first - self._chunk_starts[number], end - self._chunk_starts[number]
        low = max(int(np.searchsorted(chunk.starts, first, side="right")) - 1, 0)
        high = min(int(np.searchsorted(chunk.starts, end)), len(chunk.documents))
        begins = chunk.starts[low:high]
        ends = np.minimum(chunk.starts[low + 1 : high + 1], end)
        return chunk.documents[low:high], np.maximum(begins, first) - begins, ends - begins


class ChatBlocks:
    """Whole chats, one after the other while they fit into `block_size` tokens (next fit).

    Each chat is masked as it is alone, and sees no other one.
    """

    def __init__(self, order: ReadingOrder, block_size: int, *, unit: Unit = "trainable_tokens") -> None:
        self._order, self._room, self._unit = order, block_size, unit
        self._chunk_firsts: list[int] = []
        """Chats before each measured chunk."""

        self._firsts: list[int] = [0]
        """Chats before each block, and last before the open one."""

        self._filled = self._taught = 0
        """Tokens of the open block, and its size in `Unit`."""

        self._is_over = False

    def grow(self) -> Ints | None:
        """As `Blocks.grow`: the blocks that are full before the last chat of the next chunk."""
        chunk = self._order.chunk(len(self._chunk_firsts))
        if chunk is None:
            return self._last()
        self._chunk_firsts.append(chunk.first)
        cuts = self._cuts(chunk.starts)
        sizes = np.ones_like(chunk.documents) if self._unit == "examples" else chunk.learned
        totals = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        taught = np.diff(totals[cuts], prepend=-self._taught)
        begin = cuts[-1] if cuts else 0
        self._filled = int(chunk.starts[-1] - chunk.starts[begin]) + (0 if cuts else self._filled)
        self._taught = int(totals[-1] - totals[begin]) + (0 if cuts else self._taught)
        self._firsts += [chunk.first + cut for cut in cuts]
        return taught

    def n_until(self, epochs: Fraction) -> int | None:
        """As `Blocks.n_until`."""
        n_chats = math.ceil(epochs * len(self._order.documents.table))
        return bisect_left(self._firsts, n_chats) if self._firsts[-1] >= n_chats else None

    def epochs_in(self, n_blocks: int) -> float:
        """As `Blocks.epochs_in`."""
        return self._firsts[n_blocks] / max(len(self._order.documents.table), 1)

    def pieces(self, block: int) -> DocumentSpans:
        """As `Blocks.pieces`."""
        first, end = self._firsts[block], self._firsts[block + 1]
        parts: list[Ints] = []
        number = bisect_right(self._chunk_firsts, first) - 1
        while first < end:
            chunk = self._chunk(number)
            found = chunk.documents[first - chunk.first : end - chunk.first]
            parts.append(found)
            first, number = first + len(found), number + 1
        documents = np.concatenate(parts)
        table = self._order.documents.table
        return DocumentSpans(
            documents, np.zeros_like(documents), table["end"][documents] - self._order.documents.starts(documents)
        )

    def row(self, block: int) -> BlockTokens:
        """As `Blocks.row`."""
        places, positions = _laid_out(self._order, self.pieces(block))
        documents = self._order.documents
        assert documents.learned is not None
        ids = documents.tokens[places].astype(np.int64)
        is_learned = (documents.learned[places] > 0) & (positions > 0)
        return BlockTokens(ids, np.where(is_learned, ids, IGNORE_INDEX), positions)

    def _cuts(self, starts: Ints) -> list[int]:
        """Chats of a chunk, by their place in it, that no longer fit into the block before them."""
        n = len(starts) - 1
        # Chat -> the first behind it that does not fit into a block which begins with it.
        next_cut = np.searchsorted(starts[1:], starts[:-1] + self._room, side="right").tolist()
        at = int(np.searchsorted(starts[1:], self._room - self._filled, side="right"))
        cuts = []
        while at < n:
            cuts.append(at)
            assert next_cut[at] > at, "a chat is longer than a block"
            at = next_cut[at]
        return cuts

    def _last(self) -> Ints | None:
        """The open block, at the end of chats that are read once."""
        if self._is_over or not self._filled:
            return None
        self._is_over = True
        self._firsts.append(len(self._order.documents.table))
        return np.array([self._taught])

    def _chunk(self, number: int) -> Chunk:
        chunk = self._order.chunk(number)
        assert chunk is not None
        return chunk


def _laid_out(order: ReadingOrder, pieces: DocumentSpans) -> tuple[Ints, Ints]:
    """Return for each token of a block its place among the source's tokens, and its place in its piece."""
    lengths = pieces.ends - pieces.begins
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    return np.repeat(order.documents.starts(pieces.documents) + pieces.begins, lengths) + within, within
