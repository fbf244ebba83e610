"""What a folder of ARC says beside its splits: the names of all copies, and the tasks that are asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftplay.data.puzzles.arc.task import Task, task_of
from sftplay.errors import DataError

NAMES = "identifiers.json"
"""The name of each identifier; see `augment.Change.name`."""

ASKED = "test_puzzles.json"
"""The tasks of the test, by their names."""

BLANK = "<blank>"


def read_names(split: Path) -> list[str]:
    """The names of the identifiers of the split in the folder `split`, which lies beside them.

    Raises:
        DataError: there are none.
    """
    names = _read(split, NAMES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _fault(split.parent / NAMES, "is no list of names")
    return names


def read_asked(split: Path) -> dict[str, Task]:
    """The tasks whose test pairs the split in the folder `split` asks for.

    Raises:
        DataError: there are none.
    """
    path, tasks = split.parent / ASKED, _read(split, ASKED)
    if not isinstance(tasks, dict) or not tasks:
        raise _fault(path, "holds no tasks")
    return {name: task_of(task, name, where=f"{path} {name}") for name, task in tasks.items()}


def _read(split: Path, name: str) -> Any:
    path = split.absolute().parent / name
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _fault(path, "is missing") from None
    except (ValueError, RecursionError):
        raise _fault(path, "is no JSON") from None


def _fault(path: Path, what: str) -> DataError:
    return DataError(what, where=str(path), fix="write the folder again with make puzzle-data KIND=arc")
