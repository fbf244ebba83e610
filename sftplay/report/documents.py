"""The report of an ingestion as one HTML page."""

from __future__ import annotations

from typing import Any

from sftplay.report.page import Answer, Section, Table, cut, render_page

NAMES = {
    "duplicate": "the same text as another",
    "near_duplicate": "nearly the same text as another",
    "no_text": "a row without text",
    "scanned": "scanned pages without text",
    "wrong_format": "not what its name says",
    "crashed": "its reader died",
    "other_kind": "no document by its name",
}
"""Reason -> words for people, where its key is not clear."""


def build_page(report: dict[str, Any]) -> str:
    """Return the whole page as HTML. Nothing of the documents becomes markup."""
    tokens, in_all = report["tokens"], report["near_duplicate_pairs_in_all"]
    sizes = ("Tokens", tokens) if tokens is not None else ("Characters", report["characters"])
    dropped, unreadable = (sum(report[group].values()) for group in ("dropped", "unreadable"))
    counts = [("Documents", report["documents"]), ("Kept", report["kept"]), ("Dropped", dropped)]
    pairs = Table(
        head=("similarity", "kept", "dropped"),
        rows=[
            (f"{pair['similarity']:.1%}", _describe_place(pair["kept"]), _describe_place(pair["dropped"]))
            for pair in report["near_duplicate_pairs"]
        ],
    )
    note = f"{in_all:,} in all. The similarity is that of their runs of five words, counted exactly." if pairs else ""
    lines = Table(
        caption="Lines of many documents that were taken out",
        head=("line", "times"),
        rows=[(line, f"{count:,}") for line, count in report["boilerplate"].items()],
        kinds=" n",
    )
    seconds = f"{report['seconds']:,.0f} s, one row for each {report['by']}."
    return render_page(
        report["out"],
        heading=report["out"],
        lead=[
            [("", "From "), ("code", report["in"]), ("", f" in {seconds}")],
            *([[("", f"Tokens by {report['tokenizer']}.")]] if report["tokenizer"] else []),
        ],
        tiles=[(name, f"{count:,}", "") for name, count in (*counts, ("Unreadable", unreadable), sizes)],
        sections=[
            Section("documents", "Documents", [("table", _count_documents(report)), ("table", _list_files(report))]),
            Section("steps", "Steps", [("table", _list_steps(report)), ("table", lines)]),
            Section("pairs", "Near-duplicates", [("text", note), ("table", pairs)]),
            Section("dropped", "Examples of what was dropped", [("answers", _show(report["examples"]["dropped"]))]),
            Section("kept", "Examples of what was kept", [("answers", _show(report["examples"]["kept"]))]),
        ],
    )


def _count_documents(report: dict[str, Any]) -> Table:
    rows = [("kept", "", f"{report['kept']:,}")]
    for group in ("dropped", "unreadable"):
        rows += [(group, _name(reason), f"{count:,}") for reason, count in report[group].items()]
    rows.append(("in all", "", f"{report['documents']:,}"))
    rows += [("passed over", _name(reason), f"{count:,}") for reason, count in report["skipped"].items()]
    return Table(caption="What became of the documents", head=("", "reason", "documents"), rows=rows, kinds="  n")


def _list_files(report: dict[str, Any]) -> Table:
    rows = []
    for file in sorted(report["files"], key=lambda file: ("unreadable", "skipped", "read").index(file["status"])):
        dropped = ", ".join(f"{count:,} {_name(reason)}" for reason, count in file.get("dropped", {}).items())
        about = [_name(file.get("reason", "")), file.get("detail"), *file.get("notes", ()), dropped]
        figures = (f"{file['kept']:,}", f"{file['characters']:,}") if "kept" in file else ("", "")
        rows.append((file["path"], file["status"], *figures, "; ".join(filter(None, about))))
    return Table(caption="Files", head=("file", "status", "kept", "characters", ""), rows=rows, kinds="  nn")


def _list_steps(report: dict[str, Any]) -> Table:
    rows = []
    for name, state in report["steps"].items():
        changed = report["cleaned_blocks"].get(name, 0)
        if name == "boilerplate":
            changed = sum(report["boilerplate"].values())
        elif name in ("duplicates", "near_duplicates"):
            changed = report["dropped"].get(name[:-1], 0)
        rows.append((name.replace("_", " "), state, f"{changed:,}"))
    caption = "Steps, and the blocks, lines or documents that each changed"
    return Table(caption=caption, head=("step", "", "changed"), rows=rows, kinds="  n")


def _show(examples: list[dict[str, Any]]) -> list[Answer]:
    shown: list[Answer] = []
    for example in examples:
        row = f", row {example['row']}" if example.get("row") else ""
        why = f": {_name(example['reason'])}" if "reason" in example else ""
        texts: list[tuple[str, bool | None, str]] = []
        texts += [("Why", None, cut(example["detail"], 500))] if "detail" in example else []
        if "text" in example:
            texts.append(("Text", None, example["text"] + " …" * (example["n_chars"] > len(example["text"]))))
        shown.append((f"{example['source']}{row}{why}", texts))
    return shown


def _describe_place(record: dict[str, Any]) -> str:
    row = f", row {record['row']:,}" if record.get("row") else ""
    begin = f", from character {record['place'][0]:,}" if record.get("place") else ""
    section = f", {record['section']}" if record.get("section") else ""
    return f"{record['source']}{row}{begin}{section}"


def _name(reason: str) -> str:
    return NAMES.get(reason, reason.replace("_", " "))
