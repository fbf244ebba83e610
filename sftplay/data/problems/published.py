"""Data sets of problems that can be asked for by name: the files they are published as, and where the hub has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.data.read.sources import is_hub_name, read_rows
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError, nearest_names

FOLDERS = ("data/{name}", "data", ".")
"""Where a published file is looked for, below the current folder; `name` is the data set's."""


@dataclass(frozen=True, slots=True)
class Published:
    """A data set of problems."""

    files: tuple[str, ...]
    """Names of the file that its authors publish."""

    hub: str
    subset: str | None
    splits: tuple[str, ...]
    """All of them: which problems are for testing is decided by their ids."""


MBPP_PARTS = ("prompt", "test", "validation", "train")

PUBLISHED = {
    "mbpp": Published(("mbpp.jsonl",), "google-research-datasets/mbpp", "full", MBPP_PARTS),
    "mbpp-sanitized": Published(("sanitized-mbpp.json",), "google-research-datasets/mbpp", "sanitized", MBPP_PARTS),
    "humaneval": Published(("HumanEval.jsonl", "HumanEval.jsonl.gz"), "openai/openai_humaneval", None, ("test",)),
}


def problem_rows(named: str) -> Iterator[tuple[Source, dict[str, Any] | Refused]]:
    """Yield the rows of a file, or of a data set of PUBLISHED: from its local file, else from the hub.

    Raises:
        DataError: there is neither, or it cannot be read.
    """
    known, file = PUBLISHED.get(named), local_file(named)
    if known is None or file or Path(named).exists():
        yield from read_rows(_checked(str(file or named)))
        return
    from sftplay.data.read.hub import hub_rows_of

    try:
        yield from hub_rows_of(known.hub, known.subset, splits=known.splits)
    except DataError as error:
        other = next((name for name in PUBLISHED if name.startswith(f"{named}-") and local_file(name)), None)
        fix = f"put {known.files[0]} into data/, or name a file: DATA=path/{known.files[0]}"
        fix += f"; {local_file(other)} is there: DATA={other}" if other else ""
        raise DataError(error.what, where=f"{named} ({known.hub} on the hub)", fix=fix) from error


def local_file(name: str) -> Path | None:
    """The file of a data set of PUBLISHED on this machine; None where there is none, or no such data set."""
    files = PUBLISHED[name].files if name in PUBLISHED else ()
    folders = [Path(folder.format(name=name.removesuffix("-sanitized"))) for folder in FOLDERS]
    return next((folder / file for folder in folders for file in files if (folder / file).is_file()), None)


def _checked(path: str) -> str:
    """The path, unless there is nothing of that name and no hub can have it."""
    if Path(path).exists() or is_hub_name(path):
        return path
    near = nearest_names(path, PUBLISHED)
    fix = f"did you mean {near[0]}?" if near else f"name a file, or one of {', '.join(PUBLISHED)}"
    raise DataError("there is no such file or data set", where=f"DATA {path}", fix=fix, nearest=near)
