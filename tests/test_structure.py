"""The house as docs/architecture.md draws it: floors, sizes, and the documents that name what exists."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from processes import HANG_S

from sftplay.cli import VERBS
from sftplay.config.load import load_config
from sftplay.machine.probe import Machine
from sftplay.plan.sizing import size_run

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


def find_cycle(imports: Mapping[Any, Iterable[Any]]) -> list[Any]:
    """A chain of imports that leads back to where it began; empty when there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as found:
        return found.args[1][::-1]
    return []


def test_no_two_files_of_tests_share_a_name_and_none_imports_a_conftest():
    """pytest imports each by its bare name: of two, one would hide the other."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert [name for name, n in Counter(path.name for path in files).items() if n > 1] == []
    assert [str(path) for path in files if re.search(r"^(from|import) conftest\b", path.read_text(), re.M)] == []


def test_a_module_imports_only_from_lower_floors_or_from_its_own_top_folder():
    wrong = [
        f"{module} (floor {floor_of(module)}) imports {name} (floor {floor_of(name)})"
        for module in MODULES
        for name in imports_of(module)
        if floor_of(name) > floor_of(module)
        or (floor_of(name) == floor_of(module) not in (0, TOP) and subject_of(name) != subject_of(module))
    ]
    assert wrong == []


def test_modules_do_not_import_each_other_in_a_circle():
    assert find_cycle({module: imports_of(module) for module in MODULES}) == []


def test_folders_do_not_import_each_other_in_a_circle():
    rooms: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for module in MODULES:
        rooms.setdefault(room_of(module), set()).update(map(room_of, imports_of(module)))
    assert find_cycle({room: beside - {room} for room, beside in rooms.items()}) == []


def test_the_architecture_page_is_the_one_drawn_from_the_code():
    assert architecture.PAGE.read_text(encoding="utf-8") == architecture.page(), "run `make architecture`"
    assert architecture.README.read_text(encoding="utf-8") == architecture.readme(), "run `make architecture`"


IMPORT_ONE_AFTER_ANOTHER = """
import importlib, sys, traceback, warnings
warnings.simplefilter("ignore")
failed = 0
for module in sys.argv[1].split():
    before = set(sys.modules)
    try:
        importlib.import_module(module)
    except BaseException:
        failed += 1
        sys.stderr.write(f"{module}: {traceback.format_exc()}")
    own = {name for name in set(sys.modules) - before if name.split(".")[0] == "sftplay"}
    folders = {module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)}
    if extra := own - {module, *folders}:
        failed += 1
        sys.stderr.write(f"{module} imports {sorted(extra)}, which the search did not see")
sys.exit(bool(failed))
"""


def test_every_module_imports_alone():
    # Imported behind exactly what it imports itself, a module can lean on nothing else: there are no circles, and a
    # name of another module can only be had by importing it from there.
    for name in MODULES:
        plain = [alias.name for node in ast.walk(tree_of(name)) if isinstance(node, ast.Import) for alias in node.names]
        assert not [each for each in plain if each.split(".")[0] == "sftplay"], f"{name}: write from ... import"
    imports = {module: sorted(imports_of(module)) for module in MODULES}
    imports["sftplay.config.run"] += [name for name in MODULES if re.fullmatch(r"sftplay\.tasks\.\w+\.section", name)]
    in_order = TopologicalSorter(imports).static_order()
    names = " ".join(module for module in in_order if module != "sftplay.__main__")
    argv = [sys.executable, "-c", IMPORT_ONE_AFTER_ANOTHER, names]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


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
train --dry-run
train --dry-run --nproc 2
train train.learning_rat=1
train data.train_path=nowhere.jsonl
train model.name=/nowhere
train --nproc 0
train train.batch_size=5
process data.train_path=nowhere.jsonl
inspect data.train_path=nowhere.jsonl
inspect data.format=sharegpt
render --out README.md
style
eval output_dir=/nowhere
infer output_dir=/nowhere
infer-batch --in x --out y output_dir=/nowhere
resume output_dir=/nowhere
report output_dir=/nowhere
merge output_dir=/nowhere
serve output_dir=/nowhere
compare --a nowhere --b nowhere
"""


