"""The verb `import-config`: a config of another kit becomes one of this kit; a table says what became of each field."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_new_file, write_text
from sftplay.errors import ConfigError

SHOWN = {"translated": "", "no_effect": "no effect", "auto": "auto", "not_offered": "NOT OFFERED"}


def import_config(args: Namespace) -> int:
    """`import-config`: write OUT, and print the table; a file that is there is never touched.

    A config that names a kind of training that is not offered is written too: `validate` refuses it, and says why.
    """
    out = Path(args.out)
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError("a config is a YAML file", where=str(out), fix="give it a name that ends in .yaml")
    check_new_file(out)
    from sftplay.config.kits.convert import import_config as convert

    made = convert(Path(args.input), args.kind or "", nproc=args.nproc, out=str(out))
    check_new_file(out)
    write_text(out, made.text)
    if args.json:
        problems = [problem.as_json() for problem in made.problems]
        print(json.dumps({"kind": made.kit.name, "fields": made.fields, "validates": not problems,
                          "config": str(out), "problems": problems}, ensure_ascii=False))  # fmt: skip
        return 0
    for line in _table(made.fields):
        log.show(line)
    counts = [f"{sum(one['verdict'] == name for one in made.fields)} {name.replace('_', ' ')}" for name in SHOWN]
    log.say(f"{made.kit.title}: {len(made.fields)} fields, {', '.join(counts)}", "import")
    for problem in made.problems:
        log.say(f"does not validate: {problem}", "import")
    log.say(f"{out} is written; its head says what is not the same", "import")
    return 0


def _table(fields: list[dict[str, Any]]) -> list[str]:
    width = min(48, max(len(one["key"]) for one in fields))
    lines = []
    for one in fields:
        became, word = one["became"] or "", SHOWN[one["verdict"]]
        said = ": ".join(filter(None, (" ".join(filter(None, (word, became))), one["why"])))
        value = json.dumps(one["value"], ensure_ascii=False)
        shown = value if len(value) <= 32 else f"{value[:29]}..."
        lines.append(f"{one['key']:<{width}} {shown:<32} {said}")
    return lines
