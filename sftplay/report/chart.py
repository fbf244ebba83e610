"""Charts of a run as SVG: curves, axes with round labels, and the exact values for the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sftplay.report.figures import find_name, format_figure, is_share
from sftplay.report.history import Point
from sftplay.report.run_files import RunFiles
from sftplay.units import GIB

LEAST_DRAWN, MOST_DRAWN = 1e-100, 1e100
"""Beyond these sizes arithmetic on an axis would leave the range of floats."""

AXES = {
    "loss": "nats a token",
    "row_loss": "mean of a row",
    "task_loss": "as the run's task defines it",
    "learning_rate": "rate",
    "grad_norm": "norm",
    "tokens": "tokens a second",
    "step_s": "seconds",
    "model_tflops_per_s": "TFLOP/s",
}
"""Unit of a chart -> the title of its axis of values."""


@dataclass(frozen=True)
class Curve:
    """One curve of a chart. With `dots` every point shows; a dashed one is a level that the others are held against."""

    key: str
    name: str
    points: Sequence[Point]
    dots: bool = False
    dashed: bool = False
    trend: Sequence[Point] = ()
    """Means over stretches, drawn over a curve that is then pale; for noisy figures of many points."""

    colour: int | None = None
    """Its number among the eight colours, from 0; None takes that of its place in the chart."""

    @cached_property
    def drawable(self) -> list[Point]:
        """The points that have a place on an axis."""
        return [point for point in self.points if abs(point[1]) < MOST_DRAWN]


@dataclass(frozen=True)
class Axis:
    """A range of values between the first and the last round label, linear or by powers of ten."""

    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return 0 at the low end, 1 at the high one."""
        ends = (self.ticks[0], self.ticks[-1], value)
        low, high, value = map(math.log10, ends) if self.is_log else ends
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def labels(self, unit: str) -> list[tuple[float, str]]:
        """Return where labels stand, and their texts."""
        in_words = unit.endswith("_bytes") or is_share(unit)
        return [(self.place(v), format_figure(unit, v) if in_words else f"{v:,.7g}") for v in self.ticks]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one axis of whole numbers, mostly steps; each has at least one point."""

    title: str
    unit: str
    """A figure's key, by which `format_figure` formats values."""

    curves: Sequence[Curve]
    last_step: float
    resumed: Sequence[float] = ()
    """Steps after which the run was resumed."""

    along: str = "step"
    """What the axis across counts."""

    @cached_property
    def across(self) -> Axis:
        ends = (curve.points[-1][0] for curve in self.curves)
        return linear_axis(0.0, max(self.last_step, 1.0, *ends), wanted=4, whole=True)

    @cached_property
    def up(self) -> Axis:
        return value_axis([value for curve in self.curves for _, value in curve.drawable], self.unit)

    @property
    def up_title(self) -> str:
        """What the axis of values counts."""
        if self.unit.endswith("_bytes"):
            return "held at most"
        return "share" if is_share(self.unit) else AXES.get(self.unit, find_name(self.unit))

    def colour(self, place: int) -> str:
        """Return the class of a curve's colour, by its place among the curves."""
        number = self.curves[place].colour
        return "abcdefgh"[(place if number is None else number) % 8]

    def x(self, step: float) -> str:
        """Where a step lies in a drawing 1000 wide."""
        return f"{1000 * self.across.place(step):.1f}".removesuffix(".0")

    def path(self, points: Iterable[Point], *, joined: bool = True) -> str:
        """Return the data of an SVG path in a drawing 300 high, with a gap where a value is not finite.

        Points that are not joined are lines of length zero, which round ends make dots.
        """
        turns, is_open = [], False
        for step, value in points:
            is_drawable = abs(value) < MOST_DRAWN
            if is_drawable:
                y = f"{300 * (1 - self.up.place(value)):.1f}".removesuffix(".0")
                turns.append(f"{'L' if is_open and joined else 'M'}{self.x(step)} {y}{'' if joined else 'h0'}")
            is_open = is_drawable
        return "".join(turns)

    def summary(self, curve: Curve) -> str:
        """Where a curve begins, its lowest and highest value, and where it ends."""
        finite, unit = curve.drawable, self.unit
        if not finite:
            return "no finite value"
        (first_step, first), (last_step, last) = finite[0], finite[-1]
        text = f"{format_figure(unit, first)} at {self.along} {first_step:,.0f}"
        if len({value for _, value in finite}) == 1 and len(finite) > 1:
            text = f"{format_figure(unit, first)} throughout"
        elif len(finite) > 1:
            text += f" → {format_figure(unit, last)} at {self.along} {last_step:,.0f}"
            for word, pick in (("lowest", min), ("highest", max)):
                step, value = extreme = pick(finite, key=lambda point: point[1])
                if extreme not in (finite[0], finite[-1]):
                    text += f"; {word} {format_figure(unit, value)} at {step:,.0f}"
        return text + ("; not finite in places" if len(finite) < len(curve.points) else "")

    def not_finite(self) -> list[float]:
        """Return the first steps at which a value was not finite."""
        return [step for curve in self.curves for step, value in curve.points if not abs(value) < MOST_DRAWN][:60]

    def pointer_data(self) -> dict[str, Any]:
        """The values that the pointer shows, exact where the drawing is rounded."""
        kind = "bytes" if self.unit.endswith("_bytes") else "share" if is_share(self.unit) else ""
        curves = [
            {"name": c.name, "x": [s for s, _ in c.drawable], "y": [float(f"{v:.5g}") for _, v in c.drawable]}
            for c in self.curves
        ]
        ends = [self.across.ticks[0], self.across.ticks[-1]]
        return {"range": ends, "kind": kind, "along": self.along, "curves": curves}


