"""How held-out puzzles get better from segment to segment, and from measurement to measurement."""

from __future__ import annotations

from typing import Any

from sftplay.deliver.report.drawing.charts import Chart, Curve
from sftplay.deliver.report.drawing.figures import format_figure
from sftplay.deliver.report.drawing.table import Table
from sftplay.deliver.report.read.held_out import by_step
from sftplay.deliver.report.read.history import Point, as_number
from sftplay.deliver.report.read.run_files import RunFiles, mapping, mappings

MOST_SEGMENTS = 1_000

Measured = list[tuple[float, dict[str, Any]]]
"""Step and figures of each measurement, in order."""


HEAD = ["Segments", "Puzzles right", "Blank cells right", "Cells right, givens too"]


def measurements(run: RunFiles) -> Measured:
    """The measurements on puzzles that the run has made while it trained."""
    return sorted((pair for pair in by_step(run.evals) if mappings(pair[1].get("segments"))), key=lambda pair: pair[0])


def refinement_charts(measured: Measured, *, last_step: float) -> list[Chart]:
    """The accuracy after each segment of the first, the middle and the last measurement; and over the steps."""
    chosen = sorted({0, (len(measured) - 1) // 2, len(measured) - 1})
    curves = [
        Curve(f"refined-{n}", f"after step {measured[n][0]:,.0f}", points, colour, dots=True)
        for n, colour in zip(chosen, "cba" if len(chosen) > 2 else "ba" if len(chosen) > 1 else "a", strict=True)
        if (points := _refined(measured[n][1], "exact_accuracy"))
    ]
    segments = max((point[0] for curve in curves for point in curve.points), default=1.0)
    refined = Chart(title="Solved after each segment", unit="exact_accuracy", curves=curves, last_step=segments,
                    along="segment", is_wide=True)  # fmt: skip
    course = [
        Curve(key, name, points, colour, dots=True)
        for key, name, colour in (("exact_accuracy", "puzzles", "a"), ("blank_accuracy", "blank cells", "b"))
        if (points := [(s, v) for s, figures in measured if (v := as_number(figures.get(key))) is not None])
    ]
    over_steps = Chart(title="Held-out puzzles", unit="exact_accuracy", curves=course, last_step=last_step)
    return [chart for chart in (refined, over_steps) if chart.curves]


def refinement_table(figures: dict[str, Any]) -> Table:
    """One measurement: a row for each segment, and one for puzzles that end where the model would halt."""
    rows = [
        [format_figure("n", number), *_shares(each)]
        for number, each in enumerate(mappings(figures.get("segments"))[:MOST_SEGMENTS], 1)
    ]
    halting = mapping(figures.get("halting_q"))
    if halting:
        mean = format_figure("segments", halting.get("segments"))
        rows.append([f"where the model halts, {mean} on average", *_shares(halting)])
    votes = [
        [f"pass@{k}{of}", format_figure("pass", share), "", ""]
        for key, of in (("pass_at", ", whole tasks"), ("pass_at_partial", ", share of a task's inputs"))
        for k, share in mapping(figures.get(key)).items()
    ]
    return Table(head=HEAD, rows=[*rows, *votes[:20]], kinds=" nnn",
                 caption=f"The last measurement: {format_figure('n', figures.get('n'))} puzzles")  # fmt: skip


def _shares(each: dict[str, Any]) -> list[str]:
    return [format_figure("accuracy", each.get(key)) for key in ("exact_accuracy", "blank_accuracy", "accuracy")]


def _refined(figures: dict[str, Any], key: str) -> list[Point]:
    values = (as_number(each.get(key)) for each in mappings(figures.get("segments"))[:MOST_SEGMENTS])
    return [(float(number), value) for number, value in enumerate(values, 1) if value is not None]
