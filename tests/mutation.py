"""Puts small faults into the kit, one at a time, and counts how many the fast tests notice.

    .venv/bin/python tests/mutation.py --count 40 --folder train plan data/render reward runs

Run by hand; the outcome goes to docs/evidence.md. A fault changes one operator, constant, negation or return inside a
function. One run of the fast tests says which of them execute which fault's statement. Then each fault is put into a
copy of the repository, and these tests run up to the first failure; those that fail without a fault are left out.

    .venv/bin/python tests/mutation.py --keys

gives each key that tests/test_every_key.py leaves to another file its default, whatever a config says, and runs that
file. Not seen so are required keys, and keys that are read as part of a whole section.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, repeat
from multiprocessing import Queue
from pathlib import Path
from typing import Any, get_args

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900.0
"""A fault that makes the tests hang counts as noticed behind this time."""

TESTS_S = 300.0
"""So many seconds of tests are tried for a fault, by what they take without it."""

FAST = "not slow and not long"

NEAR = 12
"""So many of a fault's tests are tried before the others are collected."""

FAILURE = r"^(?:FAILED|ERROR) (tests/\S+::.+?)(?: - |$)"
"""A failed test in the summary of pytest."""

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

NONE_COLLECTED, NOT_RUN = 5, 70
"""pytest's exit code where a file holds none of the chosen tests, and that of a process in which it cannot be run."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One change of one expression, by the place of that expression in its file."""

    path: Path
    line: int
    column: int
    before: str
    after: str


def faults_of(path: Path) -> Iterator[Fault]:
    """Every fault that can be put into the functions of a file; messages and annotations stay as they are."""
    text = path.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    inner = {id(node) for outer in functions for node in ast.walk(outer) if node is not outer}
    for function in functions:
        if id(function) not in inner:
            for statement in function.body:
                for node in walk_code(statement):
                    if changed := change(node):
                        before = ast.get_source_segment(text, node) or ""
                        yield Fault(path, node.lineno, node.col_offset, before, changed)


def walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, without what only words a message or a type."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "self._log")):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk_code(child)


