"""Which texts of a collection are nearly the same as an earlier one that is kept.

Texts that agree in one band of their signatures are candidates; the exact similarity of their shingles decides.
Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sftplay.data.ingest.duplicates.shingles import PERMUTATIONS, Hashes, Signature, shingles, similarity

SURELY = 0.999
"""With this probability at least, two texts of exactly the least similarity agree in a band."""

DOUBT = 0.15
"""A pair whose signatures put it so far below the least similarity is not compared: four standard deviations."""

EARLIEST, LATEST = 2, 6
"""Earlier texts of the same band that a text is compared with: the first ones, and those just before it."""


@dataclass(frozen=True)
class Pair:
    """A dropped text and the kept one that it repeats."""

    kept: int
    dropped: int
    similarity: float


def rows_of_a_band(near: float) -> int:
    """Values in a band: the most with which a pair of the least similarity is found almost surely."""
    fitting = [rows for rows in range(1, 17) if 1 - (1 - near**rows) ** (PERMUTATIONS // rows) >= SURELY]
    return max(fitting, default=1)


def band_keys(signatures: Signature, near: float) -> Hashes:
    """A hash of each band of each signature: uint64 [bands, texts]."""
    rows = rows_of_a_band(near)
    bands = PERMUTATIONS // rows
    values = signatures.reshape(-1, PERMUTATIONS)[:, : bands * rows].reshape(-1, bands, rows)
    keys = np.zeros((len(values), bands), np.uint64)
    for place in range(rows):
        keys = (keys ^ values[:, :, place]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
    return np.ascontiguousarray(keys.T)


def candidates(bands: Iterator[Hashes], wanted: NDArray[np.bool_]) -> Iterator[tuple[int, list[int]]]:
    """For each wanted text, in order, those before it with which it shares a band. `bands`: keys of all texts, each."""
    pairs = np.zeros(0, np.uint64)
    places = np.flatnonzero(wanted)
    for keys in bands:
        order = places[np.argsort(keys[places], kind="stable")]
        sorted_keys = keys[order]
        firsts = np.concatenate(([True], sorted_keys[1:] != sorted_keys[:-1])) if len(order) else np.zeros(0, bool)
        starts = np.maximum.accumulate(np.where(firsts, np.arange(len(order)), 0)) if len(order) else order
        here = np.arange(len(order))
        found = [pairs]
        for step in range(-EARLIEST, LATEST):
            before = starts - step - 1 if step < 0 else here - step - 1
            holds = (before >= starts) & (before < here)
            found.append((order[holds].astype(np.uint64) << np.uint64(32)) | order[before[holds]].astype(np.uint64))
        pairs = np.unique(np.concatenate(found))
    ends = np.flatnonzero(np.diff(pairs >> np.uint64(32), append=np.uint64(1 << 33))) + 1
    begin = 0
    for end in ends.tolist():
        group = pairs[begin:end].tolist()
        yield group[0] >> 32, [pair & 0xFFFFFFFF for pair in group]
        begin = end


def find_near(
    candidates: Iterator[tuple[int, list[int]]], *, near: float, text_of: Callable[[int], str],
    signature_of: Callable[[int], Signature],
) -> Iterator[Pair]:  # fmt: skip
    """Each text that is at least `near` to an earlier one that is kept, with the first such one."""
    kept_for: dict[int, int] = {}
    shingles_of = lru_cache(maxsize=32)(lambda place: shingles(text_of(place)))
    for later, earlier in candidates:
        for first in sorted({kept_for.get(place, place) for place in earlier}):
            if (signature_of(first) == signature_of(later)).mean() < near - DOUBT:
                continue
            share = similarity(shingles_of(first), shingles_of(later))
            if share >= near:
                kept_for[later] = first
                yield Pair(first, later, share)
                break


def first_of_equal(keys: Sequence[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """For each text the first one with the same keys: itself, or the one that it repeats to the character."""
    n = len(keys[0])
    if not n:
        return np.zeros(0, np.int64)
    order = np.lexsort((np.arange(n), *keys))
    is_new = np.ones(n, bool)
    is_new[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    firsts = np.empty(n, np.int64)
    firsts[order] = order[np.maximum.accumulate(np.where(is_new, np.arange(n), 0))]
    return firsts
