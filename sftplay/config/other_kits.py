"""Keys of other kits and of TRL, with the key of ours that does it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sftplay.config.keys import all_homes
from sftplay.config.layers import SPELLINGS, KeyPath


@dataclass(frozen=True)
class ForeignKeys:
    """The tables of other_kits.yaml."""

    names: dict[str, str]  # name in another kit -> what to write here, the key first
    groups: dict[str, str]  # start of the name of an argument of TRL -> the key that decides this group of arguments
    without_key: dict[str, str]  # argument of TRL's configs that no key here decides -> why it cannot be given
    without_meaning: dict[str, str]  # argument of TRL's GRPOConfig -> why it cannot be given where a run samples
    guides: dict[str, dict[str, str]]  # section of a guide -> its keys -> what to write here, the key first
    cluster: dict[str, str]  # key below `cluster` as guides for Ray and NeMo RL write it -> what to do here
    choices: dict[str, dict[str, tuple[str, str]]]  # key -> word -> why it is no choice here, and what to write


@cache
def read_foreign_keys() -> ForeignKeys:
    """Read the tables. Only a config with an unknown name, or with an argument of TRL, needs them."""
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for table in ("names", "without_key", "without_meaning"):
        tables[table] = {name: answer for answer, names in tables[table].items() for name in names.split()}
    return ForeignKeys(**tables)


def keys_below(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the keys of a section of a guide, each to be answered by itself; any other unknown name is one key."""
    known = read_foreign_keys().guides.get(str(path[0]))
    if known is None or action_for(path) or not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from keys_below((*path, str(name)), inner)


def action_for(path: KeyPath) -> str:
    """Return what to write instead of a key of a guide; empty for any other name."""
    return read_foreign_keys().guides.get(str(path[0]), {}).get(".".join(map(str, path[1:])), "")


class Answer(NamedTuple):
    """Why an argument of TRL cannot be given in `train.extra` or `grpo.extra`, and what to do."""

    key: str  # the key that decides it; empty when there is none
    what: str
    fix: str


def find_key(action: str) -> str:
    """Return the key at the start of what to write."""
    return re.split(r"[^\w.]", action, maxsplit=1)[0]


def kit_answer(name: str, *, samples: bool = False, section: str = "") -> Answer | None:
    """Answer an argument of TRL's SFTConfig, or of its GRPOConfig where a run `samples` completions; None when it
    may be given. `section` is the one of the run's task."""
    foreign = read_foreign_keys()
    if reason := foreign.without_key.get(name) or (foreign.without_meaning.get(name) if samples else None):
        return Answer("", reason, "remove it")
    sections = ("grpo" if samples else section, "", "train", "model")
    actions = [key for key in all_homes().get(name, []) if key.rpartition(".")[0] in sections]
    if name == "loss_type" and not samples:  # in GRPOConfig it is something else
        actions += ["preference.loss" if section == "preference" else "train.loss_head"]
    actions += ["train.precision"] if name in SPELLINGS else []
    actions += [foreign.names[name]] if name in foreign.names else []
    actions += [key for start, key in foreign.groups.items() if name.startswith(start)]
    if actions:
        key = find_key(actions[0])
        return Answer(key, f"the kit sets it from {key}", f"write {actions[0]}")
    return Answer("", foreign.without_key["deepspeed"], "remove it") if name.startswith("ddp_") else None


_FILES = {
    "SFTConfig": ("trl", "trainer/sft_config.py"),
    "GRPOConfig": ("trl", "trainer/grpo_config.py"),
    "TrainingArguments": ("transformers", "training_args.py"),
}
"""Class -> its package, and its file there."""

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "dict": ((dict,), "keys with values"),
    "list": ((list,), "a list"),
    "None": ((type(None),), "null"),
}  # fmt: skip
"""Word of an annotation -> the types it stands for, and how they are called."""


def config_fields(kind: str) -> frozenset[str] | None:
    """Read the names that the config `kind` takes, inherited ones too; None where its source cannot be read.

    None leaves the check to the run, where the library itself refuses what it does not know.
    """
    kinds = config_kinds(kind)
    return None if kinds is None else frozenset(kinds)


def describe_config(kind: str) -> str:
    """Return how people call the config `kind`."""
    return f"{'TRL' if _FILES[kind][0] == 'trl' else 'the Trainer'}'s {kind}"


def unfit(kind: str, name: str, *, value: object) -> str:
    """What the field `name` of the config `kind` takes, in words, where `value` is no such thing; empty where it may be
    right."""
    words = (config_kinds(kind) or {}).get(name, ())
    if any(word not in _KINDS for word in words):
        return ""
    fitting = [word for word in words if word == "bool" or not isinstance(value, bool)]
    is_fit = any(isinstance(value, _KINDS[word][0]) for word in fitting)
    return "" if is_fit else " or ".join(_KINDS[word][1] for word in words)


@cache
def config_kinds(kind: str) -> dict[str, tuple[str, ...]] | None:
    """Field -> the words of its annotation, `dict[str, Any] | None` as dict and None."""
    classes: dict[str, ast.ClassDef] = {}
    bases = (("trl", "trainer/base_config.py"), ("transformers", "training_args.py"))
    for package, file in (_FILES[kind], *bases):
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):
            return None
        paths = [Path(folder, file) for folder in spec.submodule_search_locations or ()] if spec else []
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        body = ast.parse(path.read_text(encoding="utf-8")).body
        classes |= {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    fields: dict[str, tuple[str, ...]] = {}
    waiting = [kind]
    while waiting:
        found = classes.get(waiting.pop())
        if found is None:
            return None
        # The annotated names that the dataclass's constructor takes.
        fields = {
            line.target.id: tuple(word.partition("[")[0] for word in ast.unparse(line.annotation).split(" | "))
            for line in found.body
            if isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and not line.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(line.annotation)
        } | fields
        waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return fields
