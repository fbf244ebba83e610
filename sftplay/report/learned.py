"""What a run has learned from rewards, as a table and as charts: sampled while it trained, greedy on held-out prompts.

It reads figures that lie in the run's folder and computes no reward itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from sftplay.report.charts import Chart, Curve
from sftplay.report.figures import change, format_figure, name_of
from sftplay.report.history import Point, as_number
from sftplay.report.page import Table
from sftplay.report.run_files import RunFiles, by_step
from sftplay.report.samples import FIRST, LAST, pass_share, sampled_steps

HEADLINES: dict[object, tuple[tuple[str, str], ...]] = {
    "grpo": (("pass", "Held-out pass@1"), ("reward", "Held-out reward")),
    "score": (("acc_t2", "Second answers right"), ("acc_t1", "First answers right")),
}
"""Task -> the figures of its evaluations that say whether it has learned, the most telling one first. The loss of such
a task is near 0 by construction."""

Headline = tuple[str, str, float, float, int | None]
"""Key, name, first value, last value, and the prompts that were answered."""

SAMPLED = ("reward", "true_reward")
BESIDE = ("zero_variance_share", "clipped_ratio", "completion_tokens", "entropy", "kl")
COLOURS = "abcd"


def headlines(run: RunFiles) -> list[Headline]:
    """The telling figures; none for a task that learns from labels."""
    measured = [figures for _, figures in sorted(by_step(run.evals), key=lambda pair: pair[0])]
    found = []
    for key, name in HEADLINES.get(run.value("task_mode"), ()):
        values = [(value, figures) for figures in measured if (value := as_number(figures.get(key))) is not None]
        if values:
            (first, _), (last, figures) = values[0], values[-1]
            count = as_number(figures.get("n"))
            found.append((key, name, first, last, None if count is None else int(count)))
    return found


def learns_from_rewards(run: RunFiles) -> bool:
    """True for a task whose loss says nothing."""
    return run.value("task_mode") in HEADLINES


def learned_table(run: RunFiles) -> Table | None:
    """Each figure at the beginning and at the end; None for a run that has no rewards."""
    if "reward" not in run.history.values:
        return None
    named = [name for name in run.history.values if name.startswith("reward/")]
    rows = [_row(name_of(key), key=key, ends=_ends(run, key)) for key in (*SAMPLED, *named)]
    steps = sampled_steps(run)
    shares = (pass_share(run, steps[:FIRST]), pass_share(run, steps[-LAST:]))
    rows.append(_row("pass@1, sampled", key="pass", ends=shares))
    rows += [_row(name_of(key), key=key, ends=_ends(run, key)) for key in BESIDE]
    held_out = sorted(by_step(run.evals), key=lambda pair: pair[0])
    for key, name in (("reward", "reward of held-out prompts, greedy"), ("pass", "pass@1 of held-out prompts, greedy")):
        values = [as_number(figures.get(key)) for _, figures in held_out if key in figures]
        rows.append(_row(name, key=key, ends=(values[0], values[-1]) if values else (None, None)))
    head = ["Figure", "First", "Last", "Change"]
    caption = (
        f"Sampled: means of the first {FIRST} and the last {LAST} logged steps. Held-out: first and last measurement"
    )
    return Table(head=head, rows=[row for row in rows if row], kinds=" nnn", caption=caption)


def learned_text(table: Table) -> str:
    """The table for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(table.head))]
    cells = [[line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
             for line in lines]  # fmt: skip
    return "\n".join("  ".join(line).rstrip() for line in cells)


def reward_charts(run: RunFiles, resumed: Sequence[float]) -> list[Chart]:
    """The reward over the steps with that of held-out prompts; then each reward by its name."""
    history = run.history
    noisy = [Curve(key, name_of(key), history.curve(key), colour, trend=history.trend(key))
             for key, colour in (("reward", "a"), ("true_reward", "c"))]  # fmt: skip
    held_out = [Curve("held_out_reward", "held-out, greedy", _held_out(run, "reward"), "b", dots=True)]
    named = [name for name in history.values if name.startswith("reward/")][: len(COLOURS)]
    each = [Curve(name, name.removeprefix("reward/"), history.curve(name), colour, trend=history.trend(name))
            for name, colour in zip(named, COLOURS, strict=False)]  # fmt: skip
    passed = [Curve("held_out_pass", "held-out, greedy", _held_out(run, "pass"), "b", dots=True)]
    all_curves = [
        ("Reward", "reward", [*noisy, *held_out]),
        ("Rewards by name", "value", each),
        ("Share that passes", "pass", passed),
    ]
    return [
        Chart(title=title, unit=unit, curves=known, last_step=run.step, resumed=resumed, is_wide=unit == "reward")
        for title, unit, curves in all_curves
        if (known := [curve for curve in curves if curve.points])
    ]


def _held_out(run: RunFiles, key: str) -> list[Point]:
    points = ((step, as_number(figures.get(key))) for step, figures in by_step(run.evals))
    return sorted((step, value) for step, value in points if value is not None)


def _ends(run: RunFiles, key: str) -> tuple[float | None, float | None]:
    values = run.history.values.get(key)
    return (fmean(values[:FIRST]), fmean(values[-LAST:])) if values else (None, None)


def _row(name: str, *, key: str, ends: tuple[float | None, float | None]) -> list[str]:
    first, last = ends
    if first is None and last is None:
        return []
    return [name, format_figure(key, first), format_figure(key, last), change(key, first, after=last)]
