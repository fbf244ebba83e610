"""The verbs about puzzles: prepare a folder of them, and solve one."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import usable_cores
from sftplay.runs.finished_run import prepare_environment

SHOWN = 5
"""Repeated pairs of ARC that are named on the terminal; the report names all."""


def puzzle_data(args: Namespace) -> int:
    """`puzzle-data`: check all puzzles, write both splits; the counts, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of puzzle-data, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay puzzle-data --help`")
    from sftplay.data.puzzles.make_checks import PuzzleSettings
    from sftplay.data.puzzles.make_folder import make_folder

    settings = PuzzleSettings(
        kind=args.kind, source=Path(args.input) if args.input else None, out=Path(args.out), copies=args.aug,
        seed=args.seed, subsample=args.subsample, held_out=args.held_out, workers=args.workers or usable_cores(),
    )  # fmt: skip
    report = make_folder(settings)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report, settings.out)
    return 0


def _show(report: dict[str, Any], out: Path) -> None:
    for split in ("train", "test"):
        counts = report[split]
        identifiers = f", {counts['identifiers']:,} identifiers" if counts["identifiers"] > 1 else ""
        text = (
            f"{counts['groups']:,} originals, {counts['puzzles']:,} with their copies, {counts['examples']:,} examples"
        )
        log.say(f"{split:5} {text}{identifiers}", "puzzle-data")
    own, others = report.get("test_pairs_like_a_demonstration"), report.get("like_another_task", [])
    if own:
        log.say(f"note: {own:,} test pairs are copies of a demonstration of their own task", "puzzle-data")
    if others:
        named = ", ".join(f"{each['task']} like {' '.join(each['like'])}" for each in others[:SHOWN])
        more = f" and {len(others) - SHOWN:,} more" if len(others) > SHOWN else ""
        log.say(f"note: {len(others):,} test pairs are copies of a pair of another task: {named}{more}", "puzzle-data")
    if not own and not others:
        log.say("no puzzle of the test is a copy of one of training", "puzzle-data")
    if shared := report.get("test_puzzles_with_a_training_solution"):
        log.say(f"note: {shared:,} puzzles of the test share their solution with one of training", "puzzle-data")
    log.say(f"{out}: set data.train_path and data.val_path to it", "puzzle-data")


LONGEST_BYTES = 1 << 16
"""A larger file holds no puzzle."""


def solve(args: Namespace, cfg: RunConfig, *, folder: RunFolder) -> int:
    """Print the grid of the solution, and what is to be said of it."""
    text = _read(args.input)
    prepare_environment(cfg)
    solution = cfg.task.finished.solve_text(cfg, folder, text=text, where=args.input)
    print(solution.text, flush=True)
    log.say(solution.said, "infer")
    return 0


def refuse_file(args: Namespace) -> None:
    """Raise the ConfigError of a run that answers texts and is given a file."""
    if args.input:
        what = "only a run of task mode hrm takes a file here"
        fix = "leave it out to talk, or answer a file of rows with make infer-batch IN= OUT="
        raise ConfigError(what, where="--in (IN=)", fix=fix)


def _read(name: str) -> str:
    if not name:
        fix = "name a file with one grid: IN=puzzle.txt"
        raise ConfigError("this run solves puzzles, and none is named", where="--in (IN=)", fix=fix)
    path = Path(name)
    try:
        if path.stat().st_size > LONGEST_BYTES:
            raise DataError("is larger than any puzzle", where=name, fix="name a file with one grid")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=name, fix="name a file with one grid") from None
    except UnicodeDecodeError:
        raise DataError("is no text", where=name, fix="name a file with one grid") from None
