"""The order in which the documents of a source are read: the same on every machine, and found without reading them.

Groups follow each other in the order of the files. Within a group the documents are shuffled, anew in each epoch.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from sftplay.data.mixture.documents import GROUP_DOCUMENTS, Documents, Ints


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
            if not self._plan():
                return None
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

    def expect_chunk(self, number: int) -> Chunk:
        """Return a chunk that has been measured."""
        chunk = self.chunk(number)
        assert chunk is not None
        return chunk

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
