"""The verb that gives a run its system prompt."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.edit import amend_file
from sftplay.config.load import load_config
from sftplay.config.rules.general import check_rules
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, ConfigErrors

KEY = "data.system"


def style(args: Namespace) -> int:
    """`style`: set data.system in the config's file and change nothing else; without --style, print it."""
    cfg = load_config(args.config, args.overrides)
    before, origin = cfg.data.system, cfg.origins.get(KEY, "default")
    if args.style is None:
        _print(args, {"file": args.config, "system": before, "origin": origin})
        return 0
    if args.overrides:
        what = f"{args.overrides[0]!r} would not be written into the file"
        raise ConfigError(what, where="command line", fix="leave it out; style writes data.system only")
    _check(cfg, args.style)
    amend_file(Path(args.config), KEY, value=args.style)
    _print(args, {"file": args.config, "was": before, "system": args.style, "origin": origin})
    return 0


def _check(cfg: RunConfig, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("is not valid Unicode", where="--style", fix="give it as UTF-8") from None
    if problems := check_rules(cfg.with_values({KEY: text}, "--style")):
        raise ConfigErrors(problems)


def _print(args: Namespace, facts: dict[str, str | None]) -> None:
    if args.json:
        print(json.dumps(facts))
    elif args.style is None:
        log.say(f"{KEY} = {_shown(facts['system'])}, from {facts['origin']}", "style")
    else:
        log.say(f"{args.config} {KEY}: {_shown(facts['was'])} -> {_shown(facts['system'])}", "style")
        log.say(
            "train, inspect, eval and infer use it from the next run on; rows with a system message keep it", "style"
        )


def _shown(text: str | None) -> str:
    return "none" if text is None else json.dumps(text, ensure_ascii=False)
