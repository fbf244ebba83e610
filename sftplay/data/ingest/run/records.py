"""All finished records of an ingestion, by number: find those that repeat others, and read the kept ones as lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.data.ingest.duplicates import (
    PERMUTATIONS,
    DuplicatePair,
    Hashes,
    Signature,
    count_band_rows,
    find_candidates,
    find_first_equal,
    find_near,
)
from sftplay.data.ingest.run.stages import RecordChunk
from sftplay.data.ingest.settings import Settings
from sftplay.data.ingest.steps.finishing import COLUMNS, read_table

REASONS = ("", "duplicate", "near_duplicate")
KEPT, DUPLICATE, NEAR_DUPLICATE = range(len(REASONS))


class Records:
    """The records of all chunks, numbered from 0."""

    def __init__(self, chunks: Sequence[RecordChunk]) -> None:
        self._chunks = chunks
        self._starts = [0, *accumulate(chunk.answer["records"] for chunk in chunks)]
        tables = [read_table(chunk.stem) for chunk in chunks]
        self.table = np.concatenate(tables) if tables else np.zeros((0, len(COLUMNS)), np.uint64)
        self.signature = lru_cache(maxsize=1 << 16)(self._read_signature)  # 40 MB

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> NDArray[np.uint64]:
        """Return one column of the table of all records."""
        return self.table[:, COLUMNS.index(name)]

    def lines(self) -> Iterator[bytes]:
        """Yield every record as its line, in order."""
        for chunk in self._chunks:
            with Path(f"{chunk.stem}.jsonl").open("rb") as stream:
                yield from stream

    def record(self, number: int) -> dict[str, Any]:
        """Return one record."""
        chunk, place = self._find(number)
        with Path(f"{chunk.stem}.jsonl").open("rb") as stream:
            stream.seek(int(self.column("end")[number - 1]) if place else 0)
            return dict(json.loads(stream.readline()))

    def bands(self, near: float) -> Iterator[Hashes]:
        """Yield for each band of the signatures the keys of all records: uint64 [records]."""
        sizes = [(chunk.stem, chunk.answer["records"]) for chunk in self._chunks if chunk.answer["records"]]
        for band in range(PERMUTATIONS // count_band_rows(near)):
            parts = [np.fromfile(f"{stem}.bands", np.uint64, n, offset=8 * band * n) for stem, n in sizes]
            yield np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def _read_signature(self, number: int) -> Signature:
        chunk, place = self._find(number)
        return np.fromfile(f"{chunk.stem}.signatures", np.uint32, PERMUTATIONS, offset=4 * PERMUTATIONS * place)

    def _find(self, number: int) -> tuple[RecordChunk, int]:
        """Return the chunk of a record, and its number in the chunk."""
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._chunks[at], number - self._starts[at]


@dataclass(frozen=True)
class Duplicates:
    """The records that are dropped because they repeat others."""

    repeats: NDArray[np.int64]
    """For each record the one that it repeats exactly, or itself."""

    pairs: list[DuplicatePair] = field(default_factory=list)

    def reasons(self) -> NDArray[np.uint8]:
        """Return for each record the index in REASONS of the reason why it is dropped."""
        reasons = (self.repeats != np.arange(len(self.repeats))).astype(np.uint8) * np.uint8(DUPLICATE)
        reasons[[pair.dropped for pair in self.pairs]] = NEAR_DUPLICATE
        return reasons


def compare(records: Records, settings: Settings) -> Duplicates:
    """Find the records that repeat an earlier one, as far as the settings ask for it."""
    repeats = np.arange(len(records))
    if settings.does("duplicates"):
        repeats = find_first_equal([records.column("key"), records.column("key2")])
    if not settings.does("near_duplicates"):
        return Duplicates(repeats)
    candidates = find_candidates(records.bands(settings.near), repeats == np.arange(len(records)))
    found = find_near(
        candidates, near=settings.near, read_text=lambda number: records.record(number)["text"],
        read_signature=records.signature,
    )  # fmt: skip
    return Duplicates(repeats, list(found))
