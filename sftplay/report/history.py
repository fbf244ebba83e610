"""The course of a run from metrics.jsonl, and its curves thinned to what a screen can show.

It draws nothing. A line that cannot be read is counted, never fatal.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

Point = tuple[float, float]
"""(step, value); the value may be NaN or infinite."""

BUCKETS = 150
"""Stretches of steps a curve is thinned to: a pixel or two each on a phone, four points each."""

TREND_BUCKETS = 50
"""Stretches of steps a trend has: enough for the shape, few enough to average noise away."""

MOST_SERIES = 120
"""Names of figures kept of one run; a file with more is not metrics."""

MOST_STEPS = 2**53
"""Whole numbers up to here are exact as floats; no run has more steps."""

EXBIBYTE = 2**60
"""No machine has so much memory: a larger figure is nonsense, and would fill the page with digits."""

MOST_SOURCES = 12
"""Sources of a mixture that are kept; a chart of more is no chart."""

RECENT_LOSS = "recent_loss"
"""A source's mean loss since the line before; its `loss` is that since the first step."""

LONGEST_NAME = 80
NO_FIGURES = ("step", "attempt", "row_ids")


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
        """One figure over the steps, thinned to what a chart can show; empty when it was never written."""
        return thin(self._points(name), BUCKETS)

    def trend(self, name: str) -> list[Point]:
        """The mean of one figure over each of some stretches of steps; empty where there are few points."""
        points = self._points(name)
        return means(points, TREND_BUCKETS) if len(points) >= 4 * TREND_BUCKETS else []

    def _points(self, name: str) -> list[Point]:
        return list(zip(self.steps.get(name, ()), self.values.get(name, ()), strict=True))

    def ends(self, name: str) -> tuple[float, float] | None:
        """The first and the newest value of one figure."""
        values = self.values.get(name)
        return (values[0], values[-1]) if values else None

    def middle(self, name: str) -> float | None:
        """The median of one figure's finite values."""
        finite = [value for value in self.values.get(name, ()) if math.isfinite(value)]
        return median(finite) if finite else None

    def thirds(self, name: str) -> tuple[float, float, float] | None:
        """The medians of one figure over each third of its lines; None where a third has fewer than three."""
        finite = [value for value in self.values.get(name, ()) if math.isfinite(value)]
        size = len(finite) // 3
        if size < 3:
            return None
        return median(finite[:size]), median(finite[size:-size]), median(finite[-size:])

    def largest(self, name: str) -> float | None:
        """The largest finite value of one figure."""
        return max((value for value in self.values.get(name, ()) if math.isfinite(value)), default=None)


def read_history(path: Path) -> History:
    """The history in metrics.jsonl; empty when there is none.

    Raises:
        OSError: the file is there and cannot be read.
    """
    history = History()
    if not path.exists():
        return history
    previous = -math.inf
    with path.open("rb") as handle:
        for raw in handle:
            line = _parsed(raw)
            step = as_number(line.get("step"))
            if step is None or not 0 <= step < MOST_STEPS:
                history.n_broken += raw.endswith(b"\n") and bool(raw.strip())
                continue
            history.n_lines += 1
            history.n_backwards += step <= previous
            previous = step
            _add(history, step, line=line)
            _add_sources(history, step, line=line)
    return history


def _parsed(raw: bytes) -> dict[str, object]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _add(history: History, step: float, *, line: dict[str, object]) -> None:
    values, steps = history.values, history.steps
    for name, given in line.items():
        # With a million lines this takes nearly all the time.
        value = given if type(given) is float else as_number(given)
        if value is None or name in NO_FIGURES:
            continue
        if name not in values:
            if len(values) >= MOST_SERIES or len(name) > LONGEST_NAME:
                continue
            steps[name], values[name] = array("d"), array("d")
        steps[name].append(step)
        values[name].append(value)
        if not -math.inf < value < math.inf:
            bad = history.bad_steps.setdefault(name, [])
            if len(bad) < 5:
                bad.append(int(step))


def _add_sources(history: History, step: float, *, line: dict[str, object]) -> None:
    sources, losses = line.get("sources"), line.get("source_losses")
    for name, figures in sources.items() if isinstance(sources, dict) else ():
        if isinstance(figures, dict) and (name in history.sources or len(history.sources) < MOST_SOURCES):
            recent = {RECENT_LOSS: losses.get(name)} if isinstance(losses, dict) else {}
            _add(history.sources.setdefault(name, History()), step, line=figures | recent)


def as_number(value: object) -> float | None:
    """The value as a float, None when it is no number; an integer too large for one is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_bytes(value: object) -> float | None:
    """The value as bytes that a machine can have; None where it is no number, negative or nonsense."""
    number = as_number(value)
    return number if number is not None and 0 <= number < EXBIBYTE else None


def thin(points: Sequence[Point], buckets: int) -> list[Point]:
    """At most four points of each of `buckets` stretches of steps: the first, lowest, highest and last one.

    A line through them covers the same pixels as one through all points, where a bucket is no wider than a pixel (M4
    aggregation: Jugel, Jerzak, Hackenbroich, Markl, VLDB 2014). Points that are not finite are kept, one a bucket.
    """
    if len(points) <= 4 * buckets:
        return list(points)
    return [point for stretch in _stretches(points, buckets) for point in _corners(stretch)]


def means(points: Sequence[Point], buckets: int) -> list[Point]:
    """The mean step and the mean finite value of each stretch; stretches without one are left out."""
    averages = []
    for stretch in _stretches(points, buckets):
        finite = [(step, value) for step, value in stretch if math.isfinite(value)]
        if finite:
            n = len(finite)
            averages.append((math.fsum(step for step, _ in finite) / n, math.fsum(value / n for _, value in finite)))
    return averages


def _stretches(points: Sequence[Point], buckets: int) -> Iterator[list[Point]]:
    low, high = points[0][0], max(step for step, _ in points)
    width = (high - low) / buckets or 1.0
    stretch: list[Point] = []
    place = 0
    for point in points:
        here = min(int((point[0] - low) / width), buckets - 1)
        if here != place and stretch:
            yield stretch
            stretch = []
        place = here
        stretch.append(point)
    yield stretch


def _corners(stretch: list[Point]) -> list[Point]:
    finite = [i for i, (_, value) in enumerate(stretch) if math.isfinite(value)]
    chosen = set(next(([i] for i, (_, value) in enumerate(stretch) if not math.isfinite(value)), []))
    if finite:
        chosen |= {finite[0], finite[-1]}
        chosen |= {min(finite, key=lambda i: stretch[i][1]), max(finite, key=lambda i: stretch[i][1])}
    return [stretch[i] for i in sorted(chosen)]
