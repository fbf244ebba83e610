"""The report of an ingestion as one HTML page that needs no network, in the form of a run's report."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from sftplay.report.page import TEMPLATES, Table, render

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


def build_page(report: dict[str, Any]) -> str:
    """Return the whole page as HTML. Nothing of the documents becomes markup."""
    tokens, characters = report["tokens"], report["characters"]
    tiles = [
        ("Documents", f"{report['documents']:,}"),
        ("Kept", f"{report['kept']:,}"),
        ("Dropped", f"{sum(report['dropped'].values()):,}"),
        ("Unreadable", f"{sum(report['unreadable'].values()):,}"),
        ("Tokens", f"{tokens:,}") if tokens is not None else ("Characters", f"{characters:,}"),
    ]
    pairs = [
        (f"{pair['similarity']:.1%}", _describe_place(pair["kept"]), _describe_place(pair["dropped"]))
        for pair in report["near_duplicate_pairs"]
    ]
    lines = [(line, f"{count:,}") for line, count in report["boilerplate"].items()]
    files = []
    for file in sorted(report["files"], key=lambda file: ("unreadable", "skipped", "read").index(file["status"])):
        dropped = ", ".join(f"{count:,} {_name(reason)}" for reason, count in file.get("dropped", {}).items())
        about = [_name(file.get("reason", "")), file.get("detail"), *file.get("notes", ()), dropped]
        figures = (f"{file['kept']:,}", f"{file['characters']:,}") if "kept" in file else ("", "")
        files.append((file["path"], file["status"], *figures, "; ".join(filter(None, about))))
    counts = [("kept", "", f"{report['kept']:,}")]
    for group in ("dropped", "unreadable"):
        counts += [(group, _name(reason), f"{count:,}") for reason, count in report[group].items()]
    counts.append(("in all", "", f"{report['documents']:,}"))
    counts += [("passed over", _name(reason), f"{count:,}") for reason, count in report["skipped"].items()]
    return render(
        "documents.html", report=report, style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        tiles=tiles, name=_name, most_rows=300, steps=_list_steps(report),
        files=Table(caption="Files", head=("file", "status", "kept", "characters", ""), rows=files, kinds="  nn"),
        counts=Table(
            caption="What became of the documents", head=("", "reason", "documents"), rows=counts, kinds="  n"
        ),
        pairs=Table(caption="Near-duplicates", head=("similarity", "kept", "dropped"), rows=pairs),
        lines=Table(
            caption="Lines of many documents that were taken out", head=("line", "times"), rows=lines, kinds=" n"
        ),
    )  # fmt: skip


def _list_steps(report: dict[str, Any]) -> Table:
    rows = []
    for name, state in report["steps"].items():
        step, changed = name.replace("_", " "), report["cleaned_blocks"].get(name, 0)
        if step == "boilerplate":
            changed = sum(report["boilerplate"].values())
        elif step in ("duplicates", "near duplicates"):
            changed = report["dropped"].get(step[:-1].replace(" ", "_"), 0)
        rows.append((step, state, f"{changed:,}"))
    caption = "Steps, and the blocks, lines or documents that each changed"
    return Table(caption=caption, head=("step", "", "changed"), rows=rows, kinds="  n")


def _describe_place(record: dict[str, Any]) -> str:
    row = f", row {record['row']:,}" if record.get("row") else ""
    begin = f", from character {record['place'][0]:,}" if record.get("place") else ""
    section = f", {record['section']}" if record.get("section") else ""
    return f"{record['source']}{row}{begin}{section}"


def _name(reason: str) -> str:
    return NAMES.get(reason, reason.replace("_", " "))
