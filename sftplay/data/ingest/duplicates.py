"""Find rows that nearly repeat others, by MinHash over shingles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Signature = NDArray[np.uint32]

SHINGLE_WORDS = 5
"""Words of a shingle, as the pipelines of large web corpora take them."""

PERMUTATIONS = 128
"""Values of a signature. Shares estimated from it are within 0.035 of the exact one, two times of three."""

CHUNK = 1 << 10
"""Shingles hashed at a time: they stay in the processor's cache."""

LONGEST_WORD = 256
"""Characters after which the positions of a word's characters are counted from 0 again."""

PIECE_CHARS = 1 << 18


def shingles(text: str) -> Hashes:
    """Return the distinct shingles as 64-bit hashes, sorted. A text of fewer than five words is one shingle."""
    parts, begin = [np.zeros(0, np.uint64)], 0
    while begin < len(text):
        # A piece ends behind a space if one follows soon. Hashing takes 50 bytes a character of a piece.
        space = text.find(" ", begin + PIECE_CHARS, begin + 2 * PIECE_CHARS)
        end = space + 1 if space >= 0 else begin + PIECE_CHARS
        parts.append(_hash_words(text[begin:end].lower()))
        begin = end
    words = np.concatenate(parts)
    if not len(words):
        return words
    width = min(SHINGLE_WORDS, len(words))
    n = len(words) - width + 1
    mixed = np.zeros(n, np.uint64)
    for place in range(width):
        mixed = (mixed ^ words[place : place + n]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.unique(_finish(mixed))


def similarity(one: Hashes, other: Hashes) -> float:
    """Return the Jaccard similarity of two sets of shingles: the size of the intersection by that of the union."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    either = len(one) + len(other) - both
    return both / either if either else 1.0


def signature(hashes: Hashes) -> Signature:
    """Return the least value of the shingles under each of 128 permutations: uint32 [PERMUTATIONS].

    Two signatures agree at a share of places that is, on average, the similarity of the two sets.
    """
    low = (hashes >> np.uint64(32)).astype(np.uint32)
    least = np.full(PERMUTATIONS, np.iinfo(np.uint32).max, np.uint32)
    for begin in range(0, len(low), CHUNK):
        moved = np.multiply.outer(FACTORS, low[begin : begin + CHUNK])
        moved += SUMMANDS[:, None]
        np.minimum(least, moved.min(axis=1), out=least)
    return least


def _hash_words(text: str) -> Hashes:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = classify_characters()[codes]
    places = np.flatnonzero(kinds)
    if not len(places):
        return np.zeros(0, np.uint64)
    kinds = kinds[places]
    begins = np.ones(len(places), bool)
    begins[1:] = (np.diff(places) > 1) | (kinds[1:] == 2) | (kinds[:-1] == 2)
    starts = np.flatnonzero(begins)
    word = np.cumsum(begins) - 1
    inside = (np.arange(len(places)) - starts[word]) % LONGEST_WORD
    values = _finish(codes[places].astype(np.uint64) + np.uint64(1)) * POWERS[inside]
    return _finish(np.add.reduceat(values, starts))


def _finish(values: Hashes) -> Hashes:
    """Spread values over 64 bits. Source: splitmix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


POWERS: Hashes = np.cumprod(np.full(LONGEST_WORD, 0x100000001B3, np.uint64), dtype=np.uint64)
MIXED = _finish(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
FACTORS, SUMMANDS = MIXED[:PERMUTATIONS].astype(np.uint32) | np.uint32(1), MIXED[PERMUTATIONS:].astype(np.uint32)
"""Of the permutations; factors are odd. They are made of fixed hashes, so that they are the same on every machine."""


@cache
def classify_characters() -> NDArray[np.uint8]:
    """Return a number for each code point: 0 no part of a word, 1 a part, 2 a word by itself. It takes a moment."""
    kinds = np.fromiter((chr(code).isalnum() for code in range(0x110000)), np.uint8)
    for first, last in ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xABFF), (0xF900, 0xFAFF)):
        kinds[first : last + 1] *= 2  # Thai, Lao, Burmese, Khmer, Chinese and Japanese
    kinds[0xAC00:0xD7B0] = 1  # Korean has spaces
    kinds[0x20000:] *= 2
    return kinds


EARLIEST, LATEST = 2, 6
"""Earlier texts of the same band that a text is compared with: the first ones, and those just before it."""


class DuplicatePair(NamedTuple):
    """A dropped text and the kept one that it repeats."""

    kept: int
    dropped: int
    similarity: float


def count_band_rows(near: float) -> int:
    """Return the values in a band: the most with which a pair of the least similarity is found almost surely."""
    fitting = [rows for rows in range(1, 17) if 1 - (1 - near**rows) ** (PERMUTATIONS // rows) >= 0.999]
    return max(fitting, default=1)


def band_keys(signatures: Signature, near: float) -> Hashes:
    """Return a hash of each band of each signature: uint64 [bands, texts]."""
    rows = count_band_rows(near)
    bands = PERMUTATIONS // rows
    values = signatures.reshape(-1, PERMUTATIONS)[:, : bands * rows].reshape(-1, bands, rows)
    keys = np.zeros((len(values), bands), np.uint64)
    for place in range(rows):
        keys = (keys ^ values[:, :, place]) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
    return np.ascontiguousarray(keys.T)


def find_candidates(bands: Iterator[Hashes], wanted: NDArray[np.bool_]) -> Iterator[tuple[int, list[int]]]:
    """Yield each wanted text, in order, with the earlier ones that share a band. A band holds the keys of all texts."""
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
    candidates: Iterator[tuple[int, list[int]]], *, near: float, read_text: Callable[[int], str],
    read_signature: Callable[[int], Signature],
) -> Iterator[DuplicatePair]:  # fmt: skip
    """Yield each text that is at least `near` to an earlier kept one, with the first such one."""
    kept_for: dict[int, int] = {}
    get_shingles = lru_cache(maxsize=32)(lambda place: shingles(read_text(place)))
    for later, earlier in candidates:
        for first in sorted({kept_for.get(place, place) for place in earlier}):
            if (read_signature(first) == read_signature(later)).mean() < near - 0.15:  # four standard deviations
                continue
            share = similarity(get_shingles(first), get_shingles(later))
            if share >= near:
                kept_for[later] = first
                yield DuplicatePair(first, later, share)
                break
