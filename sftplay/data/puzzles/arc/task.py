"""Tasks of ARC as their json files have them: pairs of grids of colours 0 to 9, at most 30 x 30."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.errors import DataError, SeveralErrors

LARGEST = 30
"""Rows or columns of a grid."""

Grid = NDArray[np.uint8]
"""[rows, columns] of colours."""


@dataclass(frozen=True)
class Pair:
    """A grid and what becomes of it."""

    input: Grid
    output: Grid


@dataclass(frozen=True)
class Task:
    """Demonstrations of one rule, and the pairs that are asked for."""

    id: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All of them."""
        return self.train + self.test


def read_tasks(folder: Path) -> list[Task]:
    """The tasks in a folder with a json file of each, in the order of their names.

    Raises:
        SeveralErrors: files that hold no task, each with the place and what to do; it exits with code 4.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        what = "holds no json file" if folder.is_dir() else "no such folder"
        raise DataError(what, where=str(folder), fix="put a json file of each task there, as ARC-AGI's data has them")
    tasks, problems = [], []
    for file in files:
        try:
            tasks.append(read_task(file))
        except DataError as error:
            problems.append(error)
    if problems:
        raise SeveralErrors(problems)
    return tasks


def read_task(file: Path) -> Task:
    """The task of a json file.

    Raises:
        DataError: it holds none.
    """
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        what = "is empty" if not file.stat().st_size else f"is no JSON ({str(error).splitlines()[0]})"
        raise DataError(what, where=f"{file}{line}", fix="correct the file, or take it away") from None
    return task_of(content, file.stem, where=str(file))


def task_of(content: Any, name: str, *, where: str) -> Task:
    """The task that a JSON object holds."""
    if not isinstance(content, dict):
        raise _fault("is no object with `train` and `test`", where)
    parts = {part: tuple(_pairs(content.get(part), f"{where} {part}")) for part in ("train", "test")}
    return Task(name, parts["train"], parts["test"])


def as_json(task: Task) -> dict[str, Any]:
    """The task in the form of its file."""

    def pairs(part: tuple[Pair, ...]) -> list[dict[str, Any]]:
        return [{"input": pair.input.tolist(), "output": pair.output.tolist()} for pair in part]

    return {"train": pairs(task.train), "test": pairs(task.test)}


def _pairs(found: Any, where: str) -> Iterator[Pair]:
    if not isinstance(found, list) or not found:
        raise _fault("is no list of pairs", where)
    for number, pair in enumerate(found, 1):
        missing = [side for side in ("input", "output") if not isinstance(pair, dict) or side not in pair]
        if missing:
            raise _fault(f"has no `{'` and no `'.join(missing)}`", f"{where} {number}")
        yield Pair(*(_grid(pair[side], f"{where} {number} {side}") for side in ("input", "output")))


def _grid(rows: Any, where: str) -> Grid:
    is_grid = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not is_grid:
        raise _fault("is no list of rows", where)
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise _fault(f"row {number} has {len(row)} cells, row 1 has {width}", where)
        wrong = [cell for cell in row if type(cell) is not int or not 0 <= cell <= 9]
        if wrong:
            raise _fault(f"row {number} holds {wrong[0]!r}, which is no colour 0 to 9", where)
    if max(len(rows), width) > LARGEST:
        raise _fault(f"is {len(rows)} x {width}, larger than {LARGEST} x {LARGEST}", where)
    return np.array(rows, np.uint8)


def _fault(what: str, where: str) -> DataError:
    return DataError(what, where=where, fix="correct the file, or take it away")
