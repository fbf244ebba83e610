"""The report's part about puzzles: how many are solved, and what each segment adds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from sftplay.report.charts import Chart, Curve
from sftplay.report.figures import format_figure
from sftplay.report.history import Point, as_number
from sftplay.report.page import Table, cut
from sftplay.report.run_files import RunFiles, answer_rows, by_step, mapping, mappings

SHOWN, LOOKED_AT = 10, 1_000
MOST_CELLS = 2_500
UNLABELLED = "·"
"""What a reference has in place of a cell without a label."""


class Cell(NamedTuple):
    """One cell: what the puzzle gives, what was answered rightly, or what was answered wrongly."""

    kind: Literal["given", "right", "wrong", "free"]
    """`free` is a cell without a label."""

    answer: str
    right: str


class Grid(NamedTuple):
    """One puzzle with its answer."""

    title: str
    rows: list[list[Cell]]


class Puzzles(NamedTuple):
    """What the page shows."""

    charts: list[Chart]
    tables: list[Table]
    grids: list[Grid]


def has_chart(name: str) -> bool:
    """Return whether this figure of metrics.jsonl has a chart here; curves of puzzles are those of evaluations."""
    return False


def build_sections(run: RunFiles, _resumed: Sequence[float]) -> dict[str, Any]:
    """Build the task's sections of the page, by their names in `templates/page.html`."""
    return {"puzzles": build_puzzles(run)}


def build_puzzles(run: RunFiles) -> Puzzles | None:
    """Curves, figures and ten puzzles; None for a run that has measured none."""
    measured = measurements(run)
    if not measured:
        return None
    step, figures = measured[-1]
    rows = [row for row in islice(answer_rows(run.folder, f"step-{step:.0f}"), LOOKED_AT) if _is_whole(row)]
    wrong, right = ([row for row in rows if (row.get("correct") is True) == want] for want in (False, True))
    # As many wrong ones as right ones; where one kind is short, more of the other.
    n_wrong = min(len(wrong), max(SHOWN // 2, SHOWN - len(right)))
    chosen = [*wrong[:n_wrong], *right[: SHOWN - n_wrong]]
    return Puzzles(
        refinement_charts(measured, last_step=run.step),
        [refinement_table(figures)],
        [_grid(row) for row in chosen],
    )


def _is_whole(row: dict[str, Any]) -> bool:
    texts = [row.get(name) for name in ("prompt", "reference", "prediction")]
    shapes = {tuple(map(len, text.split("\n"))) for text in texts if isinstance(text, str)}
    return all(isinstance(text, str) for text in texts) and len(shapes) == 1 and 0 < sum(shapes.pop()) <= MOST_CELLS


def _grid(row: dict[str, Any]) -> Grid:
    lines = zip(*(row[name].split("\n") for name in ("prompt", "reference", "prediction")), strict=True)
    rows = [[_cell(given, right, answer=answer) for given, right, answer in zip(*line, strict=True)] for line in lines]
    cells = [cell for each in rows for cell in each]
    n_wrong = sum(cell.kind == "wrong" for cell in cells)
    said = f"{n_wrong} of {len(cells)} cells wrong" if n_wrong else "solved"
    after = as_number(row.get("halted_after"))
    halts = "" if after is None else f"; the model would halt after {after:.0f}"
    return Grid(f"Puzzle {cut(row.get('row'), 40)}: {said}{halts}", rows)


def _cell(given: str, right: str, *, answer: str) -> Cell:
    if right == UNLABELLED:
        return Cell("free", answer, "")
    kind: Literal["given", "right", "wrong"] = "wrong" if answer != right else "given" if given == right else "right"
    return Cell(kind, answer, right)


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
