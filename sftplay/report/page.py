"""The page of a report and its charts."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sftplay.places import ROOT
from sftplay.report.figures import Point, find_name, format_figure

TEMPLATES = ROOT / "sftplay" / "report" / "templates"

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters no HTML text may hold, or that turn the direction of what follows; half surrogates are no UTF-8."""


def render(template: str, **values: Any) -> str:
    """Return the template as HTML, filled with the values."""
    return ENVIRONMENT.get_template(template).render(values)


def render_page(title: str, **values: Any) -> str:
    """Return the whole page as HTML."""
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Only this very script runs and nothing is fetched, so text of a run that became markup could do nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render("page.html", title=title, style=Markup(style), script=Markup(script), digest=digest, **values)


def cut(value: object, limit: int) -> str:
    """Return the value as text. A long one is cut, and its full length is added."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters in all)"


def _escape(value: object) -> object:
    """Show control characters, also those that turn the writing direction, as escapes."""

    def write(match: re.Match[str]) -> str:
        code = ord(match.group())
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return value if isinstance(value, Markup) else _UNPRINTABLE.sub(write, str(value))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=_escape, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
ENVIRONMENT.filters["cut"] = cut
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts; a narrow page scrolls it in itself, or with `stacks` shows the cells of a row below each other."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: str = ""
    """One letter per column: `n` figures, `c` code, `b` the width of a bar, else text."""

    caption: str = ""
    stacks: bool = False

    def kind(self, column: int) -> str:
        """The letter of a column."""
        return self.kinds[column : column + 1]


WIDTH, HEIGHT = 1000.0, 300.0
MOST_DOTS = 60

LEAST_DRAWN, MOST_DRAWN = 1e-100, 1e100
"""Beyond these sizes arithmetic on an axis would leave the range of floats."""

GIB = 2.0**30

AXES = {
    "loss": "nats a token",
    "learning_rate": "rate",
    "grad_norm": "norm",
    "tokens": "tokens a second",
    "step_s": "seconds",
    "model_tflops_per_s": "TFLOP/s",
}
"""Unit of a chart -> the title of its axis of values."""


@dataclass(frozen=True)
class Curve:
    """One curve of a chart; `colour` is a, b, c or d of the style sheet. With `dots` every point shows."""

    key: str
    name: str
    points: Sequence[Point]
    colour: str = "a"
    dots: bool = False
    dashed: bool = False
    """A level that the others are held against."""

    trend: Sequence[Point] = ()
    """Means over stretches, drawn over a curve that is then pale; for noisy figures of many points."""

    @cached_property
    def drawable(self) -> list[Point]:
        """The points that have a place on an axis."""
        return [point for point in self.points if is_drawable(point[1])]


@dataclass(frozen=True)
class Axis:
    """A range of values laid over a length, linear or by powers of ten, with round places to label."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return 0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one axis of whole numbers, mostly steps; each has at least one point."""

    title: str
    unit: str
    """A figure's key, by which `figures.format_figure` formats values."""

    curves: Sequence[Curve]
    last_step: float
    resumed: Sequence[float] = ()
    """Steps after which the run was resumed."""

    is_wide: bool = False
    may_be_log: bool = False
    along: str = "step"
    """What the axis across counts."""

    @cached_property
    def across(self) -> Axis:
        """The axis of steps."""
        ends = (curve.points[-1][0] for curve in self.curves)
        return linear_axis(0.0, max([self.last_step, 1.0, *ends]), wanted=4, whole=True)

    @cached_property
    def up(self) -> Axis:
        """The axis of values."""
        values = [value for curve in self.curves for _, value in curve.drawable]
        return value_axis(values, is_bytes=self.unit.endswith("_bytes"), may_be_log=self.may_be_log)

    @property
    def up_title(self) -> str:
        """What the axis of values counts."""
        if self.unit.endswith("_bytes"):
            return "held at most"
        return "share" if self.unit.endswith("_share") else AXES.get(self.unit, find_name(self.unit))

    def x(self, step: float) -> str:
        """Where a step lies in the drawing."""
        return f"{WIDTH * self.across.place(step):.1f}".removesuffix(".0")

    def y(self, value: float) -> str:
        """Where a value lies in the drawing."""
        return f"{HEIGHT * (1 - self.up.place(value)):.1f}".removesuffix(".0")

    def up_labels(self) -> list[tuple[float, str]]:
        """Return where labels stand along the axis of values, from 0 (the top) to 1, and their texts."""
        return [(1 - self.up.place(tick), _tick(tick, self.unit, high=self.up.high)) for tick in self.up.ticks]

    def across_labels(self) -> list[tuple[float, str]]:
        """Where labels stand below the axis of steps, from 0 (the left) to 1, and their texts."""
        return [(self.across.place(tick), _tick(tick, "step", high=self.across.high)) for tick in self.across.ticks]

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
        """Return steps at which a value was not finite."""
        bad = ([step for step, value in curve.points if not is_drawable(value)] for curve in self.curves)
        return [step for steps in bad for step in steps[:MOST_DOTS]]

    def paths(self) -> Iterator[tuple[str, str, str]]:
        """Yield the paths that draw the curves: classes, the curve's key where it is the curve itself, and data."""
        for curve in self.curves:
            line, is_open = "", False  # with a gap where a value was not finite
            for point in curve.points:
                if is_drawable(point[1]):
                    line += f"{'L' if is_open else 'M'}{self._turn(point)}"
                is_open = is_drawable(point[1])
            # A path of one point is drawn only if it has a line, even one of length zero.
            lone = "h0" if len(curve.drawable) == 1 else ""
            looks = f"{' pale' if curve.trend else ''}{' dashed' if curve.dashed else ''}"
            yield f"line {curve.colour}{looks}", curve.key, line + lone
            if turns := [self._turn(point) for point in curve.trend if is_drawable(point[1])]:
                yield f"line {curve.colour}", "", f"M{'L'.join(turns)}"
            if lone or (curve.dots and len(curve.drawable) <= MOST_DOTS):
                yield f"dots {curve.colour}", "", "".join(f"M{self._turn(point)}h0" for point in curve.drawable)

    def pointer_data(self) -> dict[str, Any]:
        """The values that the pointer shows, exact where the drawing is rounded."""
        kind = "bytes" if self.unit.endswith("_bytes") else "share" if self.unit.endswith("_share") else ""
        curves = [
            {"name": c.name, "x": [s for s, _ in c.drawable], "y": [float(f"{v:.5g}") for _, v in c.drawable]}
            for c in self.curves
        ]
        return {"range": [self.across.low, self.across.high], "kind": kind, "along": self.along, "curves": curves}

    def _turn(self, point: Point) -> str:
        return f"{self.x(point[0])} {self.y(point[1])}"


