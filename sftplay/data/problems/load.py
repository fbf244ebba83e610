"""Problems of a file: MBPP, whole or sanitized, and HumanEval, each in the form in which it is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal

from sftplay.data.problems.problem import Problem, called_name
from sftplay.data.problems.published import problem_rows
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError

Split = Literal["all", "prompt", "test", "validation", "train"]

MBPP_SPLITS: dict[str, range] = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Ids of MBPP by the use that its authors gave them (Austin et al. 2021, arXiv 2108.07732, and the data's own page)."""

SHOWN_TESTS = 1
"""Tests of MBPP that stand in the question: they say which types a function takes, which its text leaves open."""


def load_problems(path: str, split: Split = "all") -> list[Problem]:
    """The problems of a file or of a data set of `published`, in order, without those whose text stands there twice.

    Raises:
        DataError: the file cannot be read, a row is no problem, or nothing of the split is there.
    """
    problems: list[Problem] = []
    seen: set[str] = set()
    for source, row in problem_rows(path):
        if isinstance(row, Refused):
            raise DataError(row.reason, where=str(source), fix="mend the row, or remove it")
        problem = read_problem(row, source)
        words = " ".join(problem.text.lower().split())
        if words not in seen and (split == "all" or split_of(problem) == split):
            problems.append(problem)
        seen.add(words)
    if not problems:
        raise DataError(f"has no problem of the split {split!r}", where=path, fix="name another split, or another file")
    return problems


def draw_subset(problems: Sequence[Problem], limit: int | None, *, seed: int) -> list[Problem]:
    """At most `limit` of the problems, drawn by `seed`, in their order; the first ones would be like each other."""
    if limit is None or limit >= len(problems):
        return list(problems)
    return [problems[at] for at in sorted(Random(seed).sample(range(len(problems)), limit))]


def read_problem(row: Mapping[str, Any], source: Source) -> Problem:
    """The problem of a row.

    Raises:
        DataError: the row has the fields of no known data set, or its tests call nothing that its solution defines.
    """
    try:
        if "canonical_solution" in row:
            return _human_eval(row)
        if "test_list" in row:
            return _mbpp(row)
    except (KeyError, TypeError, SyntaxError, ValueError) as error:
        what = f"cannot be read as a problem: {type(error).__name__} {error}"
        raise DataError(what, where=str(source), fix="compare it with a row of the published file") from error
    fix = "rows of MBPP have test_list, rows of HumanEval canonical_solution"
    raise DataError(f"is no problem: it has {', '.join(sorted(row))}", where=str(source), fix=fix)


def split_of(problem: Problem) -> str:
    """The published split of a problem; HumanEval is test only."""
    if not problem.task_id.isdecimal():
        return "test"
    return next((name for name, ids in MBPP_SPLITS.items() if int(problem.task_id) in ids), "")


def refuse_test_problems(problems: list[Problem]) -> None:
    """Raise the DataError about problems to train on that belong to a published test split."""
    held = [problem.task_id for problem in problems if split_of(problem) == "test"]
    if held:
        raise DataError(
            f"{len(held):,} problems of a test split are among those to train on: {', '.join(held[:5])}",
            where="training problems",
            fix="train on the split train; what is tested must not be learned",
        )


def _mbpp(row: Mapping[str, Any]) -> Problem:
    tests = tuple(str(test) for test in row["test_list"])
    reference = str(row["code"])
    # The whole set has test_setup_code, the sanitized one test_imports.
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code") or ""]).strip()
    name = called_name(tests, reference)
    if not tests or not name:
        raise ValueError("its first test calls nothing that its solution defines")
    text = str(row["prompt"] if "prompt" in row else row["text"])
    return Problem(str(row["task_id"]), text, tests, name, reference, setup, min(SHOWN_TESTS, len(tests) - 1))


def _human_eval(row: Mapping[str, Any]) -> Problem:
    name, beginning = str(row["entry_point"]), str(row["prompt"])
    test = f"{row['test']}\ncheck({name})"
    return Problem(str(row["task_id"]), beginning, (test,), name, beginning + str(row["canonical_solution"]))


def columns_of(problems: list[Problem]) -> dict[str, list[Any]]:
    """The problems as the columns that code rewards read."""
    return {
        "tests": [list(problem.tests) for problem in problems],
        "setup": [problem.setup for problem in problems],
        "entry_point": [problem.entry_point for problem in problems],
        "shown": [problem.shown for problem in problems],
    }
