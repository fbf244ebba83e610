"""Private names of TRL: all that the tasks use are written down, and the installed release has them."""

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

from sftplay.machine.doctor.install import RANGES
from sftplay.train.upstream import PRIVATE_NAMES, TRAINER, UTILITIES

TASKS = Path(__file__).parents[2] / "sftplay" / "tasks"


def private_names_in(*modules: str) -> set[str]:
    text = "".join(inspect.getsource(import_module(module)) for module in modules)
    return set(re.findall(r"\b_[A-Za-z]\w*", text))


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_installed_release_has_the_name(name: str):
    module, release = PRIVATE_NAMES[name]
    assert name in private_names_in(module)
    assert SpecifierSet(f">={release}").contains(version("trl"))


def test_no_task_uses_another_private_name_of_trl():
    used = set()
    for path in TASKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used |= {node.attr} if isinstance(node, ast.Attribute) else set()
            used |= {node.name} if isinstance(node, ast.FunctionDef) else set()
    of_transformers = set(re.findall(r"\b_[A-Za-z]\w*", inspect.getsource(transformers.trainer)))
    of_trl = private_names_in(TRAINER, UTILITIES, "trl.trainer.sft_trainer") - of_transformers
    assert used & of_trl == set(PRIVATE_NAMES)


def test_the_range_ends_before_releases_in_which_nobody_has_looked_for_these_names():
    assert not SpecifierSet(RANGES["trl"]).contains("1.18.0")
