"""The report's part about two-turn episodes: the figures of both turns, and episodes to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sftplay.report.charts import Chart, Curve
from sftplay.report.figures import change, find_name, format_figure
from sftplay.report.history import Point, as_number
from sftplay.report.page import Table, cut
from sftplay.report.run_files import RunFiles, answer_rows, by_step, mapping

PAIRS = (
    ("Right answers", ("acc_t1", "acc_t2")),
    ("What the second turn changes", ("i2c", "c2i")),
)
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

KINDS = {"none": "no hint", "static": "static hint", "model": "hints of the guide"}

FIGURES = (
    "acc_t1", "acc_t2", "delta", "i2c", "c2i", "fix_rate", "break_rate", "acc_t2_empty", "acc_t2_static",
    "acc_t2_other_hint", "follows_hint", "changes_to_hint",
    "acc_t1_greedy", "acc_t2_greedy", "edit_ratio", "frac_identical", "hint_leak", "hint_tokens", "truncated",
    "parse_failures",
)  # fmt: skip

COLOURS = "abcd"


class Turns(NamedTuple):
    """The part of the page about both turns."""

    charts: list[Chart]
    tables: list[Table]


def has_chart(name: str) -> bool:
    """Return whether this figure of metrics.jsonl has a chart here, or is one of an evaluation."""
    return name.startswith("eval_") or any(name in keys for _, keys in (*PAIRS, *SAMPLED))


def build_sections(run: RunFiles, resumed: Sequence[float]) -> dict[str, Any]:
    """Build the task's sections of the page, by their names in `templates/page.html`."""
    return {"turns": build_turns(run, resumed)}


def build_turns(run: RunFiles, resumed: Sequence[float]) -> Turns | None:
    """None for a run that does not answer twice."""
    measured = sorted((pair for pair in by_step(run.evals) if "acc_t1" in pair[1]), key=lambda pair: pair[0])
    if "acc_t1" not in run.history.values and not measured:
        return None
    tables = [_course(measured), _ablation(run), episodes_table(run, [int(step) for step, _ in measured])]
    return Turns(_charts(run, measured, resumed=resumed), [table for table in tables if table.rows])


def _charts(run: RunFiles, measured: list[tuple[float, dict[str, Any]]], *, resumed: Sequence[float]) -> list[Chart]:
    def held_out(key: str) -> list[Point]:
        return [(step, value) for step, figures in measured if (value := as_number(figures.get(key))) is not None]

    def sampled(key: str, colour: str) -> Curve:
        return Curve(key, find_name(key), run.history.curve(key), colour, trend=run.history.trend(key))

    drawn: list[tuple[str, str, list[Curve]]] = []
    for title, (one, two) in PAIRS:
        dots = [
            Curve(f"eval_{key}", f"{find_name(key)}, held out", held_out(key), colour, dots=True)
            for key, colour in ((one, "c"), (two, "d"))
        ]
        drawn.append((title, one, [sampled(one, "a"), sampled(two, "b"), *dots]))
    hints = zip(HINTS.items(), COLOURS, strict=False)
    curves = [Curve(key, name, held_out(key), colour, dots=True) for (key, name), colour in hints]
    drawn.append(("Second answers by hint, held out", "acc_t2", curves))
    drawn += [
        (title, keys[0], [sampled(key, colour) for key, colour in zip(keys, COLOURS, strict=False)])
        for title, keys in SAMPLED
    ]
    return [
        Chart(title=title, unit=unit, curves=known, last_step=run.step, resumed=resumed, is_wide=unit == "acc_t1")
        for title, unit, curves in drawn
        if (known := [curve for curve in curves if curve.points])
    ]


def _course(measured: list[tuple[float, dict[str, Any]]]) -> Table:
    """The first and the last measurement on held-out problems."""
    if not measured:
        return Table(head=[], rows=[])
    (first, old), (last, new) = measured[0], measured[-1]
    rows = [
        [find_name(key), format_figure(key, old.get(key)), format_figure(key, new.get(key)),
         change(key, old.get(key), after=new.get(key))]
        for key in FIGURES
        if as_number(new.get(key)) is not None
    ]  # fmt: skip
    said = f": {new['diagnosis']}" if isinstance(new.get("diagnosis"), str) else ""
    head = ["Held-out problems", f"Step {first:,.0f}", f"Step {last:,.0f}", "Change"]
    return Table(head=head, rows=rows, kinds=" nnn", caption=f"At the end{said[:200]}")


def _ablation(run: RunFiles) -> Table:
    """What `make eval` has measured: each kind of hint, by the base and by the run."""
    shown = FIGURES[:5]
    rows = [
        [side, words, *(format_figure(key, figures.get(key)) for key in shown)]
        for name, side in (("before", "base"), ("after", "this run"))
        for kind, words in KINDS.items()
        if (figures := mapping(mapping(run.evals.get(name, {}).get("hints")).get(kind)))
    ]
    return Table(
        head=["By", "With", *map(find_name, shown)], rows=rows, kinds="  nnnnn", caption="Who has learned what"
    )


EACH = 3
"""Problems shown of each kind."""

MOST_CHARACTERS = 500
MOST_LINES = 4_096

OUTCOMES = ((False, True), (True, False), (False, False), (True, True))
"""Whether each answer is right after the run; those that turn 2 has changed come first."""


def episodes_table(run: RunFiles, steps: Sequence[int]) -> Table:
    """Episodes of the first and of the last of these measurements, those of a problem below each other."""
    head = ["Problem", "Step", "First answer", "Hint", "Second answer"]
    if not steps:
        return Table(head=head, rows=[])
    ends = sorted({steps[0], steps[-1]})
    by_step = {step: _episodes(run, step) for step in ends}
    last = by_step[ends[-1]]
    chosen = [n for kind in OUTCOMES for n in [n for n, each in enumerate(last) if _correct(each) == kind][:EACH]]
    rows = [
        [
            cut(last[n].get("problem"), MOST_CHARACTERS) if step == ends[0] else "",
            f"{step:,}",
            *_texts(by_step[step][n]),
        ]
        for n in chosen
        for step in ends
        if n < len(by_step[step])
    ]
    caption = f"Held-out episodes, up to {EACH} of each kind; all are in eval/step-N.jsonl"
    return Table(head=head, rows=rows, kinds=" n", caption=caption, stacks=True)


def _episodes(run: RunFiles, step: int) -> list[dict[str, Any]]:
    rows = answer_rows(run.folder, f"step-{step}")
    return [row for _, row in zip(range(MOST_LINES), rows, strict=False)]


def _correct(episode: dict[str, Any]) -> tuple[bool | None, bool | None]:
    given = episode.get("correct")
    first, second = given if isinstance(given, list) and len(given) == 2 else (None, None)
    return first if isinstance(first, bool) else None, second if isinstance(second, bool) else None


def _texts(episode: dict[str, Any]) -> list[str]:
    """First answer, hint, second answer; a mark before each answer says whether it is right."""
    first, second = _correct(episode)
    texts = [cut(episode.get(name) or "", MOST_CHARACTERS) for name in ("first", "hint", "second")]
    marks = {True: "✓ ", False: "✗ ", None: ""}
    return [marks[first] + texts[0], texts[1], marks[second] + texts[2]]
