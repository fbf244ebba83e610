"""The report of an ingestion as one HTML page that needs no network, in the form of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from sftplay.report.page import TEMPLATES, render

MOST_ROWS = 300
"""Rows of a table on the page. The JSON file beside it has all."""

NAMES = {
    "duplicate": "the same text as another",
    "near_duplicate": "nearly the same text as another",
    "short": "too short",
    "long": "too long",
    "language": "in another language",
    "empty": "empty",
    "broken_row": "a row that cannot be read",
    "no_text": "a row without text",
    "encrypted": "encrypted",
    "scanned": "scanned pages without text",
    "broken": "broken",
    "wrong_format": "not what its name says",
    "too_large": "too large",
    "encoding": "in an unknown encoding",
    "unsafe": "refused as unsafe",
    "timeout": "takes too long",
    "memory": "takes too much memory",
    "crashed": "its reader died",
    "changed": "changed while it was read",
    "not_readable": "cannot be opened",
    "special_file": "no file",
    "link_loop": "a link to itself",
    "broken_link": "a link to nothing",
    "hidden": "hidden",
    "link_to_folder": "a link to a folder",
    "other_kind": "no document by its name",
}
"""Reason -> words for people."""


@dataclass(frozen=True)
class Table:
    """Rows under a head; columns of figures stand on the right."""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    figures: frozenset[int] = frozenset()

    @property
    def shown(self) -> Sequence[tuple[str, ...]]:
        """The rows that have room on the page."""
        return self.rows[:MOST_ROWS]


def page_of(report: dict[str, Any]) -> str:
    """The whole page as HTML. Nothing of the documents becomes markup."""
    return render(
        "documents.html", report=report, style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        tiles=_tiles(report), counts=_counts(report), steps=_steps(report), files=_files(report), pairs=_pairs(report),
        lines=_lines(report), name=_name,
    )  # fmt: skip


def _tiles(report: dict[str, Any]) -> list[tuple[str, str]]:
    tokens, characters = report["tokens"], report["characters"]
    size = f"{tokens:,}" if tokens is not None else f"{characters:,}"
    return [
        ("Documents", f"{report['documents']:,}"),
        ("Kept", f"{report['kept']:,}"),
        ("Dropped", f"{sum(report['dropped'].values()):,}"),
        ("Unreadable", f"{sum(report['unreadable'].values()):,}"),
        ("Tokens" if tokens is not None else "Characters", size),
    ]


def _counts(report: dict[str, Any]) -> Table:
    rows = [("kept", "", f"{report['kept']:,}")]
    for group in ("dropped", "unreadable"):
        rows += [(group, _name(reason), f"{count:,}") for reason, count in report[group].items()]
    rows.append(("in all", "", f"{report['documents']:,}"))
    rows += [("passed over", _name(reason), f"{count:,}") for reason, count in report["skipped"].items()]
    return Table("What became of the documents", ("", "reason", "documents"), rows, frozenset({2}))


def _steps(report: dict[str, Any]) -> Table:
    changed = report["cleaned_blocks"]
    rows = [(step.replace("_", " "), state, f"{changed.get(step, 0):,}") for step, state in report["steps"].items()]
    for place, (step, state, _) in enumerate(rows):
        if step == "boilerplate":
            rows[place] = (step, state, f"{sum(report['boilerplate'].values()):,}")
        elif step in ("duplicates", "near duplicates"):
            rows[place] = (step, state, f"{report['dropped'].get(step[:-1].replace(' ', '_'), 0):,}")
    return Table("Steps, and the blocks, lines or documents that each changed", ("step", "", "changed"), rows,
                 frozenset({2}))  # fmt: skip


def _files(report: dict[str, Any]) -> Table:
    rows = []
    for file in sorted(report["files"], key=lambda file: ("unreadable", "skipped", "read").index(file["status"])):
        dropped = ", ".join(f"{count:,} {_name(reason)}" for reason, count in file.get("dropped", {}).items())
        told = "; ".join(
            filter(None, [_name(file.get("reason", "")), file.get("detail"), *file.get("notes", ()), dropped])
        )
        figures = (f"{file['kept']:,}", f"{file['characters']:,}") if "kept" in file else ("", "")
        rows.append((file["path"], file["status"], *figures, told))
    return Table("Files", ("file", "status", "kept", "characters", ""), rows, frozenset({2, 3}))


def _pairs(report: dict[str, Any]) -> Table:
    rows = [
        (f"{pair['similarity']:.1%}", _place(pair["kept"]), _place(pair["dropped"]))
        for pair in report["near_duplicate_pairs"]
    ]
    return Table("Near-duplicates", ("similarity", "kept", "dropped"), rows)


def _lines(report: dict[str, Any]) -> Table:
    rows = [(line, f"{count:,}") for line, count in report["boilerplate"].items()]
    return Table("Lines of many documents that were taken out", ("line", "times"), rows, frozenset({1}))


def _place(record: dict[str, Any]) -> str:
    row = f", row {record['row']:,}" if record.get("row") else ""
    begin = f", from character {record['place'][0]:,}" if record.get("place") else ""
    section = f", {record['section']}" if record.get("section") else ""
    return f"{record['source']}{row}{begin}{section}"


def _name(reason: str) -> str:
    return NAMES.get(reason, reason.replace("_", " "))
