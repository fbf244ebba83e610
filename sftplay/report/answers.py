"""Answers before and after training with their references: how many changed, and some of each kind.

It compares nothing itself: the measurement has decided whether an answer is correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from sftplay.report.figures import format_figure
from sftplay.report.page import Table, cut
from sftplay.report.run_files import RunFiles, answer_rows

EACH = 4
"""Rows shown of each kind."""

MOST_CHARACTERS = 700

Kind = tuple[bool | None, bool | None]
"""Correct before, correct after; None where that was not measured."""

KINDS: dict[Kind, str] = {
    (False, True): "wrong before, correct after",
    (True, False): "correct before, wrong after",
    (None, True): "correct",
    (False, False): "wrong before and after",
    (None, False): "wrong",
    (True, True): "correct before and after",
}


class Answer(NamedTuple):
    """One row: its heading, and its texts as (name, correct or not or unknown, text)."""

    title: str
    texts: list[tuple[str, bool | None, str]]


class Answers(NamedTuple):
    """The answers of one measurement."""

    counts: Table | None
    shown: list[Answer]
    n_rows: int
    n_shown: int = EACH
    """Of each kind."""


def pick_answers(run: RunFiles, prefix: str = "") -> Answers | None:
    """Return answers of eval/<prefix>before.jsonl and <prefix>after.jsonl; None when there are none after training."""

    def read_rows(side: str) -> Iterator[dict[str, Any]]:
        rows = answer_rows(run.folder, run.stands_for.get(f"{prefix}{side}", f"{prefix}{side}"))
        return (row for row in rows if isinstance(row.get("row"), int | str))

    # The files may be large: a first pass reads the verdicts, a second one the rows that are shown.
    before, after = (
        {row["row"]: row["correct"] if isinstance(row.get("correct"), bool) else None for row in read_rows(side)}
        for side in ("before", "after")
    )
    if not after:
        return None
    kinds: dict[Any, Kind] = {row: (before.get(row), verdict) for row, verdict in after.items()}
    known = [*KINDS, *sorted({kind for kind in kinds.values() if kind not in KINDS}, key=str)]
    chosen = [row for kind in known for row in [row for row, its_kind in kinds.items() if its_kind == kind][:EACH]]
    old, new = ({row["row"]: row for row in read_rows(side) if row["row"] in chosen} for side in ("before", "after"))
    shown = [_show(kinds[row], new[row], old=old.get(row)) for row in chosen if row in new]
    counts = Counter(kinds.values())
    rows = [
        [name, f"{counts[kind]:,}", format_figure("row_share", counts[kind] / len(kinds))]
        for kind, name in KINDS.items()
        if counts[kind]
    ]
    table = (
        Table(head=["Exact match", "Rows", "Share"], rows=rows, kinds=" nn") if set(counts) != {(None, None)} else None
    )
    return Answers(table, shown, len(after))


def _show(kind: Kind, new: dict[str, Any], *, old: dict[str, Any] | None) -> Answer:
    texts: list[tuple[str, bool | None, Any]]
    texts = [("Prompt", None, new.get("prompt")), ("Reference", None, new.get("reference"))]
    texts += [("Before", kind[0], old.get("prediction"))] if old is not None else []
    texts += [("After", kind[1], new.get("prediction"))]
    title = f"Row {cut(new['row'], 80)}: {KINDS.get(kind, 'without a verdict')}"
    return Answer(title, [(name, verdict, "" if v is None else cut(v, MOST_CHARACTERS)) for name, verdict, v in texts])
