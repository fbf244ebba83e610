"""The verbs that prepare the data of a config and show it, without a model: `process`, `inspect`, `render`."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_new_file
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.launch.command import cache_environment, offline_environment, quiet_environment
from sftplay.log import has_colours
from sftplay.model.libraries import unneeded_for_rows
from sftplay.model.start_point import resolve_names
from sftplay.runs.inputs import load_checked, needs_no_hub
from sftplay.startup import leave_out
from sftplay.units import plural


def load_texts(args: Namespace) -> RunConfig:
    """The checked config of a run on texts. Raises ConfigError if it learns puzzles, which no tokenizer reads."""
    cfg = load_checked(args.config, args.overrides)
    if not cfg.task.reads_text:
        what = "task_mode hrm learns puzzles, which have neither a tokenizer nor a template"
        fix = "`make train` prints what the puzzles are; `make puzzle-data` makes some"
        raise ConfigError(what, where=cfg.describe_origin("task_mode"), fix=fix)
    return cfg


def process(args: Namespace) -> int:
    """`process`: read, render and cache the rows; the data report as a table or as JSON."""
    cfg = load_texts(args)
    rows = _load_rows(cfg)
    if args.json:
        print(json.dumps(rows.report))
    else:
        _show_report(rows, cfg)
    return 0


def inspect(args: Namespace) -> int:
    """`inspect`: the data report, and evenly spaced training rows or blocks with the learned tokens marked."""
    cfg = load_texts(args)
    loaded = _load_rows(cfg)
    from sftplay.data import inspect as views

    tokenizer, colours = loaded.renderer.tokenizer, has_colours(sys.stdout)
    blocks = views.evenly_spaced_blocks(loaded, args.n) if cfg.learns_documents else []
    rows = [] if cfg.learns_documents else list(views.evenly_spaced_rows(loaded, args.n))
    if args.json:
        keys = ("row", "source", "input_ids", "labels")
        documents = [views.as_json(block, tokenizer) for block in blocks]
        documents += [{**{key: row[key] for key in keys}, **views.as_texts(row, tokenizer)} for row in rows]
        print(json.dumps({"report": loaded.report, "rows": documents}))
        return 0
    _show_report(loaded, cfg)
    if rows or (cfg.learns_documents and args.n):
        log.show(f"\n{views.legend(colours=colours)}")
    for block in blocks:
        views.show_block(block, tokenizer, colours=colours)
    for row in rows:
        views.show_learned(row, tokenizer, colours=colours)
    return 0


def render(args: Namespace) -> int:
    """`render`: training rows as the chat template writes them; with `--out` every row, into a new jsonl file."""
    cfg = load_texts(args)
    if cfg.learns_documents:
        where = cfg.describe_origin("task_mode", unset=args.config)
        what = f"the rows of {cfg.task_mode} are blocks of documents, which no chat template writes"
        raise ConfigError(what, where=where, fix=f"make inspect CONFIG={args.config} shows what stands in them")
    if args.out is not None:
        check_new_file(Path(args.out))
    examples = _load_rows(cfg)
    from sftplay.data.inspect import evenly_spaced_rows, rendered, show_rendered, write_rendered

    tokenizer = examples.renderer.tokenizer
    if args.out is not None:
        count = write_rendered(examples, Path(args.out))
        log.say(f"{plural(count, 'row')} in {Path(args.out)}", "render")
        if args.json:
            print(json.dumps({"out": str(Path(args.out)), "rows": count}))
        return 0
    rows = evenly_spaced_rows(examples, args.n)
    if args.json:
        print(json.dumps({"report": examples.report, "rows": [rendered(row, tokenizer) for row in rows]}))
        return 0
    for row in rows:
        show_rendered(row, tokenizer)
    return 0


def _load_rows(cfg: RunConfig) -> Any:
    """Examples, or MixtureRows of documents, as training gets them. What needs no heavy library is checked first."""
    cfg = resolve_names(cfg)
    os.environ.update(quiet_environment() | cache_environment())
    if needs_no_hub(cfg):
        os.environ.update(offline_environment())
    log.say(f"reading {', '.join(source.path for source in cfg.datasets) or cfg.rows_path}", "data")
    leave_out(unneeded_for_rows(cfg.model))
    from sftplay.data.cache import SEAL
    from sftplay.model.tokenizer import load_extended

    cache, tokenizer = Path(cfg.data.processed_dir), load_extended(cfg)[0]
    before = {path.parent.name: path.stat().st_mtime_ns for path in cache.glob(f"*/{SEAL}")}
    rows: Any
    if cfg.learns_documents:
        from sftplay.data.cache import note_blocks
        from sftplay.data.mixture.load import load_mixture

        rows = load_mixture(cfg, tokenizer)
        if rows.steps_per_epoch is not None:
            note_blocks(cfg, rows.steps_per_epoch * cfg.train.effective_batch_size)
    elif cfg.task.learns_from_rewards:
        from sftplay.data.inspect import as_examples
        from sftplay.data.load_prompts import load_prompts
        from sftplay.environments.processes import EnvironmentSpec, describe_tools

        rows = as_examples(load_prompts(cfg, tokenizer, tools=describe_tools(EnvironmentSpec.from_config(cfg))))
    else:
        from sftplay.data.pipeline import load_examples

        rows = load_examples(cfg, tokenizer)
    for report in rows.report["sources"].values() if cfg.learns_documents else [rows.report]:
        name = report["fingerprint"]
        is_old = (cache / name / SEAL).exists() and before.get(name) == (cache / name / SEAL).stat().st_mtime_ns
        log.say(f"token rows {'found in' if is_old else 'written to'} {cache / name}", "data")
    return rows


def _show_report(rows: Any, cfg: RunConfig) -> None:
    if part := cfg.task.part("rows"):
        log.show(part.report_table(rows.report))
        return
    from sftplay.data.load_prompts import prompts_table
    from sftplay.data.mixture.load import mixture_table
    from sftplay.data.pipeline import Examples
    from sftplay.data.row_outcomes import report_table

    table = prompts_table if "max_prompt_tokens" in rows.report else report_table
    log.show((table if isinstance(rows, Examples) else mixture_table)(rows.report))
