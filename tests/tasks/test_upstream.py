"""Private names of TRL, transformers and DeepSpeed: those in use stand in one file, and the libraries have them."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sftplay.machine.doctor import RANGES
from sftplay.train import upstream

PACKAGE = Path(__file__).parents[2] / "sftplay"
LIBRARIES = (
    "trl.trainer.grpo_trainer", "trl.trainer.utils", "trl.generation.vllm_generation", "trl.kernels.chunked_logprob",
    "transformers.trainer", "transformers.training_args", "transformers.generation.utils",
    "transformers.configuration_utils", "deepspeed.runtime.engine",
)  # fmt: skip


def private_names_in(text: str) -> set[str]:
    return set(re.findall(r"\b_[A-Za-z]\w*", text))


def names_used_in(path: Path, *kinds: type[ast.AST]) -> set[str]:
    """Attributes that a file reads or sets, and functions that it defines."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return {str(getattr(node, "attr", getattr(node, "name", ""))) for node in nodes}


def test_private_names_stand_in_one_file_and_the_installed_releases_have_them():
    sources = [Path(inspect.getfile(import_module(name))).read_text(encoding="utf-8") for name in LIBRARIES]
    of_libraries = private_names_in("".join(sources))
    own = Path(inspect.getfile(upstream))
    used = {name for name in names_used_in(own, ast.Attribute) if re.match("_[a-z]", name, re.I)}
    assert used | private_names_in(upstream.__doc__ or "") <= of_libraries
    ours = [*(PACKAGE / "train").glob("*.py"), *(PACKAGE / "tasks" / "grpo").glob("*.py")]
    defined = set().union(*(names_used_in(path, ast.FunctionDef) for path in ours))
    foreign = {path.name: names_used_in(path, ast.Attribute) & of_libraries - defined for path in ours if path != own}
    assert {name: names for name, names in foreign.items() if names} == {}


def test_the_range_ends_before_releases_in_which_nobody_has_looked_for_these_names():
    assert not SpecifierSet(RANGES["trl"]).contains("1.18.0")