def change(node: ast.AST) -> str | None:
    """The source of a node with a fault in it; None where none is known for its kind."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        return f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not has_text(node):
        return f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"({ast.unparse(ast.BoolOp(other, node.values))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"bool({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        return repr(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None:
        return None if ast.unparse(node.value) == "None" else "return None"
    return None


def has_text(node: ast.BinOp) -> bool:
    """Whether an addition or a modulus is one of texts."""
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def put(fault: Fault, root: Path) -> None:
    """Write the file of a fault, with it, below `root`."""
    text = fault.path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    # Columns count bytes.
    start = len("".join(lines[: fault.line - 1]).encode()) + fault.column
    raw = text.encode()
    assert raw[start:].startswith(fault.before.encode()), fault
    faulty = raw[:start] + fault.after.encode() + raw[start + len(fault.before.encode()) :]
    (root / fault.path.relative_to(ROOT)).write_bytes(faulty)


REACHED = """
import os
seen = set()
def reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if test and (number, test) not in seen:
        seen.add((number, test))
        try:
            file = os.open({notes!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{{number}}\\t{{test}}\\n".encode())
            os.close(file)
        except OSError:
            pass
"""
"""A module of the copy: notes which test reaches which fault's statement, also in the processes that a test starts."""


def tests_that_reach(faults: list[Fault], root: Path) -> tuple[list[list[str]], set[str]]:
    """Run the fast tests once in the copy `root`; for each fault the tests that execute its statement, nearest first.

    Where a fixture executes it, all tests of that file. Left out is what would take longer than `TESTS_S`. The second
    value holds the tests that fail without a fault.
    """
    notes = root.parent / "reached"
    notes.touch()
    (root / "sftplay" / "reached.py").write_text(REACHED.format(notes=str(notes)), encoding="utf-8")
    paths = {fault.path for fault in faults}
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        places = [(statement_of(fault), number) for number, fault in enumerate(faults) if fault.path == path]
        for line, index in sorted(places, reverse=True):
            indent = " " * (len(lines[line - 1]) - len(lines[line - 1].lstrip()))
            lines.insert(line - 1, f"{indent}from sftplay.reached import reached as _reached; _reached({index})\n")
        (root / path.relative_to(ROOT)).write_text("".join(lines), encoding="utf-8")
    argv = [*PYTEST, "-n3", "--dist=loadfile", "-m", FAST, "--durations=0", "--durations-min=0.01", "-vv", "-rfE"]
    output = subprocess.run(argv, cwd=root, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True).stdout
    seconds = defaultdict[str, float](float)
    for spent, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(tests/.*)$", output, re.MULTILINE):
        seconds[test] += float(spent)
        seconds[test.split("::")[0]] += float(spent)
    found: list[set[str]] = [set() for _ in faults]
    for note in notes.read_text(encoding="utf-8").splitlines():
        number, test = note.split("\t", 1)
        name, phase = test.rsplit(" ", 1)
        found[int(number)].add(name if phase == "(call)" else name.split("::")[0])
    for path in paths:
        shutil.copy2(path, root / path.relative_to(ROOT))
    failed = set(re.findall(FAILURE, output, re.MULTILINE))
    return [nearest(fault, tests - failed, seconds) for fault, tests in zip(faults, found, strict=True)], failed


def statement_of(fault: Fault) -> int:
    """The line of the innermost statement around a fault before which another can be put."""
    text = fault.path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return max(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= fault.line <= (node.end_lineno or 0)
        if not lines[node.lineno - 1].lstrip().startswith("elif ")
        if not lines[node.lineno - 2].lstrip().startswith("@")
    )


def nearest(fault: Fault, tests: set[str], seconds: dict[str, float]) -> list[str]:
    """The tests of a fault: first those of the module's name, then those of its folder, the fastest first."""
    module = fault.path.relative_to(ROOT).with_suffix("")

    def order(test: str) -> tuple[bool, bool, float]:
        near, same = f"test_{module.name}" in test, test.startswith(f"tests/{module.parts[1]}/")
        return not near, not same, seconds[test]

    chosen = sorted((test for test in tests if "::" not in test or test.split("::")[0] not in tests), key=order)
    spent = list(accumulate(seconds[test] for test in chosen))
    return chosen[: max(1, sum(s <= TESTS_S for s in spent))]


def first_failure(tests: list[str], root: Path, left_out: set[str], *, marks: str = FAST) -> str | None:
    """The first test that fails; empty where the tests hang or cannot be collected, None where all pass.

    They run in a fork of this process, which has imported the libraries.
    """
    quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    argv = [*PYTEST[3:], "-W", quiet, "-m", marks, "-x", "-rfE", *(f"--deselect={name}" for name in left_out), *tests]
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(root)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.path.insert(0, str(root))
            for name in [name for name in sys.modules if name.split(".")[0] == "sftplay"]:
                del sys.modules[name]
            # What the tests spawn begins by importing the main module.
            sys.modules["__main__"] = importlib.import_module("pytest.__main__")
            try:
                os._exit(pytest.main(argv))
            finally:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(NOT_RUN)
        deadline, status = time.monotonic() + LIMIT_S, None
        while status is None and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
            status = status if ended else None
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
            return ""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, NONE_COLLECTED):
            return None
        output.seek(0)
        text = output.read().decode(errors="replace")
        if code == NOT_RUN:
            raise RuntimeError(text)
    failures = re.findall(FAILURE, text, re.MULTILINE)
    return failures[0] if failures else ""


IGNORES = """
    def __getattribute__(self, name):
        if (type(self).__name__, name) == ({section!r}, {key!r}):
            return type(self).model_fields[name].get_default(call_default_factory=True)
        return super().__getattribute__(name)
"""
"""What `Section` gets so that one key of one section has no effect."""


def try_keys(root: Path, say: Callable[[str], None]) -> None:
    """Print for each key whether the file that shows its effect notices that it has none."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from test_every_key import SHOWN_IN

    from sftplay.config.run import RunConfig

    path, head = root / "sftplay" / "config" / "section.py", "class Section(BaseModel):\n"
    text = path.read_text(encoding="utf-8")
    for file, section, keys in SHOWN_IN:
        model: Any = RunConfig
        for part in section.split(".") if section else []:
            kinds = [model.model_fields[part].annotation]
            while not hasattr(kinds[0], "model_fields"):
                kinds = [*get_args(kinds.pop(0)), *kinds]
            model = kinds[0]
        for key in keys.split():
            path.write_text(
                text.replace(head, head + IGNORES.format(section=model.__name__, key=key)), encoding="utf-8"
            )
            failed = first_failure([f"tests/{file}"], root, set(), marks="not long")
            fate = "MISSED " if failed is None else "noticed"
            say(f"{fate}  {section}.{key}  tests/{file}")


worker_root: Path
"""The copy of a process that tries faults."""


def begin_worker(roots: Queue[Path]) -> None:
    """Take one of the copies, and import what the tests of any fault would."""
    global worker_root
    worker_root = roots.get()
    os.environ |= ENVIRONMENT
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "trl"):
        importlib.import_module(name)


def try_fault(fault: Fault, tests: list[str], left_out: set[str]) -> bool:
    """Whether a test fails with the fault in this worker's copy, first those nearest to it; prints its fate."""
    began = time.monotonic()
    put(fault, worker_root)
    parts = [tests[:NEAR], tests[NEAR:]]
    noticed = any(first_failure(part, worker_root, left_out) is not None for part in parts if part)
    shutil.copy2(fault.path, worker_root / fault.path.relative_to(ROOT))
    fate = "noticed" if noticed else "MISSED " if tests else "UNTRIED"
    where = f"{fault.path.relative_to(ROOT)}:{fault.line}"
    print(f"{fate} {time.monotonic() - began:4.0f} s  {where}  {fault.before!r} -> {fault.after!r}", flush=True)
    return noticed


def copy_to(root: Path) -> None:
    """The tracked files of the repository, and beside them the shared data that tests may read."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"):
        if name:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    if (ROOT.parent / "shared").exists():
        (root.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())


def main(say: Callable[[str], None] = lambda text: print(text, flush=True)) -> None:
    """Draw the faults, try them, and print each one's fate and the shares by folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--folder", nargs="+", default=[""], help="so many faults below each of these folders of sftplay/"
    )
    parser.add_argument("--keys", action="store_true", help="ignore keys of the config instead")
    args = parser.parse_args()
    if args.keys:
        with tempfile.TemporaryDirectory() as home:
            copy_to(Path(home) / "kit")
            try_keys(Path(home) / "kit", say)
        return
    chosen: list[Fault] = []
    for folder in args.folder:
        known = [fault for path in sorted((ROOT / "sftplay" / folder).rglob("*.py")) for fault in faults_of(path)]
        chosen += random.Random(args.seed).sample(known, min(args.count, len(known)))
    with tempfile.TemporaryDirectory() as home:
        roots: Queue[Path] = Queue()
        for number in range(args.jobs):
            roots.put(Path(home) / str(number) / "kit")
            copy_to(Path(home) / str(number) / "kit")
        tests, failed = tests_that_reach(chosen, Path(home) / "0" / "kit")
        with ProcessPoolExecutor(args.jobs, initializer=begin_worker, initargs=(roots,)) as pool:
            noticed = list(pool.map(try_fault, chosen, tests, repeat(failed)))
        for name in sorted(failed):
            say(f"fails without a fault: {name}")
    for folder in args.folder:
        fates = [
            fate
            for fault, fate in zip(chosen, noticed, strict=True)
            if fault.path.is_relative_to(ROOT / "sftplay" / folder)
        ]
        say(json.dumps({"folder": folder, "seed": args.seed, "faults": len(fates), "noticed": sum(fates)}))


if __name__ == "__main__":
    main()
