"""The verb `ingest`: rows of documents, made without a config; and its report as one HTML page."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.data.ingest.children import STEPS, Settings
from sftplay.errors import ConfigError, suggest
from sftplay.machine.gpu import usable_cores
from sftplay.report.page import Answer, Section, Table, cut, render_page
from sftplay.units import format_seconds


def ingest(args: Namespace) -> int:
    """`ingest`: read all documents, write the rows and the report; a summary, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of ingest, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay ingest --help`")
    if unknown := next((step for step in args.without if step not in STEPS), None):
        fix, near = suggest(unknown, STEPS, f"there are {', '.join(STEPS)}")
        raise ConfigError(f"no step called {unknown!r}", where="--without", fix=fix, nearest=near)
    if args.max_chars is not None and args.max_chars < args.min_chars:
        what = f"is {args.max_chars:,}, below --min-chars {args.min_chars:,}: nothing would be kept"
        raise ConfigError(what, where="--max-chars", fix="raise it, or lower --min-chars")
    settings = Settings(
        source=Path(args.input), out=Path(args.out), by=args.by, without=tuple(args.without), near=args.near,
        min_chars=args.min_chars, max_chars=args.max_chars, languages=tuple(args.language), encoding=args.encoding,
        limit_s=args.timeout, memory_bytes=args.memory, workers=args.workers or usable_cores(),
        bad_files=args.on_bad_file, tokenizer=args.tokenizer,
    )  # fmt: skip
    from sftplay.data.ingest.ingest import check_outcome, report_paths
    from sftplay.data.ingest.ingest import ingest as run

    count = None
    if args.tokenizer:
        from sftplay.config.run import ModelConfig
        from sftplay.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(ModelConfig(name=args.tokenizer))

        def count(texts: Sequence[str]) -> int:
            return sum(map(len, tokenizer(list(texts), add_special_tokens=False)["input_ids"]))

    report = run(settings, render_page=build_page, count_tokens=count, replaces=args.replace)
    if args.json:
        check_outcome(report, settings)
        print(json.dumps(report))
        return 0

    def count_by_reason(group: str) -> str:
        named = ", ".join(f"{number:,} {reason.replace('_', ' ')}" for reason, number in report[group].items())
        return f"{sum(report[group].values()):,}" + (f" ({named})" if named else "")

    size = f"{report['characters']:,} characters"
    size += f", {report['tokens']:,} tokens" if report["tokens"] is not None else ""
    log.say(f"documents   {report['documents']:,}", "ingest")
    log.say(f"kept        {report['kept']:,}, {size}", "ingest")
    for group in ("dropped", "unreadable"):
        log.say(f"{group:11} {count_by_reason(group)}", "ingest")
    if report["guessed_encodings"]:
        guessed = count_by_reason("guessed_encodings")
        log.say(f"guessed     encodings of {guessed}; their notes are in the report", "ingest")
    if report["tracebacks"]:
        log.say(f"tracebacks  of readers that failed: {report['tracebacks']}", "ingest")
    if report["skipped"]:
        log.say(f"passed over {count_by_reason('skipped')}", "ingest")
    if report["kept"]:
        page, seconds = report_paths(settings.out)[1], format_seconds(report["seconds"])
        log.say(f"{settings.out} in {seconds}; report: {page}", "ingest")
    check_outcome(report, settings)
    return 0


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
