"""Answers before and after training beside their references: how many changed, and some of each kind.

It compares nothing itself: the measurement has decided whether an answer is correct.
"""

from __future__ import annotations

from collections import Counter
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
    each: int = EACH


def answers_of(run: RunFiles, prefix: str = "") -> Answers | None:
    """The answers of eval/<prefix>before.jsonl and <prefix>after.jsonl; None when there are none after training."""
    before = _verdicts(run, f"{prefix}before")
    after = _verdicts(run, f"{prefix}after")
    if not after:
        return None
    kinds: dict[Any, Kind] = {row: (before.get(row), verdict) for row, verdict in after.items()}
    chosen = _choose(kinds)
    old, new = (_rows(run, f"{prefix}{name}", wanted=set(chosen)) for name in ("before", "after"))
    shown = [_answer(kinds[row], new[row], old=old.get(row)) for row in chosen if row in new]
    return Answers(_counts(kinds), shown, len(after))


def _verdicts(run: RunFiles, tag: str) -> dict[Any, bool | None]:
    verdicts: dict[Any, bool | None] = {}
    for row in answer_rows(run.folder, run.stands_for.get(tag, tag)):
        if isinstance(row.get("row"), int | str):
            verdicts[row["row"]] = row["correct"] if isinstance(row.get("correct"), bool) else None
    return verdicts


def _choose(kinds: dict[Any, Kind]) -> list[Any]:
    """The first rows of each kind; kinds that changed come first."""
    known = [*KINDS, *sorted({kind for kind in kinds.values() if kind not in KINDS}, key=str)]
    return [row for kind in known for row in [row for row, of in kinds.items() if of == kind][:EACH]]


def _rows(run: RunFiles, tag: str, *, wanted: set[Any]) -> dict[Any, dict[str, Any]]:
    rows = (
        row for row in answer_rows(run.folder, run.stands_for.get(tag, tag)) if isinstance(row.get("row"), int | str)
    )
    return {row["row"]: row for row in rows if row["row"] in wanted}


def _counts(kinds: dict[Any, Kind]) -> Table | None:
    counts = Counter(kinds.values())
    if set(counts) == {(None, None)}:
        return None
    rows = [
        [name, f"{counts[kind]:,}", format_figure("row_share", counts[kind] / len(kinds))]
        for kind, name in KINDS.items()
        if counts[kind]
    ]
    return Table(head=["Exact match", "Rows", "Share"], rows=rows, kinds=" nn")


def _answer(kind: Kind, new: dict[str, Any], *, old: dict[str, Any] | None) -> Answer:
    texts: list[tuple[str, bool | None, Any]]
    texts = [("Prompt", None, new.get("prompt")), ("Reference", None, new.get("reference"))]
    texts += [("Before", kind[0], old.get("prediction"))] if old is not None else []
    texts += [("After", kind[1], new.get("prediction"))]
    title = f"Row {cut(new['row'], 80)}: {KINDS.get(kind, 'without a verdict')}"
    return Answer(title, [(name, verdict, "" if v is None else cut(v, MOST_CHARACTERS)) for name, verdict, v in texts])
