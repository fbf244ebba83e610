"""A programming problem in one form, whichever data set it comes from, and how a model is asked for its solution."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import Any

PROMPT_VERSION = 1
"""To be raised when `question_of` asks in other words: results before and after do not compare."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, and the tests that say whether it was done."""

    task_id: str
    text: str
    """What the program shall do, in words; or the beginning of the program, with its docstring."""

    tests: tuple[str, ...]
    """Python statements that raise where the program is wrong."""

    entry_point: str
    """The function that the tests call."""

    reference: str
    """A program that passes."""

    setup: str = ""
    """Statements that the tests need, such as imports."""

    shown: int = 0
    """How many of the tests stand in the question."""


def question_of(problem: Problem) -> str:
    """What a model is asked."""
    parts = [problem.text.strip()]
    if problem.shown:
        parts.append("It must pass " + ("this test:" if problem.shown == 1 else "these tests:"))
        parts.append("\n".join(problem.tests[: problem.shown]))
    parts.append(f"Define `{problem.entry_point}` and answer with one ```python block.")
    return "\n\n".join(parts)


def answer_of(problem: Problem) -> str:
    """The reference, in the form in which a model is asked to answer."""
    return f"```python\n{problem.reference.strip()}\n```"


REWARD_COLUMNS = ("task_id", "answer", "tests", "setup", "entry_point", "shown")


def reward_columns(problem: Problem) -> dict[str, Any]:
    """What rewards read of a problem, by name."""
    values = (
        problem.task_id,
        answer_of(problem),
        list(problem.tests),
        problem.setup,
        problem.entry_point,
        problem.shown,
    )
    return dict(zip(REWARD_COLUMNS, values, strict=True))


def called_name(tests: tuple[str, ...], reference: str) -> str:
    """The function of the reference that the first test calls; empty where none is.

    >>> called_name(("assert set(f(1)) == {1}",), "def g(): pass\\ndef f(x): return [x]")
    'f'
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in published solutions
        trees = [ast.parse(each) for each in (reference, *tests[:1])]
    defined = {node.name for node in trees[0].body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = [
        node.func.id
        for tree in trees[1:]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return next((name for name in called if name in defined), "")
