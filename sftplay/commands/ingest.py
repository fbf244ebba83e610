"""The verb `ingest`: rows of documents, made without a config."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from sftplay import log
from sftplay.data.ingest.children import STEPS, Settings
from sftplay.errors import ConfigError, nearest_names
from sftplay.machine.probe import usable_cores
from sftplay.units import format_seconds


def ingest(args: Namespace) -> int:
    """`ingest`: read all documents, write the rows and the report; a summary, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of ingest, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay ingest --help`")
    if unknown := next((step for step in args.without if step not in STEPS), None):
        near = nearest_names(unknown, STEPS)
        fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STEPS)}"
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
    from sftplay.report.documents import build_page

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
