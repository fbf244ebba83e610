"""The kit's own order of the data, and the split by content."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.data.pipeline import order_hash, steps_for, training_order


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_order_is_whole_permutations_and_the_beginning_of_a_longer_one(n_rows: int, n_needed: int, seed: int):
    order = training_order(n_rows, n_needed, seed=seed)
    assert len(order) == n_needed
    for start in range(0, n_needed, n_rows):
        epoch = order[start : start + n_rows]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(n_rows))
    assert training_order(n_rows, n_needed + 12, seed=seed)[:n_needed] == order


def test_order_never_changes_between_releases():
    # Pinned when it was written: every manifest and every resumed run relies on it.
    assert training_order(8, 12, seed=42) == [6, 4, 7, 0, 2, 1, 3, 5, 6, 0, 2, 5]
    assert order_hash([1, 2]) == hashlib.sha256(b"\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0").hexdigest()


@pytest.mark.parametrize(
    ("n_rows", "epochs", "batch", "steps"),
    [(70, 1.0, 32, 3), (64, 1.0, 32, 2), (64, 3.0, 32, 6), (100, 0.1, 10, 1), (30, 0.1, 3, 1), (3, 1.0, 32, 1)],
)
def test_steps_show_every_row_and_round_up(n_rows: int, epochs: float, batch: int, steps: int):
    assert steps_for(n_rows, epochs, effective_batch=batch) == steps
