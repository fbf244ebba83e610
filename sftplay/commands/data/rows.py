"""The verbs that prepare data and show it, with the same checks as training and without a model."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sftplay import log
from sftplay.atomic import check_new_file
from sftplay.config.schema.run import RunConfig
from sftplay.control.inputs import load_checked, needs_no_hub
from sftplay.launch.command.command import cache_environment, offline_environment, quiet_environment
from sftplay.model.libraries import unneeded_for_rows
from sftplay.model.start_point import resolve_names
from sftplay.startup import leave_out
from sftplay.terminal.colours import has_colours

if TYPE_CHECKING:
    from sftplay.data.pipeline import Examples


def process(args: Namespace) -> int:
    """`process`: read, render and cache the rows; the data report as a table or as JSON."""
    examples = _load(load_checked(args.config, args.overrides))
    if args.json:
        print(json.dumps(examples.report))
    else:
        _show_report(examples)
    return 0


def inspect(args: Namespace) -> int:
    """`inspect`: the data report, and a spread of training rows with the learned tokens marked."""
    examples = _load(load_checked(args.config, args.overrides))
    from sftplay.data.inspect.display import decoded, legend, mark_learned
    from sftplay.data.inspect.rows import n_learned, spread_rows

    tokenizer, rows = examples.renderer.tokenizer, list(spread_rows(examples, args.n))
    if args.json:
        keys = ("row", "source", "input_ids", "labels")
        documents = [{**{key: row[key] for key in keys}, "text": decoded(tokenizer, row["input_ids"])} for row in rows]
        print(json.dumps({"report": examples.report, "rows": documents}))
        return 0
    _show_report(examples)
    colours = has_colours(sys.stdout)
    if rows:
        log.show(f"\n{legend(colours=colours)}")
    for row in rows:
        n_tokens = len(row["input_ids"])
        log.show(f"\nrow {row['row']}  {row['source']}  {n_tokens:,} tokens, {n_learned(row):,} learned")
        log.show(mark_learned(tokenizer, row["input_ids"], labels=row["labels"], colours=colours))
    return 0


def render(args: Namespace) -> int:
    """`render`: training rows as the chat template writes them; with `--out` every row, into a new jsonl file."""
    out = None if args.out is None else Path(args.out)
    cfg = load_checked(args.config, args.overrides)
    if out is not None:
        check_new_file(out)
    examples = _load(cfg)
    from sftplay.data.inspect.rows import rendered, show_rendered, spread_rows, write_rendered

    tokenizer = examples.renderer.tokenizer
    if out is not None:
        count = write_rendered(examples, out)
        log.say(f"{count:,} rows in {out}", "render")
        if args.json:
            print(json.dumps({"out": str(out), "rows": count}))
        return 0
    rows = spread_rows(examples, args.n)
    if args.json:
        print(json.dumps({"report": examples.report, "rows": [rendered(row, tokenizer) for row in rows]}))
        return 0
    for row in rows:
        show_rendered(row, tokenizer)
    return 0


def _load(cfg: RunConfig) -> Examples:
    """The rows as training gets them. Problems that need no heavy library are found first."""
    cfg = resolve_names(cfg)
    os.environ.update(quiet_environment() | cache_environment())
    if needs_no_hub(cfg):
        os.environ.update(offline_environment())
    log.say(f"reading {cfg.rows_path}", "data")
    before = _seal_times(cfg)
    leave_out(unneeded_for_rows(cfg.model))
    from sftplay.data.pipeline import load_examples
    from sftplay.model.tokenizer import load_extended

    tokenizer, _ = load_extended(cfg)
    examples = load_examples(cfg, tokenizer)
    name = examples.report["fingerprint"]
    outcome = "found in" if before.get(name) == _seal_times(cfg).get(name) else "written to"
    log.say(f"token rows {outcome} {Path(cfg.data.processed_dir) / name}", "data")
    return examples


def _seal_times(cfg: RunConfig) -> dict[str, int]:
    """Name of a cache folder -> when it was made."""
    from sftplay.data.cache import SEAL

    return {path.parent.name: path.stat().st_mtime_ns for path in Path(cfg.data.processed_dir).glob(f"*/{SEAL}")}


def _show_report(examples: Examples) -> None:
    from sftplay.data.prepare.report import report_table

    log.show(report_table(examples.report))
