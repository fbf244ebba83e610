"""The report's part about puzzles: how many are solved, and what each segment adds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from sftplay.report.figures import as_number, format_figure
from sftplay.report.page import Chart, Curve, Table, cut
from sftplay.report.run_files import RunFiles, answer_rows, by_step, mapping, mappings

UNLABELLED = "·"
"""Stands in a reference for a cell without a label."""


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
    """Whether this figure of metrics.jsonl has a chart here; curves of puzzles are those of evaluations."""
    return False


def build_sections(run: RunFiles, _resumed: Sequence[float]) -> dict[str, Any]:
    """Build the task's section of the page, by its name in `templates/page.html`: curves, figures and ten puzzles.

    It is None for a run that has measured none.
    """
    measured = sorted(
        (pair for pair in by_step(run.evals) if mappings(pair[1].get("segments"))), key=lambda pair: pair[0]
    )
    if not measured:
        return {"puzzles": None}
    # The accuracy after each segment of the first, the middle and the last measurement; and over the steps.
    curves = []
    chosen = sorted({0, (len(measured) - 1) // 2, len(measured) - 1})
    for n, colour in zip(chosen, "cba"[-len(chosen) :], strict=True):
        step, figures = measured[n]
        values = [as_number(segment.get("exact_accuracy")) for segment in _read_segments(figures)]
        points = [(float(number), value) for number, value in enumerate(values, 1) if value is not None]
        curves.append(Curve(f"refined-{n}", f"after step {step:,.0f}", points, colour, dots=True))
    segments = max((point[0] for curve in curves for point in curve.points), default=1.0)
    course = []
    for key, name, colour in (("exact_accuracy", "puzzles", "a"), ("blank_accuracy", "blank cells", "b")):
        points = [(step, v) for step, figures in measured if (v := as_number(figures.get(key))) is not None]
        course.append(Curve(key, name, points, colour, dots=True))
    refined, course = ([curve for curve in group if curve.points] for group in (curves, course))
    charts = [
        Chart(title="Solved after each segment", unit="exact_accuracy", curves=refined, last_step=segments,
              along="segment", is_wide=True),
        Chart(title="Held-out puzzles", unit="exact_accuracy", curves=course, last_step=run.step),
    ]  # fmt: skip
    step, figures = measured[-1]
    rows = [row for row in islice(answer_rows(run.folder, f"step-{step:.0f}"), 1_000) if _has_equal_grids(row)]
    wrong, right = ([row for row in rows if (row.get("correct") is True) == want] for want in (False, True))
    # As many wrong ones as right ones; where one kind is short, more of the other.
    n_wrong = min(len(wrong), max(5, 10 - len(right)))
    grids = [_grid(row) for row in (*wrong[:n_wrong], *right[: 10 - n_wrong])]
    return {"puzzles": Puzzles([chart for chart in charts if chart.curves], [_tabulate(figures)], grids)}


def _read_segments(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return mappings(figures.get("segments"))[:1_000]


def _has_equal_grids(row: dict[str, Any]) -> bool:
    texts = [row.get(name) for name in ("prompt", "reference", "prediction")]
    shapes = {tuple(map(len, text.split("\n"))) for text in texts if isinstance(text, str)}
    return all(isinstance(text, str) for text in texts) and len(shapes) == 1 and 0 < sum(shapes.pop()) <= 2_500


def _tabulate(figures: dict[str, Any]) -> Table:
    """One measurement: a row for each segment, and one for puzzles that end where the model would halt."""
    named = [(format_figure("n", number), segment) for number, segment in enumerate(_read_segments(figures), 1)]
    if halting := mapping(figures.get("halting_q")):
        mean = format_figure("segments", halting.get("segments"))
        named.append((f"where the model halts, {mean} on average", halting))
    keys = ("exact_accuracy", "blank_accuracy", "accuracy")
    rows = [[name, *(format_figure("accuracy", shares.get(key)) for key in keys)] for name, shares in named]
    votes = [
        [f"pass@{k}{what}", format_figure("pass", share), "", ""]
        for key, what in (("pass_at", ", whole tasks"), ("pass_at_partial", ", share of a task's inputs"))
        for k, share in mapping(figures.get(key)).items()
    ]
    return Table(
        head=["Segments", "Puzzles right", "Blank cells right", "Cells right, givens too"],
        rows=[*rows, *votes[:20]],
        kinds=" nnn",
        caption=f"The last measurement: {format_figure('n', figures.get('n'))} puzzles",
    )


def _grid(row: dict[str, Any]) -> Grid:
    lines = zip(*(row[name].split("\n") for name in ("prompt", "reference", "prediction")), strict=True)
    cells, n_cells, n_wrong = list[list[Cell]](), 0, 0
    for line in lines:
        cells.append([])
        for given, right, answer in zip(*line, strict=True):
            kind: Literal["given", "right", "wrong", "free"] = "given" if given == right else "right"
            kind = "free" if right == UNLABELLED else "wrong" if answer != right else kind
            cells[-1].append(Cell(kind, answer, "" if kind == "free" else right))
            n_cells, n_wrong = n_cells + 1, n_wrong + (kind == "wrong")
    result = f"{n_wrong} of {n_cells} cells wrong" if n_wrong else "solved"
    after = as_number(row.get("halted_after"))
    halts = "" if after is None else f"; the model would halt after {after:.0f}"
    return Grid(f"Puzzle {cut(row.get('row'), 40)}: {result}{halts}", cells)
