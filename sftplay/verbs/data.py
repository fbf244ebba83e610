"""The verb that prepares data without training."""

from __future__ import annotations

import json
import os
from argparse import Namespace

from sftplay import log
from sftplay.config.load import load_config
from sftplay.launch.command import cache_environment, offline_environment, quiet_environment
from sftplay.verbs.inputs import check_inputs, needs_no_hub


def process(args: Namespace) -> int:
    """`process`: read, render and cache the rows; the data report as a table or as JSON."""
    cfg = load_config(args.config, args.overrides)
    check_inputs(cfg)
    os.environ.update(quiet_environment() | cache_environment())
    if needs_no_hub(cfg):
        os.environ.update(offline_environment())
    if not args.json:
        log.say(f"reading {cfg.data.train_path}", "data")
    from sftplay.data.pipeline import load_examples
    from sftplay.data.tally import report_table
    from sftplay.model.tokenizer import load_tokenizer

    report = load_examples(cfg, load_tokenizer(cfg.model)).report
    print(json.dumps(report) if args.json else report_table(report))
    return 0
