"""The arguments that TRL's SFTConfig and GRPOConfig take, read from their source.

Nothing of TRL or transformers is imported, because that takes seconds.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SOURCES = (("trl", "trainer/base_config.py"), ("transformers", "training_args.py"))

_FILES = {"SFTConfig": "trainer/sft_config.py", "GRPOConfig": "trainer/grpo_config.py"}
"""Class -> its file in the package trl."""

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "dict": ((dict,), "keys with values"),
    "list": ((list,), "a list"),
    "None": ((type(None),), "null"),
}
"""Word of an annotation -> the types it stands for, and how they are called."""


def config_fields(kind: str) -> frozenset[str] | None:
    """The names that the config `kind` of TRL takes, inherited ones too; None where its source cannot be found or read.

    None leaves the check to the run, where the library itself refuses what it does not know.
    """
    kinds = config_kinds(kind)
    return None if kinds is None else frozenset(kinds)


def unfit(kind: str, name: str, *, value: object) -> str:
    """What the field `name` of the config `kind` takes, in words, where `value` is no such thing; empty where it may be
    right."""
    words = (config_kinds(kind) or {}).get(name, ())
    if any(word not in _KINDS for word in words):
        return ""
    for word in words:
        if isinstance(value, _KINDS[word][0]) and (word == "bool" or not isinstance(value, bool)):
            return ""
    return " or ".join(_KINDS[word][1] for word in words)


@cache
def config_kinds(kind: str) -> dict[str, tuple[str, ...]] | None:
    """Field -> the words of its annotation, `dict[str, Any] | None` as dict and None."""
    classes: dict[str, ast.ClassDef] = {}
    for package, file in (("trl", _FILES[kind]), *_SOURCES):
        source = _source(package, file)
        if source is None:
            return None
        classes |= {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields: dict[str, tuple[str, ...]] = {}
    waiting = [kind]
    while waiting:
        found = classes.get(waiting.pop())
        if found is None:
            return None
        fields = _fields_of(found) | fields
        waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return fields


def _source(package: str, file: str) -> str | None:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, file)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def _fields_of(node: ast.ClassDef) -> dict[str, tuple[str, ...]]:
    """The annotated names in a dataclass body that its constructor takes."""
    return {
        line.target.id: tuple(word.partition("[")[0] for word in ast.unparse(line.annotation).split(" | "))
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(line.annotation)
    }
