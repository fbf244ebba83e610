"""Near-duplicates: shingles against sets of words, signatures against exact shares, and the dropped texts."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.data.ingest.duplicates import (
    SHINGLE_WORDS,
    band_keys,
    find_candidates,
    find_near,
    shingles,
    signature,
    similarity,
)

WORD = re.compile(r"[^\W_]+")


def word_sets(text: str) -> set[tuple[str, ...]]:
    words = WORD.findall(text.lower())
    width = min(SHINGLE_WORDS, len(words))
    return {tuple(words[place : place + width]) for place in range(len(words) - width + 1)} if words else set()


def random_words(number: int, n_words: int = 300) -> list[str]:
    random_source = random.Random(number)
    return ["".join(random_source.choices("abcdefghij", k=random_source.randint(1, 9))) for _ in range(n_words)]


@given(st.text(alphabet="ab c\nÄß-,7_é", max_size=300), st.text(alphabet="ab c\nÄß-,7_é", max_size=300))
def test_shingles_are_as_many_and_as_alike_as_sets_of_runs_of_five_words(one, other):
    a, b = word_sets(one), word_sets(other)
    assert len(shingles(one)) == len(a)
    expected = len(a & b) / len(a | b) if a | b else 1.0
    assert similarity(shingles(one), shingles(other)) == pytest.approx(expected)


def test_writing_without_spaces_counts_characters_as_words():
    assert len(shingles("天地玄黄宇宙洪荒")) == 8 - SHINGLE_WORDS + 1
    assert len(shingles("안녕하세요 여러분 오늘은 날씨가 참 좋습니다")) == 6 - SHINGLE_WORDS + 1


def dropped(texts: list[str], near: float = 0.8) -> dict[int, tuple[int, float]]:
    signatures = np.stack([signature(shingles(text)) for text in texts])
    bands = iter(band_keys(signatures, near))
    found = find_near(
        find_candidates(bands, np.ones(len(texts), bool)), near=near,
        read_text=texts.__getitem__, read_signature=signatures.__getitem__,
    )  # fmt: skip
    return {pair.dropped: (pair.kept, pair.similarity) for pair in found}


def test_what_is_dropped_is_what_comparing_every_pair_would_drop():
    random_source, texts = random.Random(3), []
    for family in range(12):
        words = random_words(family, n_words=200)
        for _ in range(6):
            changed = list(words)
            for place in random_source.sample(range(200), random_source.choice([0, 1, 2, 5, 9, 20])):
                changed[place] = f"new{random_source.random()}"
            texts.append(" ".join(changed))
    random_source.shuffle(texts)
    sets = [word_sets(text) for text in texts]
    expected: dict[int, int] = {}
    for later in range(len(texts)):
        for first in range(later):
            if first not in expected and len(sets[first] & sets[later]) >= 0.8 * len(sets[first] | sets[later]):
                expected[later] = first
                break
    assert len(expected) > 15
    assert {later: first for later, (first, _) in dropped(texts).items()} == expected


def test_a_chain_of_small_changes_does_not_drop_what_is_far_from_all_that_is_kept():
    words, texts = random_words(5), []
    for step in range(8):
        texts.append(" ".join(words[step * 14 :] + random_words(99, n_words=step * 14)))
    found = dropped(texts)
    kept = [number for number in range(len(texts)) if number not in found]
    assert len(kept) > 2
    assert all(share >= 0.8 for _, share in found.values())
    assert {first for first, _ in found.values()} <= set(kept)
