"""A config of another kit becomes one of this kit: each of its leaves is translated or answered by name."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from sftplay.config.commented import join_sections, print_on_one_line, write_sections
from sftplay.config.keys import general_key
from sftplay.config.kits.conversions import follow
from sftplay.config.kits.table import (
    EMPTY,
    Answer,
    Foreign,
    Kit,
    Leaf,
    is_off,
    read_kits,
)
from sftplay.config.layers import walk
from sftplay.config.load import examine_config
from sftplay.config.resolved import flow
from sftplay.errors import ConfigError, nearest_names, suggest, without_secrets

MOST_LEAVES = 10_000
OPEN = re.compile(r"\$\{[\w.:,/-]+\}")
SECRET = re.compile(r"(api_key|hub_token|auth_token|secret|password)$")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The config that was made, and what became of each leaf."""

    kit: Kit
    fields: list[dict[str, Any]]
    text: str
    problems: list[ConfigError]
    """Why the config does not validate; empty where it does."""


def import_config(path: Path, kind: str = "", *, nproc: int = 1, out: str = "run.yaml") -> Imported:
    """Return the config of another kit as one of this kit, for `nproc` GPUs.
    Raise ConfigError where the file cannot be read, is no mapping, or is of no kit that has a table.
    """
    tree = read_tree(path)
    foreign = Foreign(tree, find_kit(tree, kind, where=str(path)), path.parent, nproc)
    leaves = [Leaf(key, value) for key, value in list_leaves(tree)]
    answered = [(leaf, find_answer(leaf, foreign)) for leaf in [*leaves, *_silent(foreign, leaves)]]
    text, problems, lines = "", list[ConfigError](), dict[str, tuple[Any, str]]()
    for _ in range(len(answered)):
        lines = _find_lines(answered, foreign.kit)
        text = _write(lines, answered, foreign.kit, path=path, nproc=nproc)
        with tempfile.TemporaryDirectory(prefix="sftplay-import-") as folder:
            draft = Path(folder) / "run.yaml"
            draft.write_text(text, encoding="utf-8")
            problems = examine_config(draft)[1]
        reasons = {problem.where.rpartition(" ")[2]: problem for problem in problems}
        settled = [(leaf, _without_refused(answer, reasons)) for leaf, answer in answered]
        if settled == answered:
            for problem in problems:
                problem.where = problem.where.replace(str(draft), out)
            break
        answered = settled
    given = ((leaf, _as_decided(answer, lines)) for leaf, answer in answered if not leaf.is_default)
    fields = [
        {"key": leaf.key, "value": _hidden(leaf), "became": answer.became, "verdict": answer.verdict, "why": answer.why}
        for leaf, answer in given
    ]
    return Imported(kit=foreign.kit, fields=fields, text=text, problems=problems)


NEEDED = ("model.name", "task_mode", "data.train_path", "datasets")


def _without_refused(answer: Answer, reasons: Mapping[str, ConfigError]) -> Answer:
    """The answer without a value that this kit's own rules refuse. Several data sets go as a whole where the task reads
    one: a run of the first would not be the same."""
    if "datasets" in answer.values and "datasets" in reasons:
        mixed = ("datasets", "cpt.weights_of", "task_mode")
        answer = replace(answer, values={key: value for key, value in answer.values.items() if key not in mixed})
        if answer.became != "datasets":
            return answer
        why = "this task reads one: put the rows of all into one file or folder, and name it with data.train_path"
        return replace(answer, verdict="not_offered", became=None, why=why, refuses=True)
    blamed = {key: next((at for at in reasons if f"{at}.".startswith(f"{key}.")), None) for key in answer.values}
    refused = {key: reasons[at] for key, at in blamed.items() if at and key not in NEEDED}
    if not refused:
        return answer
    why = f"refused here: {next(iter(refused.values())).what.replace(chr(10), ' ')}"
    values = {key: value for key, value in answer.values.items() if key not in refused}
    became = None if answer.became in refused else answer.became
    return replace(answer, verdict="not_offered", became=became, why=why, values=values)


def _as_decided(answer: Answer, lines: Mapping[str, tuple[Any, str]]) -> Answer:
    """The answer, or that another key of the file has decided what this one would be."""
    became = answer.became or ""
    if answer.verdict != "translated" or became not in answer.values or lines[became][0] == answer.values[became]:
        return answer
    return Answer("no_effect", None, f"{became} is {flow(lines[became][0])} by another key")