def is_drawable(value: float) -> bool:
    """Return whether a value is finite and of a size that arithmetic with floats survives."""
    return abs(value) < MOST_DRAWN


def value_axis(values: Sequence[float], *, is_bytes: bool = False, may_be_log: bool = False) -> Axis:
    """Return the axis that shows all values; if it may, by powers of ten where they are positive and span many."""
    if not values:
        return linear_axis(0.0, 1.0, wanted=3)
    low, high = min(values), max(values)
    if is_bytes:
        unit = next(unit for unit in (GIB, 2.0**20, 1.0) if high >= unit or unit == 1.0)
        axis = linear_axis(0.0, high / unit, wanted=3)
        return Axis(0.0, axis.high * unit, [tick * unit for tick in axis.ticks])
    # From a ratio of 50 on, a linear axis would hide the low half of a positive curve.
    if may_be_log and low > LEAST_DRAWN and high / low > 50.0:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = max(1, -(-(last - first) // 4))
        ticks = [10.0**i for i in range(first, last + 1, stride)]
        return Axis(10.0**first, 10.0**last, ticks, is_log=True)
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
    ticks = [i * width for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def _tick(value: float, unit: str, *, high: float) -> str:
    if unit.endswith("_bytes"):
        factor, name = (GIB, "GiB") if high >= GIB else (2.0**20, "MiB") if high >= 2**20 else (1.0, "B")
        return f"{value / factor:.4g} {name}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+").replace("e+", "e")
    if unit.endswith("_share"):
        return format_figure(unit, value)
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value / 1e6:g}M"
