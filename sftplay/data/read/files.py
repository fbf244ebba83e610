"""Files with rows: the files below a path, their kinds, and their bytes, unpacked.

What the bytes mean is decided in `jsonl`, `json_document` and `tables`.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from sftplay.errors import DataError

PLAIN = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PACKED = tuple(f"{suffix}.gz" for suffix in PLAIN if suffix != ".parquet")
SUFFIXES = (*PLAIN, *PACKED)

FOREIGN = (
    (b"\x1f\x8b", "a gzip file", "add .gz to its name"),
    (b"PAR1", "a parquet file", "name it .parquet"),
    (b"PK\x03\x04", "a zip archive or an office document", "unpack it, or save it as csv or jsonl"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it, or pack it with gzip"),
    (b"BZh", "a bzip2 file", "unpack it, or pack it with gzip"),
    (b"\xfd7zXZ\x00", "an xz file", "unpack it, or pack it with gzip"),
    (b"ARROW1", "an arrow file", "save it as parquet"),
    (b"%PDF-", "a PDF", "rows are read from jsonl, json, csv, tsv and parquet"),
)
"""First bytes of kinds that are sometimes given a text file's name; no row begins with them."""

BUFFER_BYTES = 1 << 18


def find_suffix(path: str | Path) -> str:
    """Return the known suffix that a path ends with, such as `.jsonl` or `.csv.gz`; empty when it has none."""
    name = Path(path).name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix) and name != suffix), "")


def list_files(path: str) -> list[Path]:
    """List the file itself, or every known file below the folder, sorted; hidden ones are skipped.

    Raises DataError: there is nothing of that name, its kind is unknown, or the folder holds no known file.
    """
    given, known = Path(path), ", ".join(SUFFIXES)
    mode = _read_mode(given) if path else 0
    if stat.S_ISDIR(mode):
        if found := [file for file in _list_below(given) if find_suffix(file)]:
            return found
        raise DataError("is a folder without a file of rows", where=path, fix=f"put one there ({known})")
    if not mode:
        fix = "correct data.train_path / data.val_path; paths are relative to the current directory"
        raise DataError("there is no such file", where=path, fix=fix)
    if not stat.S_ISREG(mode):
        raise DataError("is neither a file nor a folder", where=path, fix="give rows in a file or a folder")
    if not find_suffix(given):
        raise DataError(f"unknown kind of file {given.suffix!r}", where=path, fix=f"convert it to one of {known}")
    return [given]


def other_files(path: str) -> list[str]:
    """List the files in a folder that are not read, relative to it: of other kinds; hidden ones are not listed."""
    folder = Path(path)
    files = _list_below(folder) if stat.S_ISDIR(_read_mode(folder)) else []
    return [str(file.relative_to(folder)) for file in files if not find_suffix(file)]


def open_bytes(file: Path) -> BinaryIO:
    """Open the file's bytes, unpacked where it is gzip; the caller closes it."""
    if file.suffix.lower() == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(file)), BUFFER_BYTES)
    return file.open("rb", BUFFER_BYTES)


def _read_mode(path: Path) -> int:
    """Return the mode of a path; 0 where there is nothing, or where nothing can have that name."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def _list_below(folder: Path) -> list[Path]:
    """List all files below a folder that are not hidden, by name; links to folders are not followed."""

    def refuse(error: OSError) -> NoReturn:
        where = str(error.filename)
        raise DataError(f"cannot be read: {error.strerror}", where=where, fix="check its permissions") from error

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    found.sort(key=lambda file: file.parts)
    for file in found:
        try:
            str(file).encode("utf-8")
        except UnicodeEncodeError as error:
            what = "holds a file with a name that is not UTF-8"
            raise DataError(what, where=str(folder), fix=f"rename {str(file)!r}") from error
    return [file for file in found if file.is_file()]