ChartPlan = tuple[str, str, Sequence[Curve]]
"""Title, unit, and curves; some may be empty."""


def draw(run: RunFiles, plans: Iterable[ChartPlan], *, along: str = "step") -> list[Chart]:
    """Return a chart of each plan that has a point."""
    return [
        Chart(
            title=title, unit=unit, curves=known, along=along,
            last_step=run.step if along == "step" else 1, resumed=run.resumed if along == "step" else (),
        )
        for title, unit, curves in plans
        if (known := [curve for curve in curves if curve.points])
    ]  # fmt: skip


def logged(run: RunFiles, key: str, *, name: str = "") -> Curve:
    """Return a figure of metrics.jsonl over the steps."""
    return Curve(key, name or find_name(key), run.history.curve(key), trend=run.history.trend(key))


def measured(run: RunFiles, key: str, *, name: str) -> Curve:
    """Return a figure of the evaluations over their steps."""
    return Curve(f"eval_{key}", name, run.curve(key), dots=True)


def value_axis(values: Sequence[float], unit: str) -> Axis:
    """Return the axis that shows all values; a loss that spans many powers of ten has an axis by these."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if unit.endswith("_bytes"):
        size = next(size for size in (GIB, 2.0**20, 1.0) if high >= size or size == 1.0)
        return Axis([tick * size for tick in linear_axis(0.0, high / size, wanted=3).ticks])
    # From a ratio of 50 on, a linear axis would hide the low half of a positive curve.
    if unit in ("loss", "grad_norm") and low > LEAST_DRAWN and high / low > 50.0:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = -(-(last - first) // 4)
        return Axis([10.0**i for i in range(first, last + stride, stride)], is_log=True)
    # A curve that stays far from zero would be a flat line on an axis that begins there.
    return linear_axis(min(low, 0.0) if low < 0.5 * high else low, high, wanted=3)


def linear_axis(low: float, high: float, *, wanted: int, whole: bool = False) -> Axis:
    """Return an axis over low to high with about `wanted` steps between round values, which end it on both sides."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), LEAST_DRAWN):
        pad = abs(high) / 2 if abs(high) > LEAST_DRAWN else 1.0
        low, high = low - pad, high + pad
    rough = max((high - low) / wanted, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    width = next(power * factor for factor in factors if power * factor >= rough * 0.999 or factor == 10)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return Axis([i * width for i in range(first, last + 1)])