def _find_lines(answered: Sequence[tuple[Leaf, Answer]], kit: Kit) -> dict[str, tuple[Any, str]]:
    """Key -> value and comment. The first leaf with a value decides, a refused kind of training before all, and what a
    leaf became before what comes with it. That several data sets are mixed decides the task last."""
    lines: dict[str, tuple[Any, str]] = {}
    first = sorted(answered, key=lambda pair: not pair[1].refuses)
    for leaf, answer in first:
        name = f"{kit.title}'s default of {leaf.key}" if leaf.is_default else f"{kit.title}: {leaf.key}"
        if answer.became and answer.became in answer.values:
            said = f"; {answer.why}" if answer.why else ""
            lines.setdefault(answer.became, (answer.values[answer.became], f"{name} {_shown(leaf)}{said}"))
    for leaf, answer in sorted(first, key=lambda pair: "datasets" in pair[1].values):
        for key, value in answer.values.items():
            lines.setdefault(key, (value, f"by {leaf.key} {_shown(leaf)}"))
    return lines


def _write(
    lines: Mapping[str, tuple[Any, str]], answered: Sequence[tuple[Leaf, Answer]], kit: Kit, *, path: Path, nproc: int
) -> str:
    """The text of the config, with what is not the same at its head."""
    notes, refusals = [], []
    for leaf, answer in answered:
        note = f"{'default of ' if leaf.is_default else ''}{leaf.key}: {_shown(leaf)} - {answer.why}"
        if answer.refuses:
            refusals.append(note)
        elif answer.verdict == "not_offered" or answer.differs:
            notes.append(note)
    gpus = f"{nproc} GPU" + ("s" if nproc > 1 else "")
    name = print_on_one_line(path.name)
    head = [
        f"# Made by `sftplay import-config` on {time.strftime('%Y-%m-%d')} from {kit.title}'s {name}.",
        "# Every other key and its default: `sftplay manual`. Next: validate, inspect, plan, train.",
        f"# A step has the rows of {gpus}: other kits multiply them by their GPUs, here NPROC= says how many.",
        *(["#", "# NOT OFFERED, so `validate` refuses this config and nothing trains:"] if refusals else []),
        *(f"# - {print_on_one_line(text)}" for text in refusals),
        *(["#", "# Not the same as there:"] if notes else []),
        *(f"# - {print_on_one_line(text)}" for text in notes),
    ]
    return join_sections(head, write_sections(lines))


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file as other kits do. Raise ConfigError where it is no mapping with text for keys."""
    if path.suffix == ".sh":
        fix = "write its flags as YAML, `--lora_rank 8` as `lora_rank: 8`; or name what the kit has written of a run:"
        fix += " args.json in ms-swift's output folder, .hydra/config.yaml in the folder of verl's run"
        raise ConfigError("is a shell script, which is not run", where=str(path), fix=fix)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=str(path), fix="name the config with IN=FILE") from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), fix="name a text file in UTF-8") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"is not YAML: {what}", where=where, fix="correct the file there") from None
    try:  # aliases can make a small file endless
        is_endless = len(list(islice(walk(tree), 10 * MOST_LEAVES + 1))) > 10 * MOST_LEAVES
        is_endless = is_endless or len(list(islice(list_leaves(tree), MOST_LEAVES + 1))) > MOST_LEAVES
        tree = None if is_endless else _plain(tree)
    except RecursionError:
        is_endless = True
    if is_endless:
        raise ConfigError("its aliases lead round in a circle, or to no end", where=str(path), fix="write them out")
    if not isinstance(tree, dict) or not tree:
        raise ConfigError("holds no keys with values", where=str(path), fix="name a YAML config with IN=FILE")
    return tree


def _plain(value: Any) -> Any:
    """The value with texts for keys, and for what JSON does not know, such as dates; a text that says true is true."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value if value is None or isinstance(value, int | float) else str(value)