def test_validate_a_dry_run_and_refusals_import_no_torch():
    words = [line.split() for line in REFUSED_OR_DRY.splitlines()]
    lines = [[verb, "--config", "configs/run_demo.yaml", *rest] for verb, *rest in words]
    loaded = loaded_after(lines, ["sftplay.config.load"])
    assert all({"pydantic", "sftplay"} <= names for names in loaded.values())
    assert {line: found for line, names in loaded.items() if (found := names & {*HEAVY})} == {}


@cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    return [
        (f"{name}.{node.name}", node)
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.FunctionDef)
    ]


FOREIGN = {
    "__exit__": "the language's",
    "_begin": "ProcessPoolExecutor gives an initializer its arguments by position",
    "_calculate_rewards": "TRL's",
    "_mark_layers": "torch's forward hook",
    "_save_to_state_dict": "torch's",
    "compute_loss": "the Trainer's",
    "find_spec": "Python's import system",
    "resolve": "PyYAML's resolver",
    "training_step": "the Trainer's",
}
"""Functions whose arguments a library sets, beside the Trainer's callbacks (`on_...`), and which."""


def test_more_than_two_arguments_are_given_by_name():
    def count(function: ast.FunctionDef) -> int:
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        return len([name for name in names if name not in ("self", "cls")])

    many = {name for name, function in functions() if count(function) > 2}
    own = {name for name in many if not name.rsplit(".", 1)[-1].startswith("on_")}
    assert {name for name in own if name.rsplit(".", 1)[-1] not in FOREIGN} == set()


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


def test_every_module_says_in_a_sentence_what_it_is():
    assert [name for name in MODULES if not ast.get_docstring(tree_of(name))] == []


def test_no_module_has_a_name_that_says_nothing():
    empty_words = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager", "core"}
    assert [name for name in MODULES if name.rsplit(".", 1)[-1] in empty_words] == []


def test_every_verb_has_its_function():
    for verb, (place, text) in VERBS.items():
        module, _, function = place.rpartition(".")
        folder = "" if module.startswith("tasks.") else "commands."
        tree = tree_of(f"sftplay.{folder}{module}")
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert function in names, verb
        assert text, verb


def test_every_target_has_a_help_text_and_is_listed():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  ([a-z][a-z0-9-]*)  +\S", shown, re.M)
    assert sorted(listed) == sorted(TARGETS)


def test_every_target_is_phony_so_that_a_file_of_its_name_does_no_harm():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    phony = {word for line in re.findall(r"^\.PHONY:(.*)", text, re.M) for word in line.split()}
    assert set(TARGETS) <= phony


def test_every_target_passes_a_dry_make():
    done = subprocess.run(["make", "-n", *TARGETS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"warning|\*\*\*", done.stderr)


def test_every_target_that_starts_the_kit_names_a_verb_that_exists():
    text = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"^\t@\$\(SFTPLAY\) ([a-z-]+)", text, re.M)) <= set(VERBS)
    assert "\t@$(SFTPLAY) train " in text


def test_every_test_that_the_page_of_attacks_names_exists():
    named = set(re.findall(r"\b(test_\w+)`", (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    written = {name for text in files for name in re.findall(r"^ *def (test_\w+)", text, re.M)}
    assert named <= written
    assert len(named) > 20


def test_the_page_of_targets_names_them_all():
    named = re.findall(r"`make ([a-z][a-z0-9-]+)`", (ROOT / "docs" / "targets.md").read_text(encoding="utf-8"))
    assert set(named) == set(TARGETS)


MACHINE = Machine(
    gpus=(), gpu_reason="none in this test", ram_bytes=2**34, cores=2, python="3.11", system="Linux", libraries={}
)
RUNS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.name != "config_base.yaml"]


def test_every_shipped_config_is_sized_to_its_exact_effective_batch(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in RUNS:
        cfg = load_config(path.relative_to(ROOT))
        train = size_run(cfg, MACHINE, world_size=2).cfg.train
        assert train.batch_size * train.grad_accum * 2 == cfg.train.effective_batch_size, path.name


def test_the_version_stands_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", importlib.import_module("sftplay").__version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r'^version = "', project, re.M)
