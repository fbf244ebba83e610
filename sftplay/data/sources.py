"""Rows of a jsonl, json, csv or parquet file, each with the place it came from.

A row that cannot be read comes out as `Refused`, so that whoever counts sees it; a file that cannot be read at all is a
`DataError`. What a row means is decided in `formats`; the network is `hub`'s business.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sftplay.data.formats import kind_of, layout_of
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError

Row = dict[str, Any]
Read = tuple[Source, Row | Refused]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SPACE = re.compile(r"[ \t\r\n]*")
BROKEN_JSON = (ValueError, RecursionError)
"""What `json` raises on text that is not json: RecursionError for nesting deeper than the interpreter's stack."""


def read_rows(path: str) -> Iterator[Read]:
    """Yield every row of a local file or, if there is none and `path` looks like `org/name`, of a hub data set.

    Blank lines are not rows.

    Raises:
        DataError: there is no such file, or it cannot be read as what it claims to be.
    """
    if is_hub_name(path):
        from sftplay.data.hub import hub_rows

        yield from hub_rows(path)
        return
    file = existing_file(path)
    reader = {".csv": _csv_rows, ".parquet": _parquet_rows}.get(file.suffix.lower(), _json_rows)
    try:
        yield from reader(file)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}", where=path, fix="check its permissions"
        ) from error


def is_hub_name(path: str) -> bool:
    """True when `path` can only be a hub name: no local file, no file suffix, and no local folder of that org."""
    shape = HUB_NAME.fullmatch(path) is not None and Path(path).suffix.lower() not in SUFFIXES
    return shape and not Path(path).exists() and not Path(path).parent.is_dir()


def existing_file(path: str) -> Path:
    """`path` as a readable file of a known kind, or a DataError that says what is there."""
    file = Path(path)
    known = ", ".join(SUFFIXES)
    if file.is_dir():
        raise DataError("is a folder, not a file", where=path, fix=f"name one file in it ({known})")
    if not file.is_file():
        fix = "correct data.train_path / data.val_path; paths are relative to the current directory"
        raise DataError("there is no such file", where=path, fix=fix)
    if file.suffix.lower() not in SUFFIXES:
        raise DataError(f"unknown kind of file {file.suffix!r}", where=path, fix=f"convert it to one of {known}")
    return file


def content_digest(path: str) -> str:
    """Hex digest that changes whenever a byte of the rows changes.

    The whole file is hashed, at about 1 GB/s: size and time stamp alone miss an edit made within the clock's grain.
    """
    if is_hub_name(path):
        from sftplay.data.hub import hub_digest

        return hub_digest(path)
    with existing_file(path).open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _json_rows(file: Path) -> Iterator[Read]:
    """Lines or one document: decided by what is inside, because files are often misnamed."""
    first, has_more = _first_line(file)
    complete = _is_json(first)
    if file.suffix.lower() == ".json":
        is_lines = complete and has_more
    else:
        is_lines = not first.startswith(b"[") or (complete and has_more)
    return _line_rows(file) if is_lines else _document_rows(file)


def _first_line(file: Path) -> tuple[bytes, bool]:
    """The first line that is not blank, without a BOM, and whether another follows."""
    first = b""
    with file.open("rb") as lines:
        for line in lines:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError("is UTF-16, not UTF-8", where=str(file), fix="save it as UTF-8")
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text and first:
                return first, True
            first = first or text
    return first, False


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except BROKEN_JSON:
        return False
    return True


def _line_rows(file: Path) -> Iterator[Read]:
    path = str(file)
    with file.open("rb") as lines:  # bytes: only \n ends a line there, while U+2028 inside a string does not
        for number, line in enumerate(lines, 1):
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if text:
                yield Source(path, number), _parsed(text)


def _parsed(text: bytes) -> Row | Refused:
    try:
        return _row(json.loads(text.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Refused(f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        return Refused(f"is not JSON: {error.msg} at column {error.colno}")
    except BROKEN_JSON as error:
        return Refused(f"is not JSON that can be read: {error}")


def _row(value: object) -> Row | Refused:
    return value if isinstance(value, dict) else Refused(f"is {kind_of(value)}, not an object")


def _document_rows(file: Path) -> Iterator[Read]:
    """The elements of one json array, of the one list in an object, or the object itself as the only row."""
    path = str(file)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start + 1} is not UTF-8", where=path, fix="save it as UTF-8") from error
    start = _after_space(text, 0)
    if text[start : start + 1] == "[":
        yield from _array_rows(path, text, start + 1)
    elif start < len(text):
        value, end = _decoded(path, text, start)
        _expect_end(path, text, end)
        for number, row in enumerate(_rows_inside(value), 1):
            yield Source(path, number), _row(row)


def _rows_inside(value: object) -> list[Any]:
    if not isinstance(value, dict) or layout_of(value) is not None:
        return [value]
    lists = [inner for inner in value.values() if isinstance(inner, list)]
    return lists[0] if len(lists) == 1 else [value]


def _array_rows(path: str, text: str, at: int) -> Iterator[Read]:
    """One element after the other, so that only the text and never all its objects are in memory."""
    number = 0
    at = _after_space(text, at)
    more = text[at : at + 1] != "]"
    while more:
        number += 1
        value, at = _decoded(path, text, at)
        yield Source(path, number), _row(value)
        at = _after_space(text, at)
        more = text[at : at + 1] == ","
        at = _after_space(text, at + 1) if more else at
    if text[at : at + 1] != "]":
        raise _broken(path, text, at, f"row {number} is followed by neither a comma nor a closing bracket")
    _expect_end(path, text, at + 1)


def _decoded(path: str, text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _broken(path, text, error.pos, f"is not JSON: {error.msg}") from error
    except BROKEN_JSON as error:
        raise _broken(path, text, at, f"is not JSON that can be read: {error}") from error


def _expect_end(path: str, text: str, at: int) -> None:
    at = _after_space(text, at)
    if at < len(text):
        raise _broken(path, text, at, "has text after the end of the JSON document")


def _broken(path: str, text: str, at: int, what: str) -> DataError:
    where = f"{path}:{text.count(chr(10), 0, at) + 1}"
    return DataError(what, where=where, fix="correct the file there; jsonl, one row a line, survives a broken row")


def _after_space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _csv_rows(file: Path) -> Iterator[Read]:
    path = str(file)
    _first_line(file)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses a text longer than 131,072 characters
    # surrogateescape carries bytes that are not UTF-8 to `formats`, which refuses that row alone.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        header: list[str] | None = None
        while True:
            start = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Source(path, start), Refused(f"is not CSV: {error}")
                continue
            if header is None:
                header = cells or None
            elif cells:
                yield Source(path, start), _csv_row(header, cells)


def _csv_row(header: list[str], cells: list[str]) -> Row | Refused:
    if len(header) != len(cells):
        return Refused(f"has {len(cells)} columns where the header has {len(header)}")
    return dict(zip(header, cells, strict=True))


def _parquet_rows(file: Path) -> Iterator[Read]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Source(str(file), number), row
    except pa.ArrowException as error:
        what = f"is not a parquet file that can be read: {error}"
        raise DataError(what, where=f"{file}:{number + 1}", fix="write it again") from error
