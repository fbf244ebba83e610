"""The report's part about preferences: what became of both sides, held-out pairs, and answers before and after."""

from __future__ import annotations

import math
from typing import Any

from sftplay.report.chart import Chart, ChartPlan, draw, logged, measured
from sftplay.report.figures import as_number, compare, find_name, format_figure
from sftplay.report.page import MOST_CHARACTERS, Block, Section, Table, cut
from sftplay.report.run_files import RunFiles, mapping, mappings

CHARTS = (
    ("Rewards of both sides", ("rewards/chosen", "rewards/rejected")),
    ("Margin", ("rewards/margins", "margin")),
    ("Pairs right", ("rewards/accuracies", "accuracy")),
    ("Log-probabilities of both sides", ("logps/chosen", "logps/rejected")),
    ("Difference to the reference", ("kl",)),
    ("Tokens of both sides", ("tokens/chosen", "tokens/rejected")),
)
"""Title of a chart, and its figures: those of training steps, then those of held-out pairs under the same names."""

FIGURES = (
    "accuracy", "margin", "logp_accuracy", "loss", "kl", "rewards/chosen", "rewards/rejected", "logps/chosen",
    "logps/rejected", "tokens/chosen", "tokens/rejected", "answer_tokens",
)  # fmt: skip

SHOWN = 10
"""Held-out pairs and answers in a table."""


def build_sections(run: RunFiles) -> list[Section]:
    """Build the sections about both sides and about the data; those that have nothing to show are left out."""
    blocks: list[Block] = [("charts", draw_charts(run)), ("table", tabulate_figures(run))]
    lines = {side: list(run.rows(f"eval/{side}.jsonl", 4_096)) for side in ("before", "after")}
    last = lines["after"] or next(
        (
            rows
            for step, _ in reversed(run.measured())
            if (rows := list(run.rows(f"eval/step-{step:.0f}.jsonl", 4_096)))
        ),
        [],
    )
    blocks += [("table", tabulate_pairs(lines["before"], last)), ("table", tabulate_answers(lines))]
    sections = [Section("preferences", "Both sides", blocks)] if any(content for _, content in blocks) else []
    if gate := mapping(run.data.get("preference")):
        sections.append(Section("gate", "What the pairs teach besides", tabulate_gate(gate)))
    return sections


def draw_charts(run: RunFiles) -> list[Chart]:
    """Draw the figures of training steps with those of held-out pairs."""
    plans: list[ChartPlan] = []
    for title, keys in CHARTS:
        curves = [logged(run, key) for key in keys]
        curves += [measured(run, key, name=f"{find_name(key)}, held out") for key in keys]
        plans.append((title, keys[0], curves))
    return draw(run, plans)


def tabulate_figures(run: RunFiles) -> Table:
    """Show the figures of held-out pairs before and after the run, or at its first and last measurement."""
    found = [(f"Step {step:,.0f}", figures) for step, figures in run.measured() if "accuracy" in figures]
    sides = [
        (name.capitalize(), run.evals[name]) for name in ("before", "after") if "accuracy" in run.evals.get(name, {})
    ]
    if len(sides) < 2:
        sides = sides[:1] + found if sides and sides[0][0] == "Before" else found + sides
    if not sides:
        return Table(head=[], rows=[])
    (first, old), (last, new) = sides[0], sides[-1]
    rows = [
        [find_name(key), *compare(key, old.get(key), after=new.get(key))]
        for key in FIGURES
        if as_number(new.get(key)) is not None
    ]
    caption = f"Held-out rows ({format_figure('n', new.get('n'))})"
    if (error := as_number(new.get("stderr"))) is not None:
        caption += f"; the standard error of the pairs right is {100 * error:.1f} points"
    head = ["Held-out pairs", first, last, "Change"]
    return Table(head=head, rows=rows, kinds=" nnv", caption=caption)


def _find_margin(line: dict[str, Any]) -> float | None:
    """Return the margin of a pair; of a single answer with a verdict its reward."""
    rewards = line.get("rewards")
    is_single = "margin" not in line and isinstance(rewards, list) and len(rewards) == 1
    return as_number(rewards[0] if is_single and isinstance(rewards, list) else line.get("margin"))


def _margin(line: dict[str, Any] | None) -> str:
    margin = _find_margin(line or {})
    return f"{margin:+.3f}" if margin is not None and math.isfinite(margin) else "–"


