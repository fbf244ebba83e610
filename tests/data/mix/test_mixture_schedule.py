"""Each source gives its share of what is learned, in every window, by a rule that finds any row at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftplay.data.mixture.mixture import Schedule


class Sized:
    """Blocks of given sizes, measured in lots; they begin again after the last."""

    def __init__(self, sizes: list[int], *, lot: int = 3, ends: bool = False) -> None:
        self._sizes, self._lot, self._ends, self._told = sizes, lot, ends, 0

    def grow(self) -> np.ndarray | None:
        if self._ends and self._told >= len(self._sizes):
            return None
        end = self._told + self._lot
        end = min(end, len(self._sizes)) if self._ends else end
        found = [self._sizes[at % len(self._sizes)] for at in range(self._told, end)]
        self._told = end
        return np.array(found, np.int64)


def naive_schedule(sizes: list[list[int]], weights: list[float], n_rows: int) -> list[tuple[int, int]]:
    """Row by row, with fractions: the source with the next block middle that is due first."""
    taught, blocks, rows = [0] * len(sizes), [0] * len(sizes), []
    for _ in range(n_rows):
        next_sizes = [
            source_sizes[block % len(source_sizes)] for source_sizes, block in zip(sizes, blocks, strict=True)
        ]
        due = [(2 * so_far + size) / weight for so_far, size, weight in zip(taught, next_sizes, weights, strict=True)]
        source = due.index(min(due))
        rows.append((source, blocks[source]))
        taught[source] += next_sizes[source]
        blocks[source] += 1
    return rows


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)


@given(data=st.data(), sizes=st.lists(SIZES, min_size=1, max_size=4), lots=st.tuples(*[st.integers(1, 7)] * 4))
def test_rows_are_those_found_one_by_one_however_much_is_measured_at_once(data, sizes, lots):
    weights = [data.draw(st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0, 3.0])) for _ in sizes]
    schedule = Schedule([Sized(source_sizes, lot=lot) for source_sizes, lot in zip(sizes, lots, strict=False)], weights)
    expected = naive_schedule(sizes, weights, 60)
    assert [schedule.at(row) for row in range(60)] == expected
    assert [schedule.find_row(*place) for place in expected] == list(range(60))


@settings(max_examples=40)
@given(
    weights=st.sampled_from([[0.9, 0.1], [0.5, 0.3, 0.2], [0.97, 0.03], [1, 1, 1], [0.6, 0.4]]),
    effective_batch=st.sampled_from([8, 16]),
    data=st.data(),
)
def test_every_window_of_50_steps_holds_the_asked_shares_within_1_percent_or_one_block(weights, effective_batch, data):
    # full blocks of text, and chats with between a twentieth and all tokens learned
    kinds = [st.integers(2040, 2047)] + [st.integers(100, 2047) for _ in weights[1:]]
    sizes = [data.draw(st.lists(kind, min_size=1, max_size=20)) for kind in kinds]
    schedule = Schedule([Sized(source_sizes, lot=50) for source_sizes in sizes], weights)
    window = 50 * effective_batch
    taught = np.zeros((2 * window + 1, len(weights)))
    for row in range(2 * window):
        source, block = schedule.at(row)
        taught[row + 1, source] = sizes[source][block % len(sizes[source])]
    totals = np.cumsum(taught, axis=0)
    windows = totals[window:] - totals[:-window]
    of_window = windows.sum(axis=1, keepdims=True)
    wrong = np.abs(windows / of_window - np.array(weights) / sum(weights))
    # no rule can be finer than the largest block
    assert (wrong <= np.maximum(0.01, 2047 / of_window)).all()


def test_rows_end_where_all_sources_have_ended():
    schedule = Schedule([Sized([5, 5], ends=True), Sized([5], ends=True)], [1.0, 1.0])
    assert [schedule.at(row) for row in range(3)] == [(0, 0), (1, 0), (0, 1)]
    with pytest.raises(IndexError):
        schedule.at(3)
    assert schedule.n_rows == 3
