"""Problems of a file: MBPP, whole or sanitized, and HumanEval, each in the form in which it is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal

from sftplay.data.problems.problem import REWARD_COLUMNS, Problem, reward_columns
from sftplay.data.problems.published import problem_rows
from sftplay.data.problems.rows import split_of, to_problem
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError

Split = Literal["all", "prompt", "test", "validation", "train"]


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
    """What `to_problem` gives; its DataError names the row's place."""
    try:
        return to_problem(row)
    except DataError as error:
        raise DataError(error.what, where=str(source), fix=error.fix) from error


def columns_of(problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """The problems as the columns that code rewards read."""
    rows = [reward_columns(problem) for problem in problems]
    return {name: [row[name] for row in rows] for name in REWARD_COLUMNS}
