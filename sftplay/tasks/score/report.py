"""The report's part about two-turn episodes: the figures of both turns, and episodes to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sftplay.report.chart import Chart, ChartPlan, draw, logged, measured
from sftplay.report.figures import as_number, compare, find_name, format_figure
from sftplay.report.page import MOST_CHARACTERS, Block, Section, Table, cut
from sftplay.report.run_files import RunFiles, mapping

PAIRS = (("Right answers", ("acc_t1", "acc_t2")), ("What the second turn changes", ("i2c", "c2i")))
"""Charts of what was sampled with what was held out."""

SAMPLED = (
    ("KL to the base", ("kl_t1", "kl_t2", "kl_guide")),
    ("Entropy of a token", ("entropy_t1", "entropy_t2", "entropy_guide")),
    ("Ratio to the probability of the draw", ("ratio_t1", "ratio_t2", "ratio_guide")),
    ("Share of tokens whose ratio is cut off", ("clip_share_t1", "clip_share_t2", "clip_share_guide")),
    ("What turn 2 does to turn 1", ("edit_ratio", "frac_identical")),
    ("Hints and ends", ("hint_leak", "follows_hint", "truncated", "parse_failures")),
    ("Gradient norm of each part", ("grad_norm/solver", "grad_norm/guide", "grad_norm/value")),
    ("The value", ("explained_variance", "value_mean")),
)

HINTS = {
    "acc_t2": "own hints",
    "acc_t2_empty": "no hint",
    "acc_t2_static": "static hint",
    "acc_t2_other_hint": "another's hint",
}

FIGURES = (
    "acc_t1", "acc_t2", "delta", "i2c", "c2i", "fix_rate", "break_rate", "acc_t2_empty", "acc_t2_static",
    "acc_t2_other_hint", "follows_hint", "changes_to_hint",
    "acc_t1_greedy", "acc_t2_greedy", "edit_ratio", "frac_identical", "hint_leak", "hint_tokens", "truncated",
    "parse_failures",
)  # fmt: skip


def build_sections(run: RunFiles) -> list[Section]:
    """Build the section about both turns; none for a run that does not answer twice."""
    found = [(step, figures) for step, figures in run.measured() if "acc_t1" in figures]
    if "acc_t1" not in run.history.values and not found:
        return []
    blocks: list[Block] = [("charts", _draw(run))]
    if found:
        (first, old), (last, new) = found[0], found[-1]
        known = [key for key in FIGURES if as_number(new.get(key)) is not None]
        rows = [[find_name(key), *compare(key, old.get(key), after=new.get(key))] for key in known]
        diagnosis = f": {new['diagnosis']}" if isinstance(new.get("diagnosis"), str) else ""
        head = ["Held-out problems", f"Step {first:,.0f}", f"Step {last:,.0f}", "Change"]
        blocks.append(("table", Table(head=head, rows=rows, kinds=" nnv", caption=f"At the end{diagnosis[:200]}")))
    # What `make eval` has measured: each kind of hint, by the base and by the run.
    hints = {"none": "no hint", "static": "static hint", "model": "hints of the guide"}
    rows = [
        [side, words, *(format_figure(key, figures.get(key)) for key in FIGURES[:5])]
        for name, side in (("before", "base"), ("after", "this run"))
        for kind, words in hints.items()
        if (figures := mapping(mapping(run.evals.get(name, {}).get("hints")).get(kind)))
    ]
    head = ["By", "With", *map(find_name, FIGURES[:5])]
    blocks.append(("table", Table(head=head, rows=rows, kinds="  nnnnn", caption="Who has learned what")))
    if found:
        blocks.append(("table", tabulate_episodes(run, [int(step) for step, _ in found])))
    return [Section("turns", "Both turns", blocks)]


def _draw(run: RunFiles) -> list[Chart]:
    plans: list[ChartPlan] = []
    for title, keys in PAIRS:
        held_out = [measured(run, key, name=f"{find_name(key)}, held out") for key in keys]
        plans.append((title, keys[0], [*(logged(run, key) for key in keys), *held_out]))
    hints = [measured(run, key, name=name) for key, name in HINTS.items()]
    plans.append(("Second answers by hint, held out", "acc_t2", hints))
    plans += [(title, keys[0], [logged(run, key) for key in keys]) for title, keys in SAMPLED]
    return draw(run, plans)


SHOWN_OF_A_KIND = 3


def tabulate_episodes(run: RunFiles, steps: Sequence[int]) -> Table:
    """Show episodes of the first and of the last of these measurements, those of a problem below each other.

    Up to three problems are shown of each kind: of those with a right or wrong first and second answer.
    """
    ends = sorted({steps[0], steps[-1]})
    episodes = {step: list(run.rows(f"eval/step-{step}.jsonl", 4_096)) for step in ends}
    # Episodes that turn 2 has changed come first.
    kinds = ((False, True), (True, False), (False, False), (True, True))
    chosen = [
        n
        for kind in kinds
        for n in [n for n, episode in enumerate(episodes[ends[-1]]) if _correct(episode) == kind][:SHOWN_OF_A_KIND]
    ]
    marks, rows = {True: "✓ ", False: "✗ ", None: ""}, []
    for n in chosen:
        for step in (step for step in ends if n < len(episodes[step])):
            episode = episodes[step][n]
            problem = cut(episodes[ends[-1]][n].get("problem"), MOST_CHARACTERS) if step == ends[0] else ""
            first, hint, second = (
                cut(episode.get(name) or "", MOST_CHARACTERS) for name in ("first", "hint", "second")
            )
            right_first, right_second = _correct(episode)
            rows.append([problem, f"{step:,}", marks[right_first] + first, hint, marks[right_second] + second])
    return Table(
        head=["Problem", "Step", "First answer", "Hint", "Second answer"],
        rows=rows,
        kinds=" n",
        caption=f"Held-out episodes, up to {SHOWN_OF_A_KIND} of each kind; all are in eval/step-N.jsonl",
        stacks=True,
    )


def _correct(episode: dict[str, Any]) -> tuple[bool | None, bool | None]:
    given = episode.get("correct")
    first, second = given if isinstance(given, list) and len(given) == 2 else (None, None)
    return first if isinstance(first, bool) else None, second if isinstance(second, bool) else None
