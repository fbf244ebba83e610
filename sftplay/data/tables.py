"""Rows of tables (CSV, Parquet, Arrow), and of data sets of the hub."""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from sftplay.data.files import BOM, LONGEST, Charset, JsonRow, find_suffix
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError

ReadRow = tuple[Source, JsonRow | Refused]


def csv_rows(charset: Charset, delimiter: str = "auto") -> Iterator[ReadRow]:
    """Yield every row below the header; a row is placed at its first line.
    Raise DataError where the header cannot be used, or no table can have this delimiter.
    """
    csv.field_size_limit(min(LONGEST, sys.maxsize))  # the default refuses a cell longer than 131,072 characters
    path = str(charset.file)
    with charset.open(newline="") as stream:
        lines = _Lines(stream, path)
        header_line = lines.first()
        if not header_line:
            return
        if charset.refuses(header_line):
            raise DataError(f"the header {charset.refused().reason}", where=f"{path}:{lines.start}", fix=FIX_HEADER)
        delimiter = _find_delimiter(header_line, delimiter, file=charset.file)
        records = _records(csv.reader(lines, delimiter=delimiter, strict=True), lines)
        start, header = next(records)
        if isinstance(header, Refused):
            raise DataError(f"the header {header.reason}", where=f"{path}:{start}", fix=FIX_HEADER)
        names = [cell.strip() or f"(column {place})" for place, cell in enumerate(header, 1)]
        if twice := [name for name in names if names.count(name) > 1]:
            what = f"the header names {twice[0]!r} twice"
            raise DataError(what, where=f"{path}:{start}", fix="rename one of the two columns")
        for start, cells in records:
            row: JsonRow | Refused
            if isinstance(cells, Refused):
                row = cells
            elif len(names) != len(cells):
                row = Refused(f"has {len(cells)} columns where the header has {len(names)}")
            elif cells[0].startswith(BOM):
                what = "begins with a byte order mark: another file, perhaps with a header, was put behind the first"
                row = Refused(what)
            else:
                is_foreign = charset.refuses("".join(cells))
                row = charset.refused() if is_foreign else dict(zip(names, cells, strict=True))
            yield Source(path, start), row


def parquet_rows(file: Path, columns: Collection[str] | None = None) -> Iterator[ReadRow]:
    """Yield every row, numbered from 1, a part of the file in memory at a time; only `columns`, where they are named.
    Raise DataError where it is no parquet file, or a damaged one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError("has two columns of one name", where=str(file), fix="rename one of them")
            wanted = None if columns is None else [name for name in names if name in columns]
            for batch in table.iter_batches(batch_size=256, columns=wanted):
                for row in _batch_rows(batch):
                    number += 1
                    yield Source(str(file), number), row
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"is not a parquet file that can be read: {first}"
        raise DataError(what, where=f"{file}:{number + 1}", fix="write it again") from error


def without_nulls(value: Any) -> Any:
    """Return the value without the fields that are null in the objects inside it.

    Arrow gives all objects of a column the same fields; null stands there for a field that an object does not have.
    """
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


FIX_HEADER = "write one line of column names above the rows"


class _Lines:
    """Physical lines for `csv.reader`, which can be given back after a record that turned out to be broken."""

    def __init__(self, stream: TextIO, path: str) -> None:
        self._stream, self._path = stream, path
        self.waiting: deque[str] = deque()
        self.taken: list[str] = []
        self.start = 1  # line at which the record begins that is being read

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.waiting.popleft() if self.waiting else self._stream.readline(LONGEST)
        if not line:
            raise StopIteration
        if len(line) == LONGEST and not line.endswith(("\n", "\r")):
            where = f"{self._path}:{self.start + len(self.taken)}"
            raise DataError(f"a line is longer than {LONGEST:,} characters", where=where, fix="correct the file there")
        self.taken.append(line)
        return line

    def first(self) -> str:
        """Return the first line that is not blank, without a byte order mark; empty if there is none."""
        for line in self:
            if text := line.removeprefix(BOM).strip("\r\n "):
                self.waiting.append(line.removeprefix(BOM))
                self.taken.clear()
                return text
            self.next_record()
        return ""

    def next_record(self) -> None:
        """Forget the lines of the record that was read."""
        self.start += len(self.taken)
        self.taken.clear()


def _records(reader: Any, lines: _Lines) -> Iterator[tuple[int, list[str] | Refused]]:
    """Yield first line and cells of each record. A quote that spoils a record costs its first line and no other."""
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Only the first line of the record is read; those after it come again.
            lines.waiting.extendleft(reversed(lines.taken[1:]))
            del lines.taken[1:]
            yield lines.start, Refused(f"is not CSV: {error}")
        else:
            if cells:
                yield lines.start, cells
        lines.next_record()


def _find_delimiter(header: str, named: str, *, file: Path) -> str:
    """The one that is named; else that with which the header has a known layout; else that of the most columns."""
    from sftplay.data.layouts import detect_layout  # imports the config, which rows of text do without

    if named != "auto":
        try:
            csv.reader([], delimiter=named)
        except (TypeError, ValueError) as error:
            fix = "write auto, or one character"
            raise DataError(f"{named!r} cannot be a delimiter: {error}", where="data.delimiter", fix=fix) from error
        return named
    is_tsv = find_suffix(file).startswith(".tsv")
    candidates = ["\t", ",", ";", "|"] if is_tsv else [",", ";", "\t", "|"]
    found = {one: [name.strip() for name in next(csv.reader([header], delimiter=one))] for one in candidates}
    known = [candidate for candidate in candidates if detect_layout(found[candidate]) is not None]
    return max(known or candidates, key=lambda candidate: len(found[candidate]))


def _batch_rows(batch: Any) -> list[JsonRow | Refused]:
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError) as error:  # one of them holds what Python cannot: look for it
        if batch.num_rows == 1:
            return [Refused(f"holds a value that cannot be read: {error}")]
        return [row for place in range(batch.num_rows) for row in _batch_rows(batch.slice(place, 1))]
    return [{name: without_nulls(value) for name, value in row.items()} for row in rows]


def read_hub_rows(
    name: str, subset: str | None = None, *, splits: Sequence[str] = ()
) -> Iterator[tuple[Source, dict[str, Any]]]:
    """Yield the rows of these splits of a data set, one split after the other; without any named, those of `train`.
    `subset` is one of its parts by name.
    Raise DataError where it cannot be loaded; the hub's own reason is quoted.
    """
    for split in splits or ("train",):
        path = f"{name} {split}" if splits else name
        for number, row in enumerate(_load(name, subset, split=split), 1):
            yield Source(path, number), {column: without_nulls(value) for column, value in row.items()}


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
        what = f"no local file of that name, and the hub's data set cannot be loaded: {reason}"
        fix = "check the name and the connection, or give the path of a local file"
        raise DataError(what, where=name, fix=fix) from error
