"""Measurements before and after training, and answers next to their references."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sftplay.report.figures import (
    FEW_PROMPTS,
    as_number,
    capitalized,
    change,
    compare,
    find_name,
    format_course,
    format_figure,
    interval,
    is_better,
    is_share,
)
from sftplay.report.page import MOST_CHARACTERS, Answer, Block, Remark, Section, Table, cut, list_facts
from sftplay.report.run_files import RunFiles, mapping

MOST_TABLES = 20

HARNESS = "lm-eval"
"""Name of the file in eval/ that has a table of its own."""

EACH = 4
"""Rows shown of each kind."""

KINDS: dict[tuple[bool | None, bool | None], str] = {
    (False, True): "wrong before, correct after",
    (True, False): "correct before, wrong after",
    (None, True): "correct",
    (False, False): "wrong before and after",
    (None, False): "wrong",
    (True, True): "correct before and after",
    (False, None): "without a verdict",
    (True, None): "without a verdict",
    (None, None): "without a verdict",
}
"""Correct before and after, None where that was not measured -> words; in the order in which they are shown."""


def build_sections(run: RunFiles) -> Iterator[Section]:
    """Yield the section of figures, then one of answers for each kind of rows that was answered."""
    yield Section("evaluation", "Evaluation", evaluation_blocks(run))
    if run.task and run.task.turns == 2:
        return  # episodes have a table of their own
    anchors = list(mapping(run.evals.get("perplexity", {}).get("anchor")))[:40]
    yield Section("answers", "Answers before and after", pick_answers(run, ""))
    for n, name in enumerate(anchors, 1):
        yield Section(f"answers-{n}", f"Answers to {name}", pick_answers(run, f"anchor-{name}-"))
    yield Section("test-answers", "Answers to the test rows", pick_answers(run, "test-"))


def evaluation_blocks(run: RunFiles) -> list[Block]:
    """Return figures before and after in one table, shares of them as bars, then those of other evaluations."""
    pairs = {name for name in run.evals if name in ("before", "after") or name.endswith(("-before", "-after"))}
    rows, bars = [], []
    for prefix in sorted({name.removesuffix("after").removesuffix("before") for name in pairs})[:MOST_TABLES]:
        where = {"": "Held-out rows", "test-": "Test rows"}.get(prefix, prefix[:-1].replace("anchor-", "chats of "))
        sides = before, after = [run.evals.get(f"{prefix}{side}", {}) for side in ("before", "after")]
        numbers = [key for key in after | before if any(as_number(figures.get(key)) is not None for figures in sides)]
        for key in [key for key in numbers if key not in ("step", "seconds")][:60]:
            name, cells = capitalized(find_name(key)), compare(key, before.get(key), after=after.get(key))
            for n, figures in enumerate(sides):
                share, count = as_number(figures.get(key)), as_number(figures.get("n"))
                if not is_share(key) or share is None or not 0 <= share <= 1:
                    continue
                bars.append([f"{where}: {name}, {('before', 'after')[n]}", f"{share:.1%}", cells[n]])
                if key == "exact_match" and count is not None and 1 <= count < 1e15:
                    low, high = interval(share, int(count))
                    cells[n] += f" ({100 * low:.1f} – {100 * high:.1f})"
            rows.append([where, name, *cells[:2], "" if key == "n" else cells[2]])
    note = "; in brackets the 95 % interval of a share" if bars else ""
    head = ["Rows", "Figure", "Before", "After", "Change"]
    blocks: list[Block] = [
        ("table", Table(head=head, rows=rows, kinds="  nnv", caption=f"Before and after training{note}")),
        ("table", Table(head=["Share", "", ""], rows=bars[: 2 * MOST_TABLES], kinds=" bn")),
    ]
    if HARNESS in run.evals:
        blocks.append(("table", harness_table(run.evals[HARNESS])))
    others = sorted(name for name in set(run.evals) - pairs if not name.startswith(("step-", "perplexity", HARNESS)))
    for name in others[:MOST_TABLES]:
        rows = [[key, value] for key, value in list_facts(run.evals[name])[:60]]
        blocks.append(("table", Table(head=["Figure", "Value"], rows=rows, caption=f"eval/{name}.json", kinds=" n")))
    return blocks


def harness_table(content: dict[str, Any]) -> Table:
    """Return the figures of lm-eval.json for the base and the run, each with its standard error."""

    def write(cell: dict[str, Any]) -> str:
        error = as_number(cell.get("stderr"))
        return format_figure("", cell.get("value")) + (f" ± {error:.2g}" if error is not None else "")

    run, base, tasks = (mapping(content.get(key)) for key in ("run", "base", "tasks"))
    rows = []
    for task, figures in list(run.items())[:200]:
        facts, of_base = mapping(tasks.get(task)), mapping(base.get(task))
        for metric, figure in list(mapping(figures).items())[:20]:
            cells, name = [mapping(of_base.get(metric)), mapping(figure)], [task, metric]
            sizes = [format_figure("", facts.get(key)) for key in ("fewshot", "n")]
            moved = change("", cells[0].get("value"), after=cells[1].get("value"))
            rows.append([*name, *sizes, *map(write, cells), moved])
    form = "the run's chat template" if content.get("template") else "plain documents"
    caption = f"lm-evaluation-harness {content.get('harness')}, both asked by {form}; ± is the standard error"
    if as_number(content.get("limit")) is not None:
        caption += f"; only the first {content['limit']} rows of each task"
    head = ["Task", "Metric", "Few-shot", "Rows", "Base", "Run", "Change"]
    return Table(head=head, rows=rows, kinds="  nnnnn", caption=caption)


def pick_answers(run: RunFiles, prefix: str) -> list[Block]:
    """Return answers of eval/<prefix>before.jsonl and <prefix>after.jsonl; none when there are none after training."""

    def read_rows(side: str) -> Iterator[dict[str, Any]]:
        rows = run.answers(f"{prefix}{side}")
        return (row for row in rows if isinstance(row.get("row"), int | str) and "prediction" in row)

    # The files may be large: a first pass reads the verdicts, a second one the rows that are shown.
    before, after = (
        {row["row"]: row["correct"] if isinstance(row.get("correct"), bool) else None for row in read_rows(side)}
        for side in ("before", "after")
    )
    if not after:
        return []
    kinds = {row: (before.get(row), verdict) for row, verdict in after.items()}
    chosen = [row for kind in KINDS for row in [row for row, its_kind in kinds.items() if its_kind == kind][:EACH]]
    old, new = ({row["row"]: row for row in read_rows(side) if row["row"] in chosen} for side in ("before", "after"))
    shown: list[Answer] = []
    for number in (number for number in chosen if number in new):
        row, (was_right, is_right) = new[number], kinds[number]
        given: list[tuple[str, bool | None, Any]]
        given = [("Prompt", None, row.get("prompt")), ("Reference", None, row.get("reference"))]
        given += [("Before", was_right, old[number].get("prediction"))] if number in old else []
        given += [("After", is_right, row.get("prediction"))]
        words = [(name, verdict, "" if v is None else cut(v, MOST_CHARACTERS)) for name, verdict, v in given]
        shown.append((f"Row {number}: {KINDS[kinds[number]]}", words))
    counts = Counter(kinds.values())
    rows = [
        [name, f"{counts[kind]:,}", format_figure("row_share", counts[kind] / len(kinds))]
        for kind, name in KINDS.items()
        if counts[kind] and set(counts) != {(None, None)}
    ]
    return [
        ("table", Table(head=["Exact match", "Rows", "Share"], rows=rows, kinds=" nn")),
        ("note", f"{len(shown):,} of {len(after):,} rows: the first {EACH} of each kind."),
        ("answers", shown),
    ]


def find_remarks(run: RunFiles) -> Iterator[Remark]:
    """Yield what the measurements before and after say."""
    before, after = run.evals.get("before", {}), run.evals.get("after", {})
    perplexity = mapping(run.evals.get("perplexity"))
    compares = perplexity.get("perplexity_compares") is not False
    per_token = () if compares else ("loss", "perplexity")
    for key in after:
        if key in before and key not in per_token and is_better(key, before[key], after=after[key]) is False:
            name = capitalized("held-out loss" if key == "loss" else find_name(key))
            yield "warn", f"{name} got worse by training: {format_course(key, before[key], last=after[key])}."
    count = as_number(after.get("n"))
    if count is not None and 0 < count < FEW_PROMPTS:
        yield "note", f"Answers were compared on {count:,.0f} prompts only; shares of them are rough."
    if after and not before:
        yield "note", "The base was not measured (eval.before), so there is nothing to compare with."
    if not compares:
        text = "The tokenizer is another one after training: loss and perplexity per token do not compare"
        yield "note", f"{text}; bits per byte does."
    for name, row in mapping(perplexity.get("anchor")).items():
        from sftplay.evaluate.comparison import ENOUGH_ROWS  # most runs have no anchors

        rise, rows = (as_number(mapping(row).get(key)) for key in ("forgetting_percent", "rows"))
        if rise is not None and 5.0 < rise < math.inf and (rows is None or rows >= ENOUGH_ROWS):
            text = f"Training has cost chat skills: the loss on {name} rose by {rise:.1f} %"
            yield "warn", f"{text}; a larger weight for it, a lower rate or fewer steps keep more."
