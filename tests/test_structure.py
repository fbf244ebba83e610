"""The house as docs/architecture.md draws it: floors, sizes, and the documents that name what exists."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import architecture  # noqa: E402
from architecture import MODULES, floor_of, imports_of, room_of, subject_of  # noqa: E402

TOP = max(architecture.FLOORS)
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def test_a_module_imports_only_from_lower_floors_or_from_its_own_top_folder():
    wrong = [
        f"{module} (floor {floor_of(module)}) imports {name} (floor {floor_of(name)})"
        for module in MODULES
        for name in imports_of(module)
        if floor_of(name) > floor_of(module)
        or (floor_of(name) == floor_of(module) not in (0, TOP) and subject_of(name) != subject_of(module))
    ]
    assert wrong == []


def test_neither_modules_nor_folders_import_each_other_in_a_circle():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()
    rooms: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for module in MODULES:
        rooms.setdefault(room_of(module), set()).update(map(room_of, imports_of(module)))
    TopologicalSorter({room: beside - {room} for room, beside in rooms.items()}).prepare()


def test_no_module_gives_two_things_one_name():
    twice = [
        f"{module}: {name}"
        for module in MODULES
        for name, count in Counter(_names_given(tree_of(module).body)).items()
        if count > 1
    ]
    assert twice == []


def _names_given(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and not statement.decorator_list:
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (
                node.id
                for target in statement.targets
                for node in ast.walk(target)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def test_the_architecture_page_is_the_one_drawn_from_the_code():
    assert architecture.PAGE.read_text(encoding="utf-8") == architecture.page(), "run `make architecture`"
    assert architecture.README.read_text(encoding="utf-8") == architecture.readme(), "run `make architecture`"


SERVE_EACH = """
import importlib, json, os, sys
lines, first = map(json.loads, sys.argv[1:])
for module in first:
    importlib.import_module(module)
for words in lines:
    child = os.fork()
    if child == 0:
        from sftplay.cli import main
        try:
            main(words)
        except SystemExit:
            pass
        print("\\nLOADED", *{name.split(".")[0] for name in sys.modules}, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def loaded_after(lines: list[list[str]], first: list[str]) -> dict[str, set[str]]:
    """Top-level modules in memory when a command line has been served, each in a process forked from one that has
    imported the modules of `first` only."""
    argv = [sys.executable, "-c", SERVE_EACH, json.dumps(lines), json.dumps(first)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.findall(r"^LOADED (.*)", done.stdout, re.M)
    assert len(found) == len(lines), done.stdout + done.stderr
    return {" ".join(words): set(names.split()) for words, names in zip(lines, found)}


def test_help_and_gpu_info_import_neither_torch_nor_pydantic():
    lines = [["--help"], ["train", "--help"], ["gpu-info"], ["trian"], ["memory-check"], ["doctor", "--fast"]]
    unwanted = {*HEAVY, "pydantic", "yaml", "numpy"}
    assert {line: found for line, names in loaded_after(lines, []).items() if (found := names & unwanted)} == {}


REFUSED_OR_DRY = """\
validate
train --dry-run --nproc 2
train train.learning_rat=1
train model.name=/nowhere
process data.train_path=nowhere.jsonl
inspect data.format=sharegpt
render --out README.md
style
eval output_dir=/nowhere
infer output_dir=/nowhere
lm-eval --tasks x output_dir=/nowhere
infer-batch --in x --out y output_dir=/nowhere
resume output_dir=/nowhere
report output_dir=/nowhere
merge output_dir=/nowhere
serve output_dir=/nowhere
sweep --grid train.learning_rat=1
compare --a nowhere --b nowhere
"""


def test_validate_a_dry_run_and_refusals_import_no_torch():
    words = [line.split() for line in REFUSED_OR_DRY.splitlines()]
    lines = [[verb, "--config", "configs/run_demo.yaml", *rest] for verb, *rest in words]
    loaded = loaded_after(lines, ["sftplay.config.load"])
    assert all({"pydantic", "sftplay"} <= names for names in loaded.values())
    assert {line: found for line, names in loaded.items() if (found := names & {*HEAVY})} == {}


def test_the_trunk_compares_no_task_mode_and_imports_no_task():
    """Tasks are asked for what is theirs; `sftplay.tasks` is the table, which imports none."""
    trunk = [name for name in MODULES if not name.startswith("sftplay.tasks")]
    nodes = [node for name in trunk for node in ast.walk(tree_of(name))]
    compared = [[node.left, *node.comparators] for node in nodes if isinstance(node, ast.Compare)]
    named = [any(getattr(side, "attr", getattr(side, "id", "")) == "task_mode" for side in each) for each in compared]
    assert sum(named) == 0
    assert [name for name in trunk if any(one.startswith("sftplay.tasks.") for one in imports_of(name))] == []


def test_each_promise_of_readme_is_held_by_contract_tests():
    """About 300 tests go through make, the command line or a run's files; a change inside leaves them as they are."""
    marked = {
        path: path.read_text(encoding="utf-8").count("mark.contract") for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert sum(marked.values()) > 250
    promises = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it promises")[2].partition("##")[0]
    held = re.findall(r"\((tests/[\w/]+\.py)\)", promises)
    assert len(held) >= 8
    assert [name for name in held if not marked[ROOT / name]] == []


def test_every_target_has_a_help_text_and_is_listed():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  ([a-z][a-z0-9-]*)  +\S", shown, re.M)
    assert sorted(listed) == sorted(TARGETS)


def test_every_target_passes_a_dry_make():
    done = subprocess.run(["make", "-n", *TARGETS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"warning|\*\*\*", done.stderr)


def test_every_test_that_the_page_of_attacks_names_exists():
    named = set(re.findall(r"\b(test_\w+)`", (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    written = {name for text in files for name in re.findall(r"^ *def (test_\w+)", text, re.M)}
    assert named <= written
    assert len(named) > 20


def test_the_page_of_targets_names_them_all():
    named = re.findall(r"`make ([a-z][a-z0-9-]+)`", (ROOT / "docs" / "targets.md").read_text(encoding="utf-8"))
    assert set(named) == set(TARGETS)
