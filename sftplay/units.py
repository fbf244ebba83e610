"""Prints sizes, counts and durations in one way, and parses those that a user types."""

from __future__ import annotations

import re

GIB = 2**30

_FACTORS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": GIB, "tib": 2**40}
_FACTORS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_bytes(text: str) -> int:
    """Bytes in `24GiB`, `80 GB`, `512MiB` or a bare number; ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _FACTORS:
        raise ValueError(f"not a size: {text!r} (write 24GiB, 512MiB or a number of bytes)")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_seconds(text: str) -> float:
    """Seconds in `3h30m`, `90m`, `1.5h`, a bare number of seconds, or a time in SLURM's form: `1-12:00:00`, `12:00:00`,
    `1-12`. A bare number is seconds here and minutes in SLURM.

    Raises ValueError if the text has none of these forms, or the time is not above 0.
    """
    named = re.fullmatch(r"\s*" + "".join(rf"(?:([0-9.]+)\s*{unit}\s*)?" for unit in _SECONDS), text.lower())
    clock = re.fullmatch(r"\s*(?:([0-9]+)-)?([0-9]+)(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?\s*", text)
    try:
        if named:
            seconds = sum(float(n) * factor for n, factor in zip(named.groups(), _SECONDS.values(), strict=True) if n)
        elif clock:
            days, first, second, third = clock.groups()
            if days is None and third is None:  # minutes and seconds, or seconds, unlike SLURM (sbatch(1), --time)
                first, second, third = ("0", first, second) if second is not None else ("0", "0", first)
            parts = zip((days, first, second, third), _SECONDS.values(), strict=True)
            seconds = sum(int(part or 0) * factor for part, factor in parts)
        else:
            seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"not a time: {text!r} (write 3h30m, 90m, 1-12:00:00 or a number of seconds)")
    return seconds


def format_bytes(n_bytes: float) -> str:
    """`1.50 GiB`, `12.0 MiB`, `800 B`: about three digits, binary units."""
    for unit, factor, digits in (("TiB", 2**40, 2), ("GiB", GIB, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.{digits}f} {unit}"
    return f"{n_bytes:.0f} B"


def format_count(n: float) -> str:
    """`1.2K`, `3.4M`, `7.0B`; below a thousand three digits, and whole numbers as they are."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= factor:
            return f"{n / factor:.1f}{unit}"
    return f"{n:.3g}"


def plural(n: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def format_seconds(seconds: float) -> str:
    """`8.4 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
