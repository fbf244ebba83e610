"""Answers before and after training, next to their references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sftplay.report.figures import format_figure
from sftplay.report.page import Block, Table, cut
from sftplay.report.run_files import RunFiles, mapping

EACH = 4
"""Rows shown of each kind."""

MOST_CHARACTERS = 700

Answer = tuple[str, list[tuple[str, bool | None, str]]]
"""Its heading, and its texts as (name, correct or not or unknown, text)."""

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


def answer_blocks(run: RunFiles) -> Iterator[tuple[str, str, list[Block]]]:
    """Yield anchor, title and blocks for each kind of rows that was answered."""
    anchors = list(mapping(run.evals.get("perplexity", {}).get("anchor")))[:40]
    sets = [("answers", "Answers before and after", "")]
    sets += [(f"answers-{n}", f"Answers to {name}", f"anchor-{name}-") for n, name in enumerate(anchors, 1)]
    sets += [("test-answers", "Answers to the test rows", "test-")]
    # Episodes of two turns have a table of their own.
    for anchor, title, prefix in [] if run.task and run.task.turns == 2 else sets:
        yield anchor, title, pick_answers(run, prefix)


def pick_answers(run: RunFiles, prefix: str) -> list[Block]:
    """Return answers of eval/<prefix>before.jsonl and <prefix>after.jsonl; none when there are none after training."""

    def read_rows(side: str) -> Iterator[dict[str, Any]]:
        rows = run.rows(f"eval/{run.stands_for.get(f'{prefix}{side}', f'{prefix}{side}')}.jsonl")
        return (row for row in rows if isinstance(row.get("row"), int | str))

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