def find_kit(tree: Mapping[str, Any], kind: str, *, where: str) -> Kit:
    """Return the kit of that kind, else the one that has a mark in the file and knows most of its keys.
    Raise ConfigError where there is none.
    """
    kits = read_kits()
    if kind and kind not in kits:
        fix, near = suggest(kind, kits, f"write one of {', '.join(kits)}")
        raise ConfigError(f"no kit called {kind!r} has a table", where="--kind (KIND=)", fix=fix, nearest=near)
    if kind:
        return kits[kind]
    names = {general_key(key) for key, _ in list_leaves(tree)}
    names |= {name.rsplit(".", cut)[0] for name in names for cut in range(1, name.count(".") + 1)}

    def count_known(kit: Kit) -> int:
        return sum(kit.find(name) is not None for name in names)

    marked = [kit for kit in kits.values() if names & set(kit.marks.split())]
    if not marked:
        what = f"is no config of {', '.join(kit.title for kit in kits.values())}: it has none of the keys that tell"
        fix = f"name the kit with KIND=: {', '.join(kits)}"
        if "distributed_type" in tree:
            fix = "it is accelerate's and says nothing of a model or data: import the training's own config, and start "
            fix += "that with make train-distributed, which needs no file of accelerate"
        raise ConfigError(what, where=where, fix=fix)
    return max(marked, key=count_known)


def list_leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf: what is neither a mapping nor a list with a mapping in it, or is
    empty."""
    holds_more = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if holds_more else ()
    if not pairs or not value:
        yield prefix, value
        return
    for name, inner in pairs:
        yield from list_leaves(inner, f"{prefix}.{name}" if prefix else str(name))


def _silent(foreign: Foreign, leaves: list[Leaf]) -> Iterator[Leaf]:
    """The defaults of the kit that the file says nothing of."""
    given = {general_key(leaf.key) for leaf in leaves if leaf.value is not None}
    given |= {foreign.kit.aliases[name] for name in given & set(foreign.kit.aliases)}
    for key, value in foreign.kit.defaults.items():
        lead = foreign.kit.lead(key)
        if not any(f"{name}.".startswith(f"{key}.") for name in given) and (not lead or foreign.is_on(lead)):
            yield Leaf(key, value, is_default=True)


def _hidden(leaf: Leaf) -> Any:
    if isinstance(leaf.value, list):
        return [_hidden(leaf._replace(value=one)) for one in leaf.value]
    if isinstance(leaf.value, str) and leaf.value and SECRET.search(leaf.key):
        return "(hidden)"
    if isinstance(leaf.value, float) and not math.isfinite(leaf.value):
        return str(leaf.value)  # JSON has no such number
    return without_secrets(leaf.value) if isinstance(leaf.value, str) else leaf.value


def _shown(leaf: Leaf) -> str:
    text = flow(_hidden(leaf))
    return text if len(text) <= 70 else f"{text[:67]}..."


def find_answer(leaf: Leaf, foreign: Foreign) -> Answer:
    """Return what becomes of a leaf."""
    kit, key = foreign.kit, general_key(leaf.key)
    if key in kit.aliases:
        key = kit.aliases[key]
        leaf = leaf._replace(key=key)
    found, lead = kit.find(key), kit.lead(key)
    if found is None:
        near = nearest_names(key, kit.answers)
        guess = f"; did you mean {near[0]}?" if near else ""
        return Answer("not_offered", None, f"this key is not known of {kit.title}{guess}")
    if lead and not foreign.is_on(lead):
        name, _, wanted = lead.partition("=")
        return Answer("no_effect", None, f"only where {name} is {wanted.replace(',', ' or ') or 'on'}")
    if leaf.value is None:
        default = kit.defaults.get(key)
        return Answer("no_effect", None, "empty" if default is None else f"empty: {kit.title} takes {flow(default)}")
    if leaf.value == "???":
        return Answer("not_offered", None, "the value is missing, as ??? says: write it")
    part, rule = found
    if found == EMPTY and not is_off(kit, key, leaf.value):
        return Answer("not_offered", None, f"is no block of keys, as {kit.title} has it here")
    if part == "rules":
        answer = follow(leaf, rule if isinstance(rule, Mapping) else {"to": rule}, foreign)
        if any(isinstance(value, str) and OPEN.search(value) for value in answer.values.values()):
            why = "; ".join(filter(None, (answer.why, "${...} is not replaced here: write its value")))
            answer = replace(answer, why=why, differs=True)
        has_value = answer.verdict != "not_offered" or answer.values
        return answer if has_value else replace(answer, became=None)
    if part == "not_offered" and is_off(kit, key, leaf.value):
        return Answer("no_effect", None, "it is off, as it is here")
    became, _, why = rule.partition(": ") if part == "auto" else (None, "", rule)
    return Answer(part, became, why)  # type: ignore[arg-type]
