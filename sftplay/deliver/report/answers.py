"""Answers before and after training beside their references: how many turned, and some of each kind.

It compares nothing itself; whether an answer is correct was decided when it was measured.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sftplay.deliver.report.figures import escaped, format_figure, table
from sftplay.deliver.report.run_files import RunFiles, answer_rows

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


def show_answers(found: RunFiles, prefix: str = "") -> str:
    """The answers of eval/<prefix>before.jsonl and <prefix>after.jsonl; empty when there are none after training."""
    before = _verdicts(found, f"{prefix}before")
    after = _verdicts(found, f"{prefix}after")
    if not after:
        return ""
    kinds: dict[Any, Kind] = {row: (before.get(row), verdict) for row, verdict in after.items()}
    chosen = _choose(kinds)
    old, new = (_rows(found, f"{prefix}{name}", set(chosen)) for name in ("before", "after"))
    cards = "".join(_card(kinds[row], new[row], old.get(row)) for row in chosen if row in new)
    format_figure = f"{len(chosen):,} of {len(after):,} rows: the first {EACH} of each kind."
    return f'{_counts(kinds)}<p class="soft">{format_figure}</p><div class="answers">{cards}</div>'


def _verdicts(found: RunFiles, tag: str) -> dict[Any, bool | None]:
    verdicts: dict[Any, bool | None] = {}
    for row in answer_rows(found.folder, tag):
        if isinstance(row.get("row"), int | str):
            verdicts[row["row"]] = row["correct"] if isinstance(row.get("correct"), bool) else None
    return verdicts


def _choose(kinds: dict[Any, Kind]) -> list[Any]:
    """The first rows of each kind, what turned before what stayed."""
    known = [*KINDS, *sorted({kind for kind in kinds.values() if kind not in KINDS}, key=str)]
    return [row for kind in known for row in [row for row, of in kinds.items() if of == kind][:EACH]]


def _rows(found: RunFiles, tag: str, wanted: set[Any]) -> dict[Any, dict[str, Any]]:
    rows = (row for row in answer_rows(found.folder, tag) if isinstance(row.get("row"), int | str))
    return {row["row"]: row for row in rows if row["row"] in wanted}


def _counts(kinds: dict[Any, Kind]) -> str:
    counts = Counter(kinds.values())
    if set(counts) == {(None, None)}:
        return ""
    rows = [
        [escaped(name), f"{counts[kind]:,}", format_figure("row_share", counts[kind] / len(kinds))]
        for kind, name in KINDS.items()
        if counts[kind]
    ]
    return table(["Exact match", "Rows", "Share"], rows, kinds=" nn")


def _card(kind: Kind, new: dict[str, Any], old: dict[str, Any] | None) -> str:
    parts = [("Prompt", _text(new.get("prompt"))), ("Reference", _text(new.get("reference")))]
    if old is not None:
        parts.append((f"Before {_verdict(kind[0])}", _text(old.get("prediction"))))
    parts.append((f"After {_verdict(kind[1])}", _text(new.get("prediction"))))
    inner = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in parts)
    title = KINDS.get(kind, "without a verdict")
    return f'<article class="answer"><h3>Row {escaped(new["row"], 80)}: {title}</h3><dl>{inner}</dl></article>'


def _verdict(is_correct: bool | None) -> str:
    if is_correct is None:
        return ""
    return '<span class="verdict good">✓ correct</span>' if is_correct else '<span class="verdict bad">✗ wrong</span>'


def _text(value: object) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return f'<div class="text">{escaped(text, MOST_CHARACTERS)}</div>' if text.strip() else "<small>(empty)</small>"
