"""The steps of a run: every figure of metrics.jsonl, thinned to what a chart can show."""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

from sftplay.report.figures import as_number

Point = tuple[float, float]
"""(step, value); the value may be NaN or infinite."""

MOST_SOURCES = 12
"""Sources of a mixture that are kept; a chart of more is no chart."""

MOST_FIGURES = 120
"""A file with more of them is not metrics."""

RECENT_LOSS = "recent_loss"
"""A source's mean loss since the line before; its `loss` is that since the first step."""


@dataclass
class History:
    """Every figure of metrics.jsonl over the steps it was written for."""

    steps: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    values: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    n_broken: int = 0
    """Lines that are no object with a step; a last one still being written does not count."""

    n_backwards: int = 0
    """Lines whose step is not larger than the one before."""

    bad_steps: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Figure -> the steps at which it was not finite."""

    sources: dict[str, History] = field(default_factory=dict)
    """Source of a mixture -> its own figures."""

    def curve(self, name: str) -> list[Point]:
        """Return one figure over the steps, thinned to what a chart can show; empty when it was never written."""
        # A stretch is a pixel or two on a phone, with four points.
        return thin(self._points(name), 150)

    def trend(self, name: str) -> list[Point]:
        """Return the means of one figure over 50 stretches of steps; empty where there are few points."""
        points = self._points(name)
        stretches = _stretches(points, 50) if len(points) >= 200 else ()
        finite = ([point for point in stretch if math.isfinite(point[1])] for stretch in stretches)
        return [(mean([step for step, _ in few]), mean([value for _, value in few])) for few in finite if few]

    def _points(self, name: str) -> list[Point]:
        return list(zip(self.steps[name], self.values[name], strict=True)) if name in self.values else []

    def finite(self, name: str) -> list[float]:
        """Return one figure's finite values."""
        return [value for value in self.values.get(name, ()) if math.isfinite(value)]

    def newest(self, name: str) -> float | None:
        return self.values[name][-1] if name in self.values else None

    @property
    def seconds(self) -> float | None:
        """The time of all logged steps; None where no line has one."""
        times, before = 0.0, 0.0
        for step, seconds in self._points("step_s"):
            times += max(0.0, (step - before) * seconds) if math.isfinite(seconds) else 0.0
            before = step
        return times or None

    def middle(self, name: str) -> float | None:
        """Return the median of one figure's finite values."""
        finite = self.finite(name)
        return median(finite) if finite else None

    def thirds(self, name: str) -> tuple[float, float, float] | None:
        """Return the medians of one figure over each third of its lines; None where a third has fewer than three."""
        finite = self.finite(name)
        size = len(finite) // 3
        if size < 3:
            return None
        return median(finite[:size]), median(finite[size:-size]), median(finite[-size:])

    def largest(self, name: str) -> float | None:
        """Return the largest finite value of one figure."""
        return max(self.finite(name), default=None)

    def add(self, step: float, line: dict[str, object]) -> None:
        values = self.values
        for name, given in line.items():
            # With a million lines this takes nearly all the time.
            value = given if type(given) is float else as_number(given)
            if value is None or name in ("step", "attempt", "row_ids"):
                continue
            if name not in values and (len(values) >= MOST_FIGURES or len(name) > 80):
                continue
            self.steps[name].append(step)
            values[name].append(value)
            if not -math.inf < value < math.inf:
                self.bad_steps[name].append(int(step))


def read_history(path: Path) -> History:
    """Return the history in metrics.jsonl. Raise OSError where the file cannot be read."""
    history, previous = History(), -math.inf
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
            history.n_backwards += step <= previous
            previous = step
            history.add(step, line)
            sources, losses = line.get("sources"), line.get("source_losses")
            for name, figures in sources.items() if isinstance(sources, dict) else ():
                if isinstance(figures, dict) and (name in history.sources or len(history.sources) < MOST_SOURCES):
                    recent = {RECENT_LOSS: losses.get(name)} if isinstance(losses, dict) else {}
                    history.sources.setdefault(name, History()).add(step, figures | recent)
    return history


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite values, also where their sum is too large for a float."""
    return math.fsum(value / len(values) for value in values)


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
            lowest, highest = (pick(finite, key=lambda i: stretch[i][1]) for pick in (min, max))
            chosen |= {finite[0], lowest, highest, finite[-1]}
        kept += [stretch[i] for i in sorted(chosen)]
    return kept


def _stretches(points: Sequence[Point], buckets: int) -> Iterator[list[Point]]:
    low, high = points[0][0], max(step for step, _ in points)
    width = (high - low) / buckets or 1.0
    for _, stretch in groupby(points, key=lambda point: min(int((point[0] - low) / width), buckets - 1)):
        yield list(stretch)
