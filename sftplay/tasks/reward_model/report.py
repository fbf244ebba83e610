"""The report's part about a reward model: whether it may be as sure as it is, and pairs with their scores."""

from __future__ import annotations

from typing import Any

from sftplay.report.chart import Chart, Curve, draw, logged, measured
from sftplay.report.figures import as_number, find_name, format_figure
from sftplay.report.page import MOST_CHARACTERS, Block, Section, Table, cut
from sftplay.report.run_files import RunFiles, mappings

SAMPLED = (
    ("Pairs in the right order", "rewards/accuracies", "accuracy"),
    ("Difference of the scores", "rewards/margins", "margin"),
)

SHOWN_PAIRS = 10


def build_sections(run: RunFiles) -> list[Section]:
    """Build the section about the scores; none for a run that gives none."""
    if run.task is None or not run.task.gives_score:
        return []
    name = next(
        (name for name in ("after", "test-after", *_steps(run)) if "calibration" in run.evals.get(name, {})), ""
    )
    blocks: list[Block] = [("charts", _draw(run))]
    if name:
        blocks += _calibration(run, name)
        blocks.append(("table", _tabulate_pairs(run, name)))
    return [Section("scores", "Scores", blocks)]


def _steps(run: RunFiles) -> list[str]:
    return [f"step-{step:.0f}" for step, _ in reversed(run.measured())]


def _draw(run: RunFiles) -> list[Chart]:
    plans: list[Any] = [
        (title, unit, [logged(run, key, name="training"), measured(run, unit, name="held out")])
        for title, key, unit in SAMPLED
    ]
    scores = [logged(run, key) for key in ("rewards/chosen", "rewards/rejected")]
    plans.append(("Scores of both sides", "rewards/chosen", scores))
    plans.append(
        ("Calibration error, held out", "calibration_error", [measured(run, "calibration_error", name="held out")])
    )
    return draw(run, plans)


def _calibration(run: RunFiles, name: str) -> list[Block]:
    """The curve of what was observed over what was predicted, and the numbers."""
    points, rows = list[tuple[float, float]](), list[list[str]]()
    for line in mappings(run.evals[name].get("calibration")):
        predicted, observed = (as_number(line.get(key)) for key in ("predicted", "observed"))
        if predicted is not None and observed is not None:
            points.append((100 * predicted, observed))
            rows.append([f"{predicted:.1%}", f"{observed:.1%}", format_figure("n", line.get("n"))])
    level = Curve("predicted", "as sure as it may be", [(0.0, 0.0), (100.0, 1.0)], dashed=True)
    curves = [Curve("observed", "held-out pairs", points, dots=True), level]
    chart = Chart(
        title="Better as often as predicted", unit="accuracy", curves=curves, last_step=100.0, along="predicted percent"
    )
    error = as_number(run.evals[name].get("calibration_error"))
    caption = "Predicted probability that an answer is better, and how often it is"
    caption += f"; {find_name('calibration_error')} {error:.3f}" if error is not None else ""
    return [
        ("charts", [chart]),
        ("table", Table(head=["Predicted", "Observed", "Pairs"], rows=rows, kinds="nnn", caption=caption)),
    ]


def _tabulate_pairs(run: RunFiles, name: str) -> Table:
    """Show held-out pairs with both scores, those in the wrong order first."""
    lines = list(run.rows(f"eval/{name}.jsonl", 4_096))
    margins = [(margin, line) for line in lines if (margin := as_number(line.get("margin"))) is not None]
    wrong = [line for margin, line in sorted(margins, key=lambda pair: pair[0]) if margin <= 0][: SHOWN_PAIRS // 2]
    right = [line for margin, line in margins if margin > 0][: SHOWN_PAIRS - len(wrong)]
    rows = []
    for line in [*wrong, *right]:
        given = line.get("scores")
        scores = [as_number(score) for score in given] if isinstance(given, list) else []
        shown = ["" if score is None else f"{score:.3f}" for score in (*scores, None, None)[:2]]
        texts = [cut(line.get(key) or "", MOST_CHARACTERS) for key in ("prompt", "chosen", "rejected")]
        rows.append([texts[0], texts[1], shown[0], texts[2], shown[1]])
    caption = f"Held-out pairs, up to {SHOWN_PAIRS // 2} in the wrong order first; all are in eval/{name}.jsonl"
    head = ["Prompt", "Chosen", "Score", "Rejected", "Score"]
    return Table(head=head, rows=rows, kinds="  n n", caption=caption, stacks=True)
