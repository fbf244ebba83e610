"""Figures of a run: its history of steps, and what follows from it."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

from sftplay.units import format_bytes, format_seconds

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


SHARES = (
    "exact_match", "rouge_l", "chrf", "accuracy", "exact_accuracy", "blank_accuracy", "mfu", "pass", "held_out_pass",
    "hidden_pass", "clipped_ratio", "acc_t1", "acc_t2", "acc_t2_empty", "acc_t2_static", "acc_t2_other_hint",
    "follows_hint", "changes_to_hint", "acc_t1_greedy", "acc_t2_greedy", "i2c", "c2i", "fix_rate", "break_rate",
    "clip_share_t1", "clip_share_t2", "clip_share_guide",
)  # fmt: skip
LESS_IS_BETTER = ("loss", "held_out_loss", "perplexity", "bits_per_byte", "c2i", "break_rate")

NAMES = {
    "n": "prompts answered",
    "exact_accuracy": "puzzles solved",
    "pass": "pass@1",
    "acc_t1": "first answers right",
    "acc_t2": "second answers right",
    "acc_t2_empty": "second answers right, no hint",
    "acc_t2_static": "second answers right, static hint",
    "acc_t2_other_hint": "second answers right, another problem's hint",
    "follows_hint": "second answers that are the hint",
    "changes_to_hint": "changed answers that are the hint",
    "acc_t1_greedy": "first answers right, likeliest tokens",
    "acc_t2_greedy": "second answers right, likeliest tokens",
    "delta": "gain of the second turn",
    "i2c": "wrong became right",
    "c2i": "right became wrong",
    "fix_rate": "of the wrong ones corrected",
    "break_rate": "of the right ones broken",
    "frac_identical": "second answers that repeat the first",
    "edit_ratio": "share of tokens changed",
    "hint_leak": "hints that state the answer",
    "hint_tokens": "tokens of a hint",
    "truncated": "answers that were cut off",
    "parse_failures": "answers of the wrong form",
    "zero_variance_share": "groups with equal rewards",
    "clipped_ratio": "completions that were cut off",
    "completion_tokens": "tokens of a completion",
    "held_out_loss": "held-out loss",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "tokens_per_s": "tokens per second",
    "grad_norm": "gradient norm",
    "model_tflops_per_s": "TFLOP/s of the model",
    "mfu": "share of the peak (MFU)",
    "peak_rss_bytes": "peak memory",
    "peak_bytes": "peak memory",
    "allocated_bytes": "allocated memory",
    "reserved_bytes": "reserved memory",
} | {
    f"{figure}_{part}": name
    for figure in ("kl", "entropy", "ratio", "clip_share")
    for part, name in (("t1", "turn 1"), ("t2", "turn 2"), ("guide", "guide"))
}
PERCENT = "\u00a0%"
"""Kept together with its figure."""


def find_name(key: str) -> str:
    """Return what a figure is called, in words."""
    return NAMES.get(key, key.replace("_", " "))


def capitalized(text: str) -> str:
    """Return the text with a capital in front."""
    return text[:1].upper() + text[1:]


def format_figure(key: str, value: object) -> str:
    """Return the value of the figure `key` with its unit; a dash for none."""
    number = as_number(value)
    if number is None:
        return "–"
    if not math.isfinite(number):
        return "not finite"
    if is_share(key) and -1 <= number <= 1:
        return f"{math.floor(1000 * number + 0.5) / 10:.1f}{PERCENT}"
    if key.endswith("_bytes"):
        return format_bytes(number)
    if key.endswith("_seconds"):
        return format_seconds(number)
    return rounded(number)


def is_share(key: str) -> bool:
    """Return whether a figure is between 0 and 1 and people read it in percent."""
    return key in SHARES or key.endswith("_share") or key.startswith("pass@")


def rounded(number: float) -> str:
    """Return four figures, thousands separated by commas, very small and very large ones with an exponent."""
    size = abs(number)
    if not math.isfinite(number):
        return "not finite"
    if number == int(number) and size < 1e9:
        return f"{int(number):,}"
    if size >= 1e9 or size < 1e-3:
        return f"{number:.3g}"
    return f"{number:,.0f}" if size >= 1000 else f"{number:.4g}"


def change(key: str, before: object, *, after: object) -> str:
    """Return the difference, signed and in the figure's unit; empty where one of the two is no finite number."""
    old, new = as_number(before), as_number(after)
    if old is None or new is None or not math.isfinite(old) or not math.isfinite(new):
        return ""
    difference = new - old
    sign = "+" if difference > 0 else "−" if difference < 0 else "±"
    text = format_figure(key, abs(difference))
    return f"{sign}{text.removesuffix(PERCENT)} points" if text.endswith(PERCENT) else f"{sign}{text}"


def is_better(key: str, before: object, *, after: object) -> bool | None:
    """Return whether the figure went the right way; None where that is not known or nothing moved."""
    old, new = as_number(before), as_number(after)
    is_less = any(key == name or key.startswith(f"{name}_") for name in LESS_IS_BETTER)
    if old is None or new is None or old == new or not (is_less or is_share(key)):
        return None
    return (new < old) == is_less


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share among `count` (Wilson, JASA 1927)."""
    z = 1.959964
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    below = 1 + z * z / count
    return (middle - half) / below, (middle + half) / below