def tabulate_pairs(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    """Show held-out pairs with their margins before and after, evenly spaced from the best to the worst one.

    Single answers with a verdict (kto) have the reward in the margin's place.
    """
    old = {(line.get("row"), str(line.get("reference")), str(line.get("rejected"))): line for line in before}
    known = [line for line in after if _find_margin(line) is not None]
    known.sort(key=lambda line: -(_find_margin(line) or 0.0))
    is_single = any("margin" not in line for line in known)
    sides, figure = (["Wanted", "Not wanted"], "Reward") if is_single else (["Chosen", "Rejected"], "Margin")
    caption = f"{len(known):,} held-out pairs by margin; below 0 the model is wrong"
    if is_single:
        caption = f"{len(known):,} held-out answers by reward; those that are not wanted should be the last ones"
    step = max(1.0, (len(known) - 1) / max(1, SHOWN - 1))
    shown = [known[round(place * step)] for place in range(min(SHOWN, len(known)))]
    rows = [
        [
            *(cut(line.get(name) or "", MOST_CHARACTERS) for name in ("prompt", "reference", "rejected")),
            _margin(old.get((line.get("row"), str(line.get("reference")), str(line.get("rejected"))))),
            _margin(line),
        ]
        for line in shown
    ]
    return Table(
        head=["Prompt", *sides, f"{figure} before", f"{figure} after"],
        rows=rows,
        kinds="   nn",
        caption=f"{len(shown):,} of {caption}",
        stacks=True,
    )


def tabulate_answers(lines: dict[str, list[dict[str, Any]]]) -> Table:
    """Show the model's own answers to held-out prompts before and after, with their tokens."""
    old = {line.get("row"): line for line in lines["before"]}
    both = [(old[line.get("row")], line) for line in lines["after"] if line.get("row") in old and "prediction" in line]
    rows = [
        [
            cut(new.get("prompt") or "", MOST_CHARACTERS),
            cut(before.get("prediction") or "", MOST_CHARACTERS),
            format_figure("n", before.get("prediction_tokens")),
            cut(new.get("prediction") or "", MOST_CHARACTERS),
            format_figure("n", new.get("prediction_tokens")),
        ]
        for before, new in both[:SHOWN]
    ]
    return Table(
        head=["Prompt", "Answer before", "Tokens", "Answer after", "Tokens"],
        rows=rows,
        kinds="  n n",
        caption=f"Answers of the model itself; all {len(both):,} are in eval/before.jsonl and eval/after.jsonl",
        stacks=True,
    )


GATE = {
    "pairs": "pairs that are kept",
    "desirable": "wanted answers",
    "undesirable": "unwanted answers",
    "equal": "pairs with equal sides, left out",
    "white_space_only": "pairs that differ only in white space",
    "swapped": "pairs that are there the other way round too",
    "duplicates": "duplicates",
    "contaminated": "pairs to train on that are held out too",
    "shared_prompts": "prompts to train on that are held out with other answers",
    "longer_is_better_accuracy": "labels that length alone gets right",
    "share_chosen_longer": "pairs with the longer side chosen",
    "scores_against_label": "pairs whose chosen side has the lower score",
}
"""Figure of the data report -> what it is called. Others are shown by their own names."""


def tabulate_gate(gate: dict[str, Any]) -> list[Block]:
    """Show what the data report says of the pairs: counts, features that decide labels alone, and score margins."""
    rows = []
    for key, name in GATE.items():
        if key == "pairs" and "desirable" in gate and not gate.get(key):
            continue
        if (number := as_number(gate.get(key))) is not None:
            is_part = key in ("longer_is_better_accuracy", "share_chosen_longer")
            rows.append([name, f"{number:.2f}" if is_part else format_figure("n", number)])
    blocks: list[Block] = [("table", Table(head=["Pairs", "Count or share"], rows=rows, kinds=" n"))]
    deciding = [
        [entry.get("feature", ""), f"{accuracy:.2f}"]
        for entry in mappings(gate.get("deciding"))
        if (accuracy := as_number(entry.get("accuracy"))) is not None
    ]
    caption = "Features of a text that decide labels alone, whatever it says"
    blocks.append(("table", Table(head=["Feature", "Labels right"], rows=deciding, kinds=" n", caption=caption)))
    margins = mapping(gate.get("margins"))
    edges, counts = (margins.get(name) for name in ("edges", "counts"))
    if isinstance(edges, list) and isinstance(counts, list) and len(edges) == len(counts) + 1:
        known = [(as_number(low), as_number(high), as_number(n)) for low, high, n in zip(edges, edges[1:], counts)]
        histogram = [
            [f"{low:.3g} to {high:.3g}", format_figure("n", n)] for low, high, n in known if None not in (low, high, n)
        ]
        caption = "How far the chosen side's score is ahead"
        blocks.append(
            ("table", Table(head=["Margin of the scores", "Pairs"], rows=histogram, kinds=" n", caption=caption))
        )
    return blocks
