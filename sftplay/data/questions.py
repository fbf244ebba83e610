"""Tokenised prompts, and how they are stored on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from sftplay.data.records import Source

FIELDS = {"row": pa.int64(), "input_ids": pa.list_(pa.int64()), "content": pa.string()}
SCHEMA = pa.schema(FIELDS | {"path": pa.string(), "line": pa.int64(), "record": pa.int64()})
"""`content` is JSON text: in Arrow's own columns each object would get the keys of all the others."""


@dataclass(frozen=True)
class Question:
    row: int
    """The row's number in its file, from 0."""

    ids: list[int]
    question: str
    """The words of its last turn, or the beginning of a plain text."""

    columns: dict[str, Any]
    """The columns that rewards read, by name."""


class Questions:
    """Prompts by their number, read from disk as they are needed."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Question:
        row = self.rows[number]
        content = json.loads(row["content"])
        return Question(row["row"], row["input_ids"], content["question"], content["columns"])

    @property
    def row_numbers(self) -> list[int]:
        return list(self.rows["row"])

    def find_place(self, number: int) -> str:
        """Return the place of the row, as `Source` prints it."""
        row = self.rows[number]
        return str(Source(row["path"], row["line"], row["record"]))


@contextmanager
def open_writer(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that appends a row of SCHEMA to a new file; the rows are written many at a time."""
    rows: list[dict[str, Any]] = []
    with pa.ipc.new_stream(str(path), SCHEMA) as stream:

        def append(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) == 256:
                stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
                rows.clear()

        yield append
        if rows:
            stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
