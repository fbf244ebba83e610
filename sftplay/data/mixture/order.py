"""The order in which the documents of a source are read: the same on every machine, and found without reading them.

Groups follow each other in the order of the files. Within a group the documents are shuffled, anew in each epoch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from sftplay.data.mixture.documents import GROUP_DOCUMENTS, Documents, Ints

NUMBERS_A_COUNT = 4
"""Numbers that Philox4x64 gives for one value of its counter."""

KEPT_CHUNKS = 4
"""Chunks that are kept in memory: rows are read one after the other."""


def shuffled(n: int, *, seed: int, source: int, group: int, epochs: range) -> Ints:
    """The numbers below `n` in the order of each of these epochs: int64 [epochs, n].

    Documents are sorted by the raw output of Philox4x64-10 (Salmon et al. 2011), which numpy promises not to change
    (NEP 19). Its counter finds any epoch at once.
    """
    counters = -(-n // NUMBERS_A_COUNT)
    words = hashlib.blake2b(f"{seed} {source} {group}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(words, "little"), counter=epochs.start * counters)
    keys = generator.random_raw(len(epochs) * counters * NUMBERS_A_COUNT).reshape(len(epochs), -1)[:, :n]
    return np.argsort(keys, axis=1, kind="stable")


@dataclass(frozen=True)
class Chunk:
    """Documents that are read one after the other."""

    first: int
    """Number of documents that are read before them, in all epochs."""

    documents: Ints
    """Their numbers, in reading order."""

    starts: Ints
    """Tokens of the chunk before each of them, and last all of them: one more than documents."""

    learned: Ints
    """Learned tokens of each of them."""


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
        """The chunk of that number; None behind the last one of an order that is read once."""
        while len(self._chunks) <= number:
            if not self._plan():
                return None
        if number not in self._kept:
            self._kept[number] = self._made(self._chunks[number])
            if len(self._kept) > KEPT_CHUNKS:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _plan(self) -> bool:
        """Note the next chunk: a group in one epoch; or in many, where one small group is all there is."""
        first, group, epoch = self._next
        if not self.documents.has_group(group):
            if self._seed is None or group == 0:
                return False
            group, epoch = 0, epoch + 1
        start, end = self.documents.group(group)
        is_all = self.documents.is_whole and len(self.documents.group_ends) == 1 and self._seed is not None
        n_epochs = max(1, GROUP_DOCUMENTS // (end - start)) if is_all else 1
        self._chunks.append((first, group, range(epoch, epoch + n_epochs)))
        self._next = first + n_epochs * (end - start), group + 1, epoch + n_epochs - 1
        return True

    def _made(self, planned: tuple[int, int, range]) -> Chunk:
        first, group, epochs = planned
        start, end = self.documents.group(group)
        if self._seed is None:
            places = np.arange(end - start)
        else:
            places = shuffled(end - start, seed=self._seed, source=self._source, group=group, epochs=epochs).ravel()
        ends = np.cumsum(self.documents.lengths(start, end)[places])
        starts = np.concatenate((np.zeros(1, np.int64), ends))
        return Chunk(first, start + places, starts, self.documents.learned_lengths(start, end)[places])
