"""The report's part about puzzles: how many are solved, and what each segment adds."""

from __future__ import annotations

from typing import Any

from sftplay.report.chart import Curve, draw, measured
from sftplay.report.figures import as_number, format_figure
from sftplay.report.page import Section, Table, cut
from sftplay.report.run_files import RunFiles, mapping, mappings

UNLABELLED = "·"
"""Stands in a reference for a cell without a label."""

Cell = tuple[str, str, str]
"""`given` by the puzzle, answered `right` or `wrong`, or `free` of a label; the answer, and the right one."""


def build_sections(run: RunFiles) -> list[Section]:
    """Build the section with curves, figures and ten puzzles; none for a run that has measured none."""
    found = [(step, figures) for step, figures in run.measured() if mappings(figures.get("segments"))]
    if not found:
        return []
    # The accuracy after each segment of the first, the middle and the last measurement; and over the steps.
    refined = []
    for n in sorted({0, (len(found) - 1) // 2, len(found) - 1}):
        step, figures = found[n]
        values = [as_number(segment.get("exact_accuracy")) for segment in _read_segments(figures)]
        points = [(float(number), value) for number, value in enumerate(values, 1) if value is not None]
        refined.append(Curve(f"refined-{n}", f"after step {step:,.0f}", points, dots=True))
    course = [
        measured(run, key, name=words)
        for key, words in (("exact_accuracy", "puzzles"), ("blank_accuracy", "blank cells"))
    ]
    charts = [
        *draw(run, [("Solved after each segment", "exact_accuracy", refined)], along="segment"),
        *draw(run, [("Held-out puzzles", "exact_accuracy", course)]),
    ]
    step, figures = found[-1]
    rows = [row for row in run.rows(f"eval/step-{step:.0f}.jsonl", 1_000) if _has_equal_grids(row)]
    wrong, right = ([row for row in rows if (row.get("correct") is True) == want] for want in (False, True))
    # As many wrong ones as right ones; where one kind is short, more of the other.
    n_wrong = min(len(wrong), max(5, 10 - len(right)))
    grids = [_build_grid(row) for row in (*wrong[:n_wrong], *right[: 10 - n_wrong])]
    note = "Bold: what the puzzle gives. Struck out: a wrong answer, with the right one behind it." if grids else ""
    blocks = [("charts", charts), ("table", _tabulate(figures)), ("note", note), ("grids", grids)]
    return [Section("puzzles", "Puzzles", blocks)]


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


def _build_grid(row: dict[str, Any]) -> tuple[str, list[list[Cell]]]:
    """A puzzle with its answer: a title, and lines of cells."""
    lines = zip(*(row[name].split("\n") for name in ("prompt", "reference", "prediction")), strict=True)
    cells: list[list[Cell]] = []
    for line in lines:
        cells.append([])
        for given, right, answer in zip(*line, strict=True):
            kind = "given" if given == right else "right" if answer == right else "wrong"
            cells[-1].append(("free", answer, "") if right == UNLABELLED else (kind, answer, right))
    kinds = [kind for line in cells for kind, _, _ in line]
    result = f"{kinds.count('wrong')} of {len(kinds)} cells wrong" if "wrong" in kinds else "solved"
    after = as_number(row.get("halted_after"))
    halts = "" if after is None else f"; the model would halt after {after:.0f}"
    return f"Puzzle {cut(row.get('row'), 40)}: {result}{halts}", cells
