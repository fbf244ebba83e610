"""Rows of a data set on the Hugging Face hub; the only file of `data` that may use the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sftplay.data.read.tables import without_nulls
from sftplay.data.records import Source
from sftplay.errors import DataError


def read_hub_rows(name: str) -> Iterator[tuple[Source, dict[str, Any]]]:
    """Yield the rows of the split `train` of the data set `name`.

    Raises DataError: it cannot be loaded; the hub's own reason is quoted.
    """
    for number, row in enumerate(_load(name), 1):
        yield Source(name, number), {column: without_nulls(value) for column, value in row.items()}


def read_hub_splits(name: str, subset: str | None, *, splits: Sequence[str]) -> Iterator[tuple[Source, dict[str, Any]]]:
    """Yield the rows of these splits of a data set, one split after the other. `subset` is one of its parts by name.

    Raises DataError: as `read_hub_rows`.
    """
    for split in splits:
        for number, row in enumerate(_load(name, subset, split=split), 1):
            yield Source(f"{name} {split}", number), {column: without_nulls(value) for column, value in row.items()}


def hub_digest(name: str) -> str:
    """Return a string that changes when the hub serves other rows."""
    # datasets' own fingerprint: it covers the files' checksums, and nothing public does.
    return str(_load(name)._fingerprint)


def _load(name: str, subset: str | None = None, *, split: str = "train") -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"no local file of that name, and the hub's data set cannot be loaded: {reason}",
            where=name,
            fix="check the name and the connection, or give the path of a local file",
        ) from error
