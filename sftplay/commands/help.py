"""The verb `help`: all that can be typed, for people and for programs. Python's standard library is enough for it."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay.cli import VERBS, WITHOUT_CONFIG, WITHOUT_JSON, find_flags, parse
from sftplay.errors import ConfigError
from sftplay.make_arguments import FOR_THE_ENVIRONMENT, list_settings, read_recipes
from sftplay.places import ROOT

EXIT_CODES = {
    "0": "done",
    "1": "a bug of the kit, with its traceback",
    "2": "the config or the command line; make turns every other failure into 2 too",
    "3": "the machine, or a run that will not fit",
    "4": "the data",
    "5": "the run, a check that failed, a full disk",
    "129, 130, 138, 143": "stopped by a signal with a full checkpoint: `resume` goes on",
}

OTHER_SETTINGS = {
    "ARGS": "config values a.b=c and further --flags of the verb, quoted as for a shell",
    "DEEPSPEED_CONFIG": "the config's key cluster.deepspeed",
    "EXTRAS": "optional parts to install, such as serve,harness",
    "INSTALLER": "uv or pip; else uv where there is one",
    "TORCH_INDEX": "index of torch: cpu, cu126, a URL, or default; else as the machine needs",
    "PYTHON": "the Python that .venv is made of; python3",
    "PY": "the Python that runs the kit; .venv/bin/python",
    "UNSLOTH_PY": "the Python that runs unsloth; .venv-unsloth/bin/python",
}
"""Settings of make behind which there is no flag, and what they mean."""

DOCUMENTS = "configs/verbs.schema.json"


def show_help(args: Namespace) -> int:
    """`help`: the list of verbs; as JSON the targets of make with their settings, the verbs with their flags, where the
    JSON of each is described, and the exit codes.
    """
    if args.overrides:
        raise ConfigError(f"help takes no {args.overrides[0]!r}", where="command line", fix="leave it out")
    if not args.json:
        parse(["--help"])
    usage = {
        "make": 'make TARGET [SETTING=value ...] [ARGS="a.b=c ... --flag"] [JSON=1]',
        "python": "python -m sftplay VERB [--config FILE] [a.b=c ...] [--flag] [--json]",
        "overrides": "a.b=c sets the config's key a.b for this call",
    }
    schemas = {"documents": f"{DOCUMENTS}, or `schema --verbs`", "config": "configs/schema.json, or `schema`"}
    document: dict[str, Any] = {"usage": usage, "guide": "AGENTS.md", "schemas": schemas, "exit_codes": EXIT_CODES}
    makefile = ROOT / "Makefile"
    if makefile.is_file():  # pip installs none
        recipes = read_recipes(makefile)
        flags = {setting: flag for flag, setting in _FLAG.findall("".join(recipes.values()))}
        document["settings"] = dict(sorted({**OTHER_SETTINGS, **flags}.items()))
        document["groups"] = list_targets(makefile, recipes)
    document["verbs"] = {verb: describe_verb(verb) for verb in VERBS}
    print(_in_lines(document, depth=3))
    return 0


def _in_lines(value: Any, *, depth: int) -> str:
    """Return the value as JSON that has a line for each target and each verb, for tools that search or cut lines."""
    if depth == 0 or not isinstance(value, dict) or ("help" in value and "flags" in value):
        return json.dumps(value)
    inner = ",\n".join(f"{json.dumps(key)}: {_in_lines(part, depth=depth - 1)}" for key, part in value.items())
    return f"{{\n{inner}\n}}"


_FLAG = re.compile(r"\$\(call \w+,([^,]+),([A-Z_]+)\)")


def list_targets(makefile: Path, recipes: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Group -> target -> its help, its settings, and the words of the verb behind it (none for another program)."""
    groups: dict[str, dict[str, Any]] = {}
    group = groups.setdefault("help", {})
    for line in makefile.read_text(encoding="utf-8").splitlines():
        if line.startswith("##@ "):
            group = groups.setdefault(line.removeprefix("##@ "), {})
        elif found := re.match(r"([a-z][a-z0-9-]*):.*?## (.*)", line):
            recipe = recipes[found[1]]
            called = re.search(r"-m sftplay ([a-z].*)", recipe)
            words = re.sub(r"\$\(call [^)]*\)|\S*\$\$\{[^}]*\}|--make-args=.*", "", called[1]).split() if called else []
            settings = list_settings(recipe)  # install's are those for the environment
            taken = sorted(settings - FOR_THE_ENVIRONMENT or settings)
            group[found[1]] = {"help": found[2], "verb": words, "settings": taken}
    return groups


def describe_verb(verb: str) -> dict[str, Any]:
    """What a verb does, whether it needs --config, where its JSON is described (null without any), and its flags."""
    flags = {}
    for flag, options in find_flags(verb).items():
        known = {key: options[key] for key in ("help", "default", "choices", "required") if options.get(key)}
        flags[flag] = {**known, **({"is_switch": True} if "action" in options else {})}
    documents = None if verb in WITHOUT_JSON else f"{DOCUMENTS}#/verbs/{verb}"
    return {"help": VERBS[verb][1], "needs_config": verb not in WITHOUT_CONFIG, "json": documents, "flags": flags}
