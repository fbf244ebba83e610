"""The verbs about a config: `init` writes one, `validate` checks it, `style` sets its prompt; its schema and manual."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import check_rules, load_config, notes
from sftplay.config.section import find_spec
from sftplay.errors import ConfigError, ConfigErrors
from sftplay.places import shipped
from sftplay.runs.inputs import load_checked


def validate(args: Namespace) -> int:
    """`validate`: every problem of config, files and model name, or each value that is no default and its origin."""
    cfg = load_checked(args.config, args.overrides, asks_hub=False)
    find_spec(cfg).refuse_broken_groups(cfg, 1)
    if args.json:
        print(json.dumps({"valid": True, "config": cfg.model_dump(), "origins": cfg.origins, "notes": notes(cfg)}))
        return 0
    for key, origin in sorted(cfg.origins.items()):
        log.show(f"  {key:32} {origin}")
    for note in notes(cfg):
        log.say(note, "note")
    log.say(f"{args.config} is valid", "validate")
    return 0


def manual(args: Namespace) -> int:
    """`manual`: docs/config.md; `schema`: the JSON schema of the whole config, or of what the verbs print."""
    if getattr(args, "verbs", False):
        print(shipped("configs/verbs.schema.json").read_text(encoding="utf-8"), end="")
        return 0
    from sftplay.config.manual import manual_text, schema_text

    print(manual_text() if args.verb == "manual" else schema_text(), end="")
    return 0


def init(args: Namespace) -> int:
    """`init`: look at the rows and the machine, and write a commented config; a file that is there is never touched."""
    if not args.data:
        fix = "name a file with rows: sftplay init data.jsonl, or make init DATA=data.jsonl OUT=run.yaml"
        raise ConfigError("init needs a data file", where="DATA", fix=fix)
    from sftplay.atomic import check_new_file, write_text

    out = Path(args.out)
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError("a config is a YAML file", where=str(out), fix="give it a name that ends in .yaml")
    check_new_file(out)
    log.say(f"looking at the rows of {args.data}", "init")
    from sftplay.launch.command import cache_environment, quiet_environment
    from sftplay.machine.probe import probe
    from sftplay.runs.new_config import command_for, draft_config

    os.environ.update(quiet_environment() | cache_environment())
    draft = draft_config(args.data, args.overrides, machine=probe(), out=str(out))
    check_new_file(out)
    write_text(out, draft.text)
    if args.json:
        facts = {"config": str(out), "model": draft.model, "max_seq_len": draft.max_seq_len, "rows": draft.n_rows}
        values = {key: {"value": value, "why": why} for key, (value, why) in draft.values.items()}
        print(json.dumps({**facts, "values": values}))
        return 0
    log.show(draft.text)
    log.say(f"{out} is written; next: {command_for('inspect', str(out))}", "init")
    return 0


KEY = "data.system"


def style(args: Namespace) -> int:
    """`style`: set data.system in the config's file and change nothing else; without --style, print it."""
    cfg = load_config(args.config, args.overrides)
    before, origin = cfg.data.system, cfg.origins.get(KEY, "default")
    old, new = ("none" if text is None else json.dumps(text, ensure_ascii=False) for text in (before, args.style))
    if args.style is None:
        facts = {"file": args.config, "system": before, "origin": origin}
        lines = [f"{KEY} = {old}, from {origin}"]
    else:
        if args.overrides:
            what = f"{args.overrides[0]!r} would not be written into the file"
            raise ConfigError(what, where="command line", fix="leave it out; style writes data.system only")
        try:
            args.style.encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError("is not valid Unicode", where="--style", fix="give it as UTF-8") from None
        if problems := check_rules(cfg.with_values({KEY: args.style}, "--style")):
            raise ConfigErrors(problems)
        from sftplay.config.edit import amend_file

        amend_file(Path(args.config), KEY, value=args.style)
        facts = {"file": args.config, "was": before, "system": args.style, "origin": origin}
        lines = [
            f"{args.config} {KEY}: {old} -> {new}",
            "train, inspect, eval and infer use it from the next run on; rows with a system message keep it",
        ]
    if args.json:
        print(json.dumps(facts))
    for line in [] if args.json else lines:
        log.say(line, "style")
    return 0
