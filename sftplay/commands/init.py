"""The verb that writes a config for a data file."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.atomic import check_new_file, write_text
from sftplay.errors import ConfigError


def init(args: Namespace) -> int:
    """`init`: look at the rows and the machine, and write a commented config; a file that is there is never touched."""
    if not args.data:
        fix = "name a file with rows: sftplay init data.jsonl, or make init DATA=data.jsonl OUT=run.yaml"
        raise ConfigError("init needs a data file", where="DATA", fix=fix)
    out = Path(args.out)
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError("a config is a YAML file", where=str(out), fix="give it a name that ends in .yaml")
    check_new_file(out)
    log.say(f"looking at the rows of {args.data}", "init")
    from sftplay.launch.command.command import cache_environment, quiet_environment
    from sftplay.machine.probe import probe
    from sftplay.runs.new_config import command_for, draft_config

    os.environ.update(quiet_environment() | cache_environment())
    draft = draft_config(args.data, args.overrides, machine=probe(), out=str(out))
    check_new_file(out)
    write_text(out, draft.text)
    if args.json:
        print(json.dumps({"config": str(out), "model": draft.model, "max_seq_len": draft.max_seq_len,
                          "rows": draft.n_rows}))  # fmt: skip
        return 0
    log.show(draft.text)
    log.say(f"{out} is written; next: {command_for('inspect', str(out))}", "init")
    return 0
