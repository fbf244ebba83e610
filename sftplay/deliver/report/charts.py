"""Curves as inline SVG that fills whatever width it gets, with its labels as text beside it.

It knows steps and figures, nothing of runs. The drawing stretches; strokes, dots and letters do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sftplay.deliver.report.figures import escaped, format_figure
from sftplay.deliver.report.history import Point

WIDTH, HEIGHT = 1000.0, 300.0
MOST_DOTS = 60
LOG_RATIO = 50.0
"""From this ratio of highest to lowest on, a linear axis would hide the low half of a positive curve."""

LEAST_DRAWN, MOST_DRAWN = 1e-100, 1e100
"""Beyond these sizes arithmetic on an axis would leave the range of floats."""

GIB = 2.0**30


@dataclass(frozen=True)
class Curve:
    """One curve of a chart; `kind` is its colour: a, b, c or d. With `dots` every point shows."""

    key: str
    name: str
    points: Sequence[Point]
    kind: str = "a"
    dots: bool = False
    trend: Sequence[Point] = ()
    """Means over stretches, drawn over a curve that is then pale; for noisy figures of many points."""


@dataclass(frozen=True)
class Chart:
    """Curves over one axis of steps. `unit` is a figure's key by which `figures.format_figure` formats values."""

    title: str
    unit: str
    lines: Sequence[Curve]
    last_step: float
    resumed: Sequence[float] = ()
    is_wide: bool = False
    may_be_log: bool = False


