"""Times and sizes as people and SLURM write them, and as they are shown."""

from __future__ import annotations

import pytest

from sftplay.units import format_bytes, format_count, format_seconds, parse_bytes, parse_seconds

TIMES = {
    "3h30m": 3 * 3600 + 30 * 60,
    "90m": 5400,
    "5400": 5400,
    "1.5h": 5400,
    "1d2h3m4s": 86400 + 7200 + 180 + 4,
    # sbatch(1), --time: hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
    "1-12:00:00": 36 * 3600,
    "12:00:00": 43200,
    "1-12:30": 36 * 3600 + 1800,
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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        # IEC 80000-13: GiB is 2^30 bytes, GB 10^9.
        ("24GiB", 24 * 2**30),
        ("0.5 tib", 2**39),
        ("512MiB", 2**29),
        ("80 GB", 80 * 10**9),
        ("1.5kb", 1500),
        ("4096", 4096),
    ],
)
def test_a_size_is_read_in_bytes(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "lots", "-1GiB", "1,5GiB", "3 apples", "inf"])
def test_what_is_no_size_is_refused_with_the_forms_to_write(text: str):
    with pytest.raises(ValueError, match="write 24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(1024), "1.0 KiB"),
        (format_bytes(1.5 * 2**30), "1.50 GiB"),
        (format_bytes(2**41), "2.00 TiB"),
        (format_count(999), "999"),
        (format_count(1000), "1.0K"),
        (format_count(7_000_000_000), "7.0B"),
        (format_seconds(8.44), "8.4 s"),
        (format_seconds(60), "1 min 00 s"),
        (format_seconds(3600), "1 h 00 min"),
        (format_seconds(7500), "2 h 05 min"),
    ],
)
def test_figures_are_short_and_exact_where_the_unit_changes(shown: str, expected: str):
    assert shown == expected
