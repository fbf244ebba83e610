"""The verbs about configs: check one, print the schema, print the manual."""

from __future__ import annotations

import json
from argparse import Namespace

from sftplay import log
from sftplay.config.rules.general import notes
from sftplay.config.rules.task_spec import find_spec
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


def schema(args: Namespace) -> int:
    """`schema`: the JSON schema of the whole config."""
    from sftplay.config.explain.manual import schema_text

    print(schema_text(), end="")
    return 0


def manual(args: Namespace) -> int:
    """`manual`: docs/config.md."""
    from sftplay.config.explain.manual import manual_text

    print(manual_text(), end="")
    return 0
