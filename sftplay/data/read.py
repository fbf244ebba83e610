"""Rows of files, folders and hub data sets, each with the place it came from; one that cannot be read is `Refused`."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sftplay.data.files import (
    BOM,
    Charset,
    JsonRow,
    UnparsedRow,
    byte_lines,
    find_suffix,
    list_files,
    parsed,
)
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError

if TYPE_CHECKING:
    from sftplay.config.data import DataConfig


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Dialect:
    """How to read text files: what their bytes do not show."""

    encoding: str = "auto"  # Python's name; auto is UTF-8, or UTF-16 and UTF-32 where they show
    delimiter: str = "auto"  # character between the cells of csv and tsv; auto finds it in the header


def read_dialect(data: DataConfig) -> Dialect:
    return Dialect(encoding=data.encoding, delimiter=data.delimiter)


def read_rows(path: str, dialect: Dialect = Dialect()) -> Iterator[tuple[Source, JsonRow | Refused]]:
    """Yield every row of `path` as an object, or as refused; raises what `read_raw` raises."""
    for source, raw in read_raw(path, dialect):
        yield source, parsed(raw)


def read_raw(path: str, dialect: Dialect = Dialect()) -> Iterator[tuple[Source, UnparsedRow]]:
    """Yield every row of a file, of all files below a folder or, if `path` can only be a hub name, of that data set.
    Rows of JSON come unparsed, for `parsed`. Raise DataError where a file cannot be read as what it claims to be.
    """
    if is_hub_name(path):
        from sftplay.data.tables import read_hub_rows

        yield from read_hub_rows(path)
        return
    for file in list_files(path):
        source = Source(str(file), 0)
        try:
            for source, raw in _read_file(file, dialect):
                yield source, raw
        except (OSError, EOFError, zlib.error, UnicodeError) as error:
            raise describe_unreadable(file, source.line, error=error) from error


def is_hub_name(path: str) -> bool:
    """Return True if `path` can only be a hub name: no local file, no file suffix, and no local folder of that org."""
    # 96 characters are the hub's own limit.
    fits = len(path) <= 96 and HUB_NAME.fullmatch(path) is not None and not find_suffix(path)
    return fits and not Path(path).exists() and not Path(path).parent.is_dir()


def _read_file(file: Path, dialect: Dialect) -> Iterator[tuple[Source, UnparsedRow]]:
    kind = find_suffix(file).removesuffix(".gz")
    if kind == ".parquet":
        from sftplay.data.tables import parquet_rows

        return parquet_rows(file)
    charset = Charset(file, dialect.encoding)
    if kind in (".csv", ".tsv"):
        from sftplay.data.tables import csv_rows

        return csv_rows(charset, dialect.delimiter)
    has_lines = _has_lines(charset, is_named_json=kind == ".json")
    if has_lines and charset.is_utf8:
        return byte_lines(charset)
    from sftplay.data.json_document import document_rows, text_lines

    return text_lines(charset) if has_lines else document_rows(charset)


def _has_lines(charset: Charset, *, is_named_json: bool) -> bool:
    """Decide between lines and one document by what is inside, because files are often misnamed."""
    first, has_more = "", False
    with charset.open(newline="\n") as stream:
        while not has_more and (line := stream.readline(1 << 19)):  # a longer one counts as cut off
            text = line.strip(f"{BOM} \t\r\n")
            has_more = bool(text and first)
            first = first or text
    is_array = first.startswith("[")
    if not (is_named_json or is_array):
        return True
    if not has_more or (is_named_json and is_array):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def describe_unreadable(file: Path, line: int, *, error: Exception) -> DataError:
    """Return the error about a file that cannot be read; `line` is that of its last good row, 0 for none."""
    if isinstance(error, EOFError):
        what, fix = "ends in the middle: the gzip file is cut off", "copy it again"
    elif isinstance(error, OSError) and error.errno is not None:
        what, fix = f"cannot be read: {error.strerror}", "check its permissions"
    elif isinstance(error, UnicodeError):
        what, fix = f"cannot be decoded: {error}", "set data.encoding to the one it is in"
    else:
        what, fix = f"is a damaged gzip file: {error}", "copy it again, or take .gz off its name"
    return DataError(what, where=f"{file}:{line + 1}" if line else str(file), fix=fix)
