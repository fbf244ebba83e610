"""A sweep for people: the table of its trials, and a page with their curves and with what mattered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftplay.config.resolved import flow
from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import capitalized, find_name, format_figure
from sftplay.report.page import Section, Table
from sftplay.report.several import write_runs_page

PAGE = "report.html"
GROUPS = 3  # of the values of a range, as many trials in each
FEW = 5  # trials for each group of values below which the shares are called unsure

Row = dict[str, Any]


def sort_trials(rows: Sequence[Row], *, is_less_better: bool) -> list[Row]:
    """Return the finished trials, the best first; then the pruned ones, those of the longest first; then the others."""
    order = ["done", "pruned", "running", "waiting", "stopped", "failed", "refused"]
    sign = 1 if is_less_better else -1

    def rank(row: Row) -> tuple[int, int, float, int]:
        is_pruned = row["state"] == "pruned"
        figure = row["figure"] if row["figure"] is not None and math.isfinite(row["figure"]) else math.inf * sign
        return order.index(row["state"]), -len(row["compared"]) if is_pruned else 0, sign * figure, row["number"]

    return sorted(rows, key=rank)


def build_table(rows: Sequence[Row], *, metric: str, is_less_better: bool) -> Table:
    """Return the table of all trials, the best first."""
    keys = list(rows[0]["params"]) if rows else []
    lines = [
        [
            str(row["number"]), row["state"], format_figure(metric, row["figure"]),
            *(flow(row["params"][key]) for key in keys), row["cause"] or "",
        ]
        for row in sort_trials(rows, is_less_better=is_less_better)
    ]  # fmt: skip
    name = "held-out loss" if metric == "loss" else find_name(metric)
    head = ["Trial", "State", capitalized(name), *keys, "Cause"]
    return Table(head=head, rows=lines, kinds="  n" + "c" * len(keys))


def describe_savings(rows: Sequence[Row]) -> str:
    """Say how many steps were trained of those that all trials would have taken; empty where all were."""
    known = [(row["step"] or 0, row["steps"]) for row in rows if row["state"] in ("done", "pruned") and row["steps"]]
    trained, planned = sum(step for step, _ in known), sum(steps for _, steps in known)
    if trained >= planned:
        return ""
    return f"{trained:,} of {planned:,} steps were trained: halving has saved {1 - trained / planned:.0%}"


def find_shares(rows: Sequence[Row]) -> list[tuple[str, float, int]]:
    """Return key, share of the figures' variance between the means of its values, and number of these; largest first.

    It is eta squared less what chance alone would give (epsilon squared, Kelley 1935). Where trials were pruned, they
    all count by their figure at the first comparison. A range is cut into three groups of values.
    """
    known = _list_figures(rows)
    if len(known) < 3:
        return []
    mean = math.fsum(figure for _, figure in known) / len(known)
    total = math.fsum((figure - mean) ** 2 for _, figure in known)
    shares = []
    for key in known[0][0]:
        groups = _group([params[key] for params, _ in known], [figure for _, figure in known])
        k, n = len(groups), len(known)
        between = math.fsum(len(group) * (math.fsum(group) / len(group) - mean) ** 2 for group in groups)
        if total and n > k > 1:
            adjusted = (between - (k - 1) * (total - between) / (n - k)) / total
            shares.append((key, min(1.0, max(0.0, adjusted)), k))
    return sorted(shares, key=lambda share: -share[1])


def _list_figures(rows: Sequence[Row]) -> list[tuple[dict[str, Any], float]]:
    """The values and the figure of each trial that compares with the others."""
    figures = [(row["params"], row["figure"]) for row in rows if row["state"] == "done"]
    if any(row["state"] == "pruned" for row in rows):
        first = min((share for row in rows for share in row["compared"]), key=float)
        figures = [(row["params"], row["compared"].get(first)) for row in rows]
    return [(params, float(figure)) for params, figure in figures if figure is not None and math.isfinite(figure)]


def _group(values: Sequence[Any], figures: Sequence[float]) -> list[list[float]]:
    """The figures by value; by thirds of the sorted values where most trials have another one, as of a range."""
    by_value: dict[str, list[float]] = {}
    for value, figure in zip(values, figures, strict=True):
        by_value.setdefault(flow(value), []).append(figure)
    if len(by_value) <= max(GROUPS, len(values) / 2) or not all(isinstance(value, int | float) for value in values):
        return list(by_value.values())
    ranked = [figure for _, figure in sorted(zip(values, figures, strict=True), key=lambda pair: float(pair[0]))]
    size = math.ceil(len(ranked) / GROUPS)
    return [ranked[start : start + size] for start in range(0, len(ranked), size)]


def write_page(folder: Path, rows: Sequence[Row], *, metric: str, is_less_better: bool) -> Path:
    """Write report.html of a sweep into its folder; return its path. OSError where it cannot be written."""
    ranked = sort_trials(rows, is_less_better=is_less_better)
    shares = find_shares(rows)
    table = Table(
        head=["Key", "", "Share of the variance", "Values"],
        rows=[[key, f"{share:.1%}", f"{share:.0%}", str(count)] for key, share, count in shares],
        kinds="cbnn",
    )
    n = len(_list_figures(rows))
    fewest = FEW * max((count for _, _, count in shares), default=1)
    unsure = f"With {n} trials these shares are unsure; {fewest} would be few. " if n < fewest else ""
    means = "How far the means for each value of a key explain the differences between trials"
    note = f"{unsure}{means}; the rest is chance, and what keys do together." if shares else ""
    trials = build_table(rows, metric=metric, is_less_better=is_less_better)
    sections = [
        Section("trials", "Trials", [("table", trials), ("note", describe_savings(rows))]),
        Section("mattered", "What mattered", [("table", table), ("note", note)]),
    ]
    folders = [RunFolder(Path(row["run"])) for row in ranked if row["run"] and Path(row["run"]).is_dir()]
    return write_runs_page(folders, folder / PAGE, title=f"Sweep {folder.name}", extra_sections=sections)
