"""The table of `make bench-scaling`, on figures by hand."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.scaling import Measured, as_table, efficiency, measure, read_counts

ONE = Measured(1, 16, 1000.0, 0.5, 0.0)
TWO = Measured(2, 16, 1500.0, 0.333, 0.125)


def test_efficiency_is_the_rate_over_n_times_that_of_one_process():
    assert efficiency(ONE, [ONE, TWO]) == 1.0
    assert efficiency(TWO, [ONE, TWO]) == 0.75  # 1500 / (2 x 1000)
    assert efficiency(TWO, [TWO]) is None


def test_table_names_its_kind_of_scaling_and_has_a_line_for_each_launch():
    table = as_table([ONE, TWO], is_weak=False)
    assert table[0].startswith("Strong scaling")
    assert table[-2:] == ["| 1 | 16 | 1,000 | 0.500 | 100% | 0.0% |", "| 2 | 16 | 1,500 | 0.333 | 75% | 12.5% |"]
    assert as_table([TWO], is_weak=True)[0].startswith("Weak scaling")
    assert "| - |" in as_table([TWO], is_weak=True)[-1]


def test_the_median_step_counts_and_the_first_two_do_not():
    rates = (1.0, 1.0, 100.0, 60.0, 5.0)
    lines = [{"step_s": 2 / rate, "tokens_per_s": rate, "exposed_communication_share": 0.1} for rate in rates]
    assert measure(2, 16, lines) == Measured(2, 16, 60.0, 2 / 60, 0.1)


def test_counts_are_numbers_from_one_on():
    assert read_counts("4,1,2,2") == (1, 2, 4)
    for text in ("0", "1,", "two", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            read_counts(text)
