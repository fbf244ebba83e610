"""Problems with tests or reference answers, and the rows that hold them."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftplay.errors import DataError

PROMPT_VERSION = 1  # to be raised when `format_question` asks in other words: results before and after do not compare


@dataclass(frozen=True, slots=True)
class Problem:
    """A task, and the tests that decide whether it is solved."""

    task_id: str
    text: str  # the task in words; or the beginning of the program, with its docstring
    tests: tuple[str, ...]  # python statements that raise where the program is wrong
    entry_point: str  # the function that the tests call
    reference: str  # A program that passes
    setup: str = ""  # statements that the tests need, such as imports
    shown: int = 0  # number of tests that the question shows


def format_question(problem: Problem) -> str:
    parts = [problem.text.strip()]
    if problem.shown:
        parts.append("It must pass " + ("this test:" if problem.shown == 1 else "these tests:"))
        parts.append("\n".join(problem.tests[: problem.shown]))
    parts.append(f"Define `{problem.entry_point}` and answer with one ```python block.")
    return "\n\n".join(parts)


def format_answer(problem: Problem) -> str:
    return f"```python\n{problem.reference.strip()}\n```"


def reward_columns(problem: Problem) -> dict[str, Any]:
    """Return the columns that rewards read of a problem, by name."""
    columns = {"task_id": problem.task_id, "answer": format_answer(problem), "tests": list(problem.tests)}
    return columns | {"setup": problem.setup, "entry_point": problem.entry_point, "shown": problem.shown}


def called_name(tests: tuple[str, ...], reference: str) -> str:
    """Return the function of the reference that the first test calls; empty where none is.

    >>> called_name(("assert set(f(1)) == {1}",), "def g(): pass\\ndef f(x): return [x]")
    'f'
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in published solutions
        trees = [ast.parse(code) for code in (reference, *tests[:1])]
    defined = {node.name for node in trees[0].body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    calls = [node.func for tree in trees[1:] for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return next((call.id for call in calls if isinstance(call, ast.Name) and call.id in defined), "")


MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
"""Ids of MBPP by the use that its authors gave them (Austin et al. 2021, arXiv 2108.07732, and the data's own page)."""

SHOWN_TESTS = 1
"""Tests of MBPP that stand in the question: they say which types a function takes, which its text leaves open."""


def to_problem(row: Mapping[str, Any]) -> Problem:
    """Read the problem of a row. Raise DataError where it has the fields of no known data set, or its tests call
    nothing that its solution defines.
    """
    row = {name: value for name, value in row.items() if value is not None}  # columns of others in a mixed table
    try:
        if "canonical_solution" in row:
            name, beginning, task_id = str(row["entry_point"]), str(row["prompt"]), str(row["task_id"])
            test = f"{row['test']}\ncheck({name})"
            return Problem(task_id, beginning, (test,), name, beginning + str(row["canonical_solution"]))
        if "test_list" in row:
            return _read_mbpp(row)
    except (KeyError, TypeError, SyntaxError, ValueError) as error:
        what = f"cannot be read as a problem: {type(error).__name__} {error}"
        raise DataError(what, fix="compare it with a row of the published file") from error
    fix = "rows of MBPP have test_list, rows of HumanEval canonical_solution"
    raise DataError(f"is no problem: it has {', '.join(sorted(row))}", fix=fix)


def published_test_id(row: Mapping[str, Any]) -> str:
    """Return the id of a row of a published test split, which must not be learned; empty for other rows."""
    is_known = row.get("test_list") is not None or row.get("canonical_solution") is not None
    task_id = str(row.get("task_id", ""))
    return task_id if is_known and find_split(task_id) == "test" else ""


def find_split(task_id: str) -> str:
    """Find the published split of a problem; HumanEval is test only. Empty for an unpublished problem."""
    if task_id.startswith("HumanEval"):
        return "test"
    number = int(task_id) if task_id.isdecimal() else 0
    return next((name for name, ids in MBPP_SPLITS.items() if number in ids), "")


def _read_mbpp(row: Mapping[str, Any]) -> Problem:
    tests = tuple(str(test) for test in row["test_list"])
    reference = str(row["code"])
    # The whole set has test_setup_code, the sanitized one test_imports.
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")]).strip()
    name = called_name(tests, reference)
    if not tests or not name:
        raise ValueError("its first test calls nothing that its solution defines")
    text = str(row["prompt"] if "prompt" in row else row["text"])
    return Problem(str(row["task_id"]), text, tests, name, reference, setup, min(SHOWN_TESTS, len(tests) - 1))
