"""Times as people and SLURM write them."""

from __future__ import annotations

import pytest

from sftplay.units import parse_seconds

TIMES = {
    "3h30m": 3 * 3600 + 30 * 60,
    "3h 30m": 12600,
    "90m": 5400,
    "5400": 5400,
    "45s": 45,
    "1.5h": 5400,
    "2D": 172800,
    "1d2h3m4s": 86400 + 7200 + 180 + 4,
    "0.5": 0.5,
    # sbatch(1), --time: hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
    "1-12:00:00": 36 * 3600,
    "12:00:00": 43200,
    "1-12": 36 * 3600,
    "1-12:30": 36 * 3600 + 1800,
    "90:00": 5400,
    "00:00:10": 10,
}


@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_read_in_seconds(text: str):
    assert parse_seconds(text) == TIMES[text]


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "3 hours", "30m3h", "-5", "0", "0s", "00:00:00", "1:75:00", "nan", "inf", "1.2.3h", "1-"]
)
def test_what_is_no_time_or_no_time_at_all_is_refused_with_the_forms_to_write(text: str):
    with pytest.raises(ValueError, match="write 3h30m"):
        parse_seconds(text)
