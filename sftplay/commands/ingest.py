"""The verbs that make data without a config: `ingest` rows of documents, `puzzle-data` a folder of puzzles."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from sftplay import log
from sftplay.data.ingest.walk import STEPS, Settings
from sftplay.errors import ConfigError, nearest_names
from sftplay.machine.probe import usable_cores
from sftplay.units import format_seconds


def ingest(args: Namespace) -> int:
    """`ingest`: read all documents, write the rows and the report; a summary, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of ingest, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay ingest --help`")
    settings = _settings(args)
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


def _settings(args: Namespace) -> Settings:
    unknown = [step for step in args.without if step not in STEPS]
    if unknown:
        near = nearest_names(unknown[0], STEPS)
        fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STEPS)}"
        raise ConfigError(f"no step called {unknown[0]!r}", where="--without", fix=fix, nearest=near)
    if args.max_chars is not None and args.max_chars < args.min_chars:
        what = f"is {args.max_chars:,}, below --min-chars {args.min_chars:,}: nothing would be kept"
        raise ConfigError(what, where="--max-chars", fix="raise it, or lower --min-chars")
    return Settings(
        source=Path(args.input), out=Path(args.out), by=args.by, without=tuple(args.without), near=args.near,
        min_chars=args.min_chars, max_chars=args.max_chars, languages=tuple(args.language), encoding=args.encoding,
        limit_s=args.timeout, memory_bytes=args.memory, workers=args.workers or usable_cores(),
        bad_files=args.on_bad_file, tokenizer=args.tokenizer,
    )  # fmt: skip


SHOWN_SOURCES = 5  # repeated pairs of ARC that are named on the terminal; the report names all


def puzzle_data(args: Namespace) -> int:
    """`puzzle-data`: check all puzzles, write both splits; the counts, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of puzzle-data, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay puzzle-data --help`")
    from sftplay.tasks.hrm.puzzles.make import PuzzleSettings, make_folder

    settings = PuzzleSettings(
        kind=args.kind, source=Path(args.input) if args.input else None, out=Path(args.out), copies=args.aug,
        seed=args.seed, subsample=args.subsample, held_out=args.held_out, workers=args.workers or usable_cores(),
    )  # fmt: skip
    report = make_folder(settings)
    if args.json:
        print(json.dumps(report))
        return 0
    for split in ("train", "test"):
        counts = report[split]
        identifiers = f", {counts['identifiers']:,} identifiers" if counts["identifiers"] > 1 else ""
        text = f"{counts['groups']:,} originals, {counts['puzzles']:,} with their copies, {counts['examples']:,}"
        log.say(f"{split:5} {text} examples{identifiers}", "puzzle-data")
    copies, others = report.get("test_pairs_like_a_demonstration"), report.get("like_another_task", [])
    if copies:
        log.say(f"note: {copies:,} test pairs are copies of a demonstration of their own task", "puzzle-data")
    if others:
        named = ", ".join(f"{pair['task']} like {' '.join(pair['like'])}" for pair in others[:SHOWN_SOURCES])
        more = f" and {len(others) - SHOWN_SOURCES:,} more" if len(others) > SHOWN_SOURCES else ""
        log.say(f"note: {len(others):,} test pairs are copies of a pair of another task: {named}{more}", "puzzle-data")
    if not copies and not others:
        log.say("no puzzle of the test is a copy of one of training", "puzzle-data")
    if shared := report.get("test_puzzles_with_a_training_solution"):
        log.say(f"note: {shared:,} puzzles of the test share their solution with one of training", "puzzle-data")
    log.say(f"{settings.out}: set data.train_path and data.val_path to it", "puzzle-data")
    return 0