@dataclass(frozen=True)
class Axis:
    """A range of values laid over a length, linear or by powers of ten, with round places to label."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def draw(chart: Chart) -> str:
    """The chart as an HTML figure; empty when none of its lines has a point."""
    lines = [line for line in chart.lines if len(line.points)]
    if not lines:
        return ""
    values = [value for line in lines for _, value in line.points if is_drawable(value)]
    across = linear_axis(0.0, max([chart.last_step, 1.0, *(line.points[-1][0] for line in lines)]), 4, whole=True)
    up = value_axis(values, is_bytes=chart.unit.endswith("_bytes"), may_be_log=chart.may_be_log)
    drawn = "".join(_marks(line.points, across) for line in lines)
    drawn += "".join(
        f'<line class="resume" x1="{_x(step, across)}" x2="{_x(step, across)}" y1="0" y2="{HEIGHT:g}"/>'
        for step in chart.resumed
    )
    drawn += "".join(_path(line, across, up) for line in lines)
    scale = " (logarithmic)" if up.is_log else ""
    described = "; ".join(f"{line.name}: {summary(line, chart.unit)}" for line in lines)
    picture = (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img">'
        f"<title>{escaped(chart.title)} against step{scale}. {escaped(described)}</title>{_grid(up)}{drawn}</svg>"
    )
    told = "".join(
        f'<li class="{line.kind}"><b>{escaped(line.name)}</b> <span>{escaped(summary(line, chart.unit))}</span></li>'
        for line in lines
    )
    wide = " big" if chart.is_wide else ""
    return (
        f'<figure class="chart{wide}"><figcaption>{escaped(chart.title)}<small>{scale}</small></figcaption>'
        f'<div class="plot">{_upright(up, chart.unit)}<div class="area">{picture}<i class="cursor"></i></div>'
        f'{_labels(across)}</div><ul class="legend">{told}</ul>{_points(chart.unit, lines, across)}'
        "</figure>"
    )


def is_drawable(value: float) -> bool:
    """True for values that are finite and of a size that arithmetic with floats survives."""
    return abs(value) < MOST_DRAWN


def summary(line: Curve, unit: str) -> str:
    """Where a curve begins, its lowest and highest value, and where it ends."""
    finite = [point for point in line.points if is_drawable(point[1])]
    if not finite:
        return "no finite value"
    (first_step, first), (last_step, last) = finite[0], finite[-1]
    text = f"{format_figure(unit, first)} at step {first_step:,.0f}"
    if len({value for _, value in finite}) == 1 and len(finite) > 1:
        text = f"{format_figure(unit, first)} throughout"
    elif len(finite) > 1:
        low, high = (pick(finite, key=lambda point: point[1]) for pick in (min, max))
        text += f" → {format_figure(unit, last)} at step {last_step:,.0f}"
        text += f"; lowest {format_figure(unit, low[1])} at {low[0]:,.0f}" if low not in (finite[0], finite[-1]) else ""
        text += (
            f"; highest {format_figure(unit, high[1])} at {high[0]:,.0f}" if high not in (finite[0], finite[-1]) else ""
        )
    return text + ("; not finite in places" if len(finite) < len(line.points) else "")


def value_axis(values: Sequence[float], *, is_bytes: bool = False, may_be_log: bool = False) -> Axis:
    """The axis that shows all values; if it may, by powers of ten where they are positive and span many."""
    if not values:
        return linear_axis(0.0, 1.0, 3)
    low, high = min(values), max(values)
    if is_bytes:
        unit = next(unit for unit in (GIB, 2.0**20, 1.0) if high >= unit or unit == 1.0)
        axis = linear_axis(0.0, high / unit, 3)
        return Axis(0.0, axis.high * unit, [tick * unit for tick in axis.ticks])
    if may_be_log and low > LEAST_DRAWN and high / low > LOG_RATIO:
        return _log_axis(low, high)
    # A curve that stays far from zero would be a flat line on an axis that begins there.
    return linear_axis(min(low, 0.0) if low < 0.5 * high else low, high, 3)


def linear_axis(low: float, high: float, wanted: int, *, whole: bool = False) -> Axis:
    """An axis over low to high with about `wanted` steps between round values, which end it on both sides."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), LEAST_DRAWN):
        pad = abs(high) / 2 if abs(high) > LEAST_DRAWN else 1.0
        low, high = low - pad, high + pad
    rough = max((high - low) / wanted, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    width = next(power * factor for factor in factors if power * factor >= rough * 0.999 or factor == 10)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    ticks = [i * width for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, -(-(last - first) // 4))
    ticks = [10.0**i for i in range(first, last + 1, stride)]
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def _x(step: float, across: Axis) -> str:
    return f"{WIDTH * across.place(step):.1f}".removesuffix(".0")


def _y(value: float, up: Axis) -> str:
    return f"{HEIGHT * (1 - up.place(value)):.1f}".removesuffix(".0")


def _grid(up: Axis) -> str:
    return "".join(f'<line class="grid" x1="0" x2="{WIDTH:g}" y1="{_y(t, up)}" y2="{_y(t, up)}"/>' for t in up.ticks)


def _marks(points: Sequence[Point], across: Axis) -> str:
    """A bar over the whole height where a value was not finite."""
    bad = [step for step, value in points if not is_drawable(value)][:MOST_DOTS]
    return "".join(
        f'<line class="bad" x1="{_x(step, across)}" x2="{_x(step, across)}" y1="0" y2="{HEIGHT:g}"/>' for step in bad
    )


def _path(line: Curve, across: Axis, up: Axis) -> str:
    finite = [(step, value) for step, value in line.points if is_drawable(value)]
    parts, is_open = [], False
    for step, value in line.points:
        if not is_drawable(value):
            is_open = False
            continue
        parts.append(f"{'L' if is_open else 'M'}{_x(step, across)} {_y(value, up)}")
        is_open = True
    # A lone point of a path shows only when it has a length, if of zero.
    lone = "h0" if len(finite) == 1 else ""
    data = f' data-series="{escaped(line.key)}"'
    pale = " pale" if line.trend else ""
    drawn = f'<path class="line {line.kind}{pale}"{data} d="{"".join(parts)}{lone}"/>'
    if line.trend:
        turns = [f"{_x(step, across)} {_y(value, up)}" for step, value in line.trend if is_drawable(value)]
        drawn += f'<path class="line {line.kind}" d="M{"L".join(turns)}"/>' if turns else ""
    if len(finite) == 1 or (line.dots and len(finite) <= MOST_DOTS):
        dots = "".join(f"M{_x(step, across)} {_y(value, up)}h0" for step, value in finite)
        drawn += f'<path class="dots {line.kind}" d="{dots}"/>'
    return drawn


def _upright(up: Axis, unit: str) -> str:
    texts = [_tick(tick, up, unit) for tick in up.ticks]
    spans = "".join(
        f'<span style="top:{100 * (1 - up.place(tick)):.2f}%">{escaped(text)}</span>'
        for tick, text in zip(up.ticks, texts, strict=True)
    )
    return f'<div class="up" aria-hidden="true" style="width:{max(map(len, texts))}ch">{spans}</div>'


def _tick(tick: float, up: Axis, unit: str) -> str:
    if unit.endswith("_bytes"):
        factor, name = (GIB, "GiB") if up.high >= GIB else (2.0**20, "MiB") if up.high >= 2**20 else (1.0, "B")
        return f"{tick / factor:.4g} {name}"
    if tick and (abs(tick) < 1e-3 or abs(tick) >= 1e7):
        return f"{tick:.3g}".replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")
    return (
        format_figure(unit, tick)
        if unit.endswith("_share")
        else f"{tick:,.6g}"
        if abs(tick) < 1e6
        else f"{tick / 1e6:g}M"
    )


def _labels(across: Axis) -> str:
    # The outermost labels stay inside the figure instead of being centred below their ends.
    spans = ""
    for tick in across.ticks:
        place = across.place(tick)
        side = ' class="first"' if place < 0.02 else ' class="last"' if place > 0.98 else ""
        spans += f'<span{side} style="left:{100 * place:.2f}%">{_tick(tick, across, "step")}</span>'
    return f'<div class="across" aria-hidden="true">{spans}</div>'


def _points(unit: str, lines: Sequence[Curve], across: Axis) -> str:
    """The values for the pointer, exact where the drawing is rounded."""
    told = []
    for line in lines:
        finite = [(step, value) for step, value in line.points if is_drawable(value)]
        told.append({"name": line.name, "x": [s for s, _ in finite], "y": [float(f"{v:.5g}") for _, v in finite]})
    kind = "bytes" if unit.endswith("_bytes") else "share" if unit.endswith("_share") else ""
    data = json.dumps({"range": [across.low, across.high], "kind": kind, "lines": told}, separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json">{safe}</script>'
