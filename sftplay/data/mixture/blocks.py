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
from sftplay.data.mixture.order import ReadingOrder
from sftplay.data.records import IGNORE_INDEX

Unit = Literal["trainable_tokens", "examples"]
"""The unit of shares: labels, or documents and chats that begin in a block."""


class BlockTokens(NamedTuple):
    """The tokens of a block as the model gets them: int64 [tokens] each."""

    input_ids: Ints
    labels: Ints  # the id where it is learned, -100 elsewhere; each is predicted from the tokens before it
    position_ids: Ints  # from 0 in each piece; attention stays inside a piece


@dataclass(frozen=True)
class DocumentSpans:
    """Parts of documents, in the order in which they stand in a block: int64 [pieces] each."""

    documents: Ints
    begins: Ints
    ends: Ints  # tokens `begins` to `ends` of each document


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

    def pieces(self, block: int) -> DocumentSpans:
        """Return the parts of documents in a block that `grow` has reached."""

    def row(self, block: int) -> BlockTokens:
        """Return a block's tokens."""
        documents, pieces = self._order.documents, self.pieces(block)
        lengths = pieces.ends - pieces.begins
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = np.repeat(documents.starts(pieces.documents) + pieces.begins, lengths) + within
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

    def pieces(self, block: int) -> DocumentSpans:
        first, end = block * self._new, (block + 1) * self._new
        if self._crosses and block:
            first -= 1
        parts = []
        low = bisect_right(self._chunk_starts, first) - 1
        for number, chunk_start in enumerate(self._chunk_starts[low:-1], low):
            if number > low and chunk_start >= end:
                break
            chunk = self._order.expect_chunk(number)
            begin, stop = first - chunk_start, end - chunk_start
            start = max(int(np.searchsorted(chunk.starts, begin, side="right")) - 1, 0)
            behind = min(int(np.searchsorted(chunk.starts, stop)), len(chunk.documents))
            begins, ends = chunk.starts[start:behind], np.minimum(chunk.starts[start + 1 : behind + 1], stop)
            parts.append((chunk.documents[start:behind], np.maximum(begins, begin) - begins, ends - begins))
        documents, begins, ends = map(np.concatenate, zip(*parts, strict=True))
        if not self._crosses:
            begins[0] -= begins[0] > 0
        return DocumentSpans(documents, begins, ends)


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

    def pieces(self, block: int) -> DocumentSpans:
        first, end = self._firsts[block], self._firsts[block + 1]
        parts: list[Ints] = []
        number = bisect_right(self._chunk_firsts, first) - 1
        while first < end:
            chunk = self._order.expect_chunk(number)
            found = chunk.documents[first - chunk.first : end - chunk.first]
            parts.append(found)
            first, number = first + len(found), number + 1
        documents, source = np.concatenate(parts), self._order.documents
        lengths = source.table["end"][documents] - source.starts(documents)
        return DocumentSpans(documents, np.zeros_like(documents), lengths)
