"""Private names of TRL and transformers: all that the kit uses are in one file, and the installed release has them."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import transformers.trainer
from packaging.specifiers import SpecifierSet

from sftplay.machine.doctor import RANGES
from sftplay.train.upstream import PRIVATE_NAMES, RELEASE, TRAINER, UTILITIES

PACKAGE = Path(__file__).parents[2] / "sftplay"
UPSTREAM = PACKAGE / "train" / "upstream.py"


def private_names_in(*modules: str) -> set[str]:
    text = "".join(inspect.getsource(import_module(module)) for module in modules)
    return set(re.findall(r"\b_[A-Za-z]\w*", text))


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in PRIVATE_NAMES for name in PRIVATE_NAMES[module]]
)
def test_the_installed_release_has_the_name(module: str, name: str):
    assert name in private_names_in(module)
    assert SpecifierSet(f">={RELEASE}").contains(version("trl"))


def names_used_in(path: Path, *kinds: type[ast.AST]) -> set[str]:
    """Attributes that a file reads or sets, and functions that it defines."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return {str(getattr(node, "attr", getattr(node, "name", ""))) for node in nodes}


def test_no_task_uses_another_private_name_of_trl():
    used = names_used_in(UPSTREAM, ast.Attribute)
    for path in (PACKAGE / "tasks").rglob("*.py"):
        used |= names_used_in(path, ast.Attribute, ast.FunctionDef)
    of_transformers = set(re.findall(r"\b_[A-Za-z]\w*", inspect.getsource(transformers.trainer)))
    of_trl = private_names_in(TRAINER, UTILITIES, "trl.trainer.sft_trainer") - of_transformers
    assert used & of_trl == {name for names in PRIVATE_NAMES.values() for name in names}


def test_private_names_that_no_class_overrides_stand_in_one_file():
    of_libraries = private_names_in(
        TRAINER, UTILITIES, "trl.generation.vllm_generation", "trl.kernels.chunked_logprob", "transformers.trainer",
        "transformers.training_args", "transformers.generation.utils", "transformers.configuration_utils",
    )  # fmt: skip
    ours = [*(PACKAGE / "train").glob("*.py"), *(PACKAGE / "tasks" / "grpo").glob("*.py")]
    defined = set().union(*(names_used_in(path, ast.FunctionDef) for path in ours))
    foreign = {path.name: names_used_in(path, ast.Attribute) & of_libraries - defined for path in ours}
    assert foreign.pop(UPSTREAM.name)
    assert {name: names for name, names in foreign.items() if names} == {}


def test_the_range_ends_before_releases_in_which_nobody_has_looked_for_these_names():
    assert not SpecifierSet(RANGES["trl"]).contains("1.18.0")
