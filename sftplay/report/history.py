"""The course of a run from metrics.jsonl, and its curves thinned to what a screen can show.

It draws nothing. A line that cannot be read is counted, never fatal.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

Point = tuple[float, float]
"""(step, value); the value may be NaN or infinite."""

TREND_BUCKETS = 50
"""Stretches of steps a trend has: enough for the shape, few enough to average noise away."""

MOST_SOURCES = 12
"""Sources of a mixture that are kept; a chart of more is no chart."""


RECENT_LOSS = "recent_loss"
"""A source's mean loss since the line before; its `loss` is that since the first step."""


@dataclass
class History:
    """Every figure of metrics.jsonl over the steps it was written for."""

    steps: dict[str, array[float]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)
    n_lines: int = 0
    n_broken: int = 0
    """Lines that are no object with a step; a last one still being written does not count."""

    n_backwards: int = 0
    """Lines whose step is not larger than the one before."""

    bad_steps: dict[str, list[int]] = field(default_factory=dict)
    """Figure -> the first steps at which it was not finite."""

    sources: dict[str, History] = field(default_factory=dict)
    """Source of a mixture -> its own figures."""

    def curve(self, name: str) -> list[Point]:
        """Return one figure over the steps, thinned to what a chart can show; empty when it was never written."""
        # A stretch is a pixel or two on a phone, with four points.
        return thin(self._points(name), 150)

    def trend(self, name: str) -> list[Point]:
        """Return the means of one figure over stretches of steps; empty where there are few points."""
        points = self._points(name)
        return means(points, TREND_BUCKETS) if len(points) >= 4 * TREND_BUCKETS else []

    def _points(self, name: str) -> list[Point]:
        return list(zip(self.steps.get(name, ()), self.values.get(name, ()), strict=True))

    def _finite(self, name: str) -> list[float]:
        return [value for value in self.values.get(name, ()) if math.isfinite(value)]

    def ends(self, name: str) -> tuple[float, float] | None:
        """Return the first and the newest value of one figure."""
        values = self.values.get(name)
        return (values[0], values[-1]) if values else None

    def middle(self, name: str) -> float | None:
        """Return the median of one figure's finite values."""
        finite = self._finite(name)
        return median(finite) if finite else None

    def thirds(self, name: str) -> tuple[float, float, float] | None:
        """Return the medians of one figure over each third of its lines; None where a third has fewer than three."""
        finite = self._finite(name)
        size = len(finite) // 3
        if size < 3:
            return None
        return median(finite[:size]), median(finite[size:-size]), median(finite[-size:])

    def largest(self, name: str) -> float | None:
        """Return the largest finite value of one figure."""
        return max(self._finite(name), default=None)


def read_history(path: Path) -> History:
    """Return the history in metrics.jsonl; empty when there is none. Raise OSError where the file is there and cannot
    be read.
    """
    history, previous = History(), -math.inf
    if not path.exists():
        return history
    with path.open("rb") as handle:
        for raw in handle:
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                line = {}
            step = as_number(line.get("step")) if isinstance(line, dict) else None
            if step is None or not 0 <= step < 2**53:  # up to there whole numbers are exact as floats
                history.n_broken += raw.endswith(b"\n") and bool(raw.strip())
                continue
            history.n_lines += 1
            history.n_backwards += step <= previous
            previous = step
            _add(history, step, line=line)
            sources, losses = line.get("sources"), line.get("source_losses")
            for name, figures in sources.items() if isinstance(sources, dict) else ():
                if isinstance(figures, dict) and (name in history.sources or len(history.sources) < MOST_SOURCES):
                    recent = {RECENT_LOSS: losses.get(name)} if isinstance(losses, dict) else {}
                    _add(history.sources.setdefault(name, History()), step, line=figures | recent)
    return history


def _add(history: History, step: float, *, line: dict[str, object]) -> None:
    values, steps = history.values, history.steps
    for name, given in line.items():
        # With a million lines this takes nearly all the time.
        value = given if type(given) is float else as_number(given)
        if value is None or name in ("step", "attempt", "row_ids"):
            continue
        if name not in values:
            if len(values) >= 120 or len(name) > 80:  # a file with more is not metrics
                continue
            steps[name], values[name] = array("d"), array("d")
        steps[name].append(step)
        values[name].append(value)
        if not -math.inf < value < math.inf:
            bad = history.bad_steps.setdefault(name, [])
            if len(bad) < 5:
                bad.append(int(step))


def as_number(value: object) -> float | None:
    """Return the value as a float, None when it is no number; an integer too large for one is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_bytes(value: object) -> float | None:
    """Return the value as bytes that a machine can have; None where it is no number, negative or an exbibyte."""
    number = as_number(value)
    return number if number is not None and 0 <= number < 2**60 else None


def thin(points: Sequence[Point], buckets: int) -> list[Point]:
    """Return at most four points of each of `buckets` stretches of steps: the first, lowest, highest and last one.

    A line through them covers the same pixels as one through all points, where a bucket is no wider than a pixel (M4
    aggregation: Jugel, Jerzak, Hackenbroich, Markl, VLDB 2014). Points that are not finite are kept, one a bucket.
    """
    if len(points) <= 4 * buckets:
        return list(points)
    kept = []
    for stretch in _stretches(points, buckets):
        finite = [i for i, (_, value) in enumerate(stretch) if math.isfinite(value)]
        chosen = set(next(([i] for i, (_, value) in enumerate(stretch) if not math.isfinite(value)), []))
        if finite:
            chosen |= {finite[0], finite[-1]}
            chosen |= {pick(finite, key=lambda i: stretch[i][1]) for pick in (min, max)}
        kept += [stretch[i] for i in sorted(chosen)]
    return kept


def means(points: Sequence[Point], buckets: int) -> list[Point]:
    """Return the mean step and the mean finite value of each stretch; stretches without one are left out."""
    averages = []
    for stretch in _stretches(points, buckets):
        finite = [(step, value) for step, value in stretch if math.isfinite(value)]
        if n := len(finite):
            averages.append((math.fsum(step for step, _ in finite) / n, math.fsum(value / n for _, value in finite)))
    return averages


def _stretches(points: Sequence[Point], buckets: int) -> Iterator[list[Point]]:
    low, high = points[0][0], max(step for step, _ in points)
    width = (high - low) / buckets or 1.0
    for _, stretch in groupby(points, key=lambda point: min(int((point[0] - low) / width), buckets - 1)):
        yield list(stretch)
