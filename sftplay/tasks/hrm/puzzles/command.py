"""The verb `puzzle-data`: a folder of puzzles from files of them, made without a config."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError
from sftplay.machine.probe import usable_cores
from sftplay.tasks.hrm.puzzles.make import PuzzleSettings, make_folder

SHOWN_SOURCES = 5  # repeated pairs of ARC that are named on the terminal; the report names all


def puzzle_data(args: Namespace) -> int:
    """`puzzle-data`: check all puzzles, write both splits; the counts, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of puzzle-data, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay puzzle-data --help`")
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
