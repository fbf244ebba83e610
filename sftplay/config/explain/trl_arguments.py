"""The arguments that TRL's SFTConfig takes, read from its source.

Nothing of TRL or transformers is imported, because that takes seconds.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SOURCES = (
    ("trl", "trainer/sft_config.py"),
    ("trl", "trainer/base_config.py"),
    ("transformers", "training_args.py"),
)


@cache
def sft_config_fields() -> frozenset[str] | None:
    """The names SFTConfig takes, inherited ones included; None where its source cannot be found or followed.

    None leaves the check to the run, where the library itself refuses what it does not know.
    """
    classes: dict[str, ast.ClassDef] = {}
    for package, file in _SOURCES:
        source = _source(package, file)
        if source is None:
            return None
        classes |= {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields: set[str] = set()
    waiting = ["SFTConfig"]
    while waiting:
        found = classes.get(waiting.pop())
        if found is None:
            return None
        fields |= _fields_of(found)
        waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return frozenset(fields)


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


def _fields_of(node: ast.ClassDef) -> set[str]:
    """The annotated names in a dataclass body that its constructor takes."""
    return {
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(line.annotation)
    }
