"""Ten held-out puzzles of the last measurement, cell by cell, beside the curves of a run that learns puzzles.

A grid is a text with a line for each of its rows and a character for each cell.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Literal, NamedTuple

from sftplay.deliver.report.drawing.charts import Chart
from sftplay.deliver.report.drawing.page import cut
from sftplay.deliver.report.drawing.table import Table
from sftplay.deliver.report.puzzles.refinement import measurements, refinement_charts, refinement_table
from sftplay.deliver.report.read.history import as_number
from sftplay.deliver.report.read.run_files import RunFiles, answer_rows

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


def puzzles_of(run: RunFiles) -> Puzzles | None:
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
