"""Find files, decode their text, read their lines, each with its place, and check the values in their rows."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO, cast

from sftplay.data.records import Refused, Source
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
    Raise DataError where there is nothing of that name, its kind is unknown, or the folder holds no known file.
    """
    given, known = Path(path), ", ".join(SUFFIXES)
    mode = _read_mode(given) if path else 0
    if stat.S_ISDIR(mode):
        if found := [file for file in _list_below(given) if find_suffix(file)]:
            return found
        raise DataError("is a folder without a file of rows", where=path, fix=f"put one there ({known})")
    if not mode:
        fix = "correct DATA=, IN=, data.train_path or data.val_path; paths are relative to the current directory"
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


MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BOM = "\ufeff"

UNDECODABLE = "\udcff"  # stands for bytes that are no character; no decoder gives it for anything else


class Charset:
    """The encoding of one file, and the refusal of rows that are not in it."""

    def __init__(self, file: Path, named: str = "auto") -> None:
        """Find the encoding: a byte order mark proves it; else the one named; else UTF-16 by its NULs, or UTF-8."""
        self.file, self._is_named, self._reason = file, named != "auto", ""
        known = ""
        if self._is_named:
            from sftplay.data.encoding import find_encoding

            known = find_encoding(named)
        with open_bytes(file) as stream:
            head = stream.read(4096)
        for magic, kind, fix in FOREIGN:
            if head.startswith(magic):
                raise DataError(f"is {kind} by its first bytes", where=str(file), fix=fix)
        marked = next((name for mark, name in MARKS if head.startswith(mark)), "")
        if not marked and not known and b"\0" in head:
            from sftplay.data.encoding import detect_wide

            known = detect_wide(head)
        self.name = marked or known or "utf-8"

    @property
    def is_utf8(self) -> bool:
        """Lines may be handed on as bytes."""
        return self.name == "utf-8"

    def open(self, newline: str | None) -> TextIO:
        """Open the file as text; bytes that are no character become UNDECODABLE. The caller closes it."""

        def mark(error: UnicodeError) -> tuple[str, int]:
            if not isinstance(error, UnicodeDecodeError):
                raise error
            return UNDECODABLE, error.end

        codecs.register_error("sftplay.undecodable", mark)
        return io.TextIOWrapper(open_bytes(self.file), self.name, errors="sftplay.undecodable", newline=newline)

    def refused(self) -> Refused:
        """Return the refusal of a row with bytes that are no character."""
        if not self._reason:
            from sftplay.data.encoding import detect_stream_encoding

            likely = ""
            if self.is_utf8 and not self._is_named:
                with open_bytes(self.file) as stream:
                    likely = detect_stream_encoding(stream)
            advice = f"the file looks like {likely}: set data.encoding: {likely}" if likely else "see data.encoding"
            self._reason = f"holds bytes that are not {self.name.upper()}" + ("" if self._is_named else f"; {advice}")
        return Refused(self._reason)

    def refuses(self, text: str) -> bool:
        """Return whether the row's text holds such bytes."""
        return not text.isascii() and UNDECODABLE in text


BROKEN_JSON = (ValueError, RecursionError)
"""Errors that decoding raises: RecursionError for nesting deeper than the interpreter's stack."""


def decode_json(text: str) -> Any:
    """Return the value; a repeated key in one object is an error, since json would keep only the last."""
    return _DECODER.decode(text)


def describe_json_error(error: Exception) -> str:
    """Describe what is wrong with a text that `decode_json` refused."""
    if isinstance(error, json.JSONDecodeError):
        at = min(error.pos, len(error.doc.rstrip("\r\n")))  # the end of the row's own line begins no other line
        line, column = error.doc.count("\n", 0, at) + 1, at - error.doc.rfind("\n", 0, at)
        place = f"column {column}" if line == 1 else f"line {line} column {column}"
        return f"is not JSON: {error.msg} at {place}"
    return str(error) if isinstance(error, RepeatedKeyError) else f"is not JSON that can be read: {error}"


class RepeatedKeyError(ValueError):
    """An object names a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"has the key {twice[:60]!r} twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def describe_type(value: object) -> str:
    """Name a json value's type in words, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


RowFields = Mapping[str, Any]

FIX_ROW = "correct the row, or leave such rows out with data.on_bad_row: skip"


def refuse(what: str, fix: str = FIX_ROW) -> NoReturn:
    """Raise the DataError that `convert` completes with file and line."""
    raise DataError(what, fix=fix)


def listed(names: Iterable[object]) -> str:
    """Quote up to eight of the names."""
    keys = [repr(key)[:40] for key in names]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "(none)"


def expect_text(value: object, name: str) -> str:
    """Return `value` if it is a text of valid characters."""
    if not isinstance(value, str):
        refuse(f"{name} is {describe_type(value)}, not a text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            refuse(f"{name} holds something at character {error.start + 1} that is not valid Unicode")
    return value


def expect_list(value: object, name: str, *, of: str) -> Sequence[Any]:
    """Return `value` if it is a list, or the list in its JSON text: a csv cell can hold a list only as text."""
    if isinstance(value, str):
        value = parse_json(value, name, due=f"a list of {of}")
    if not isinstance(value, list | tuple):
        refuse(f"{name} is {describe_type(value)}, not a list of {of}")
    return value


def parse_json(text: str, name: str, *, due: str) -> Any:
    """Return the value of a JSON text; `due` names what the error expects there."""
    try:
        return decode_json(text)
    except BROKEN_JSON as error:
        refuse(f"{name} is a text that is not JSON, where {due} is due: it {describe_json_error(error)}")


def is_blank(value: object) -> bool:
    """Return True for an empty value of an optional column: null, an empty text or an empty list."""
    return value is None or value in ("", [], {}) or (isinstance(value, str) and value.isspace())


JsonRow = dict[str, Any]
UnparsedRow = bytes | str | JsonRow | Refused

LONGEST = 1 << 26
"""Most bytes or characters of one row: more is a file without line ends, and would not fit into memory."""

TOO_LONG = "is longer than {:,} characters"


def parsed(raw: UnparsedRow) -> JsonRow | Refused:
    """Return the row in a raw line; what is a row or refused already stays what it is."""
    if isinstance(raw, bytes):
        try:
            raw = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return Refused(f"byte {error.start + 1} of the line is not UTF-8")
    if not isinstance(raw, str):
        return raw
    try:
        # Files that were put together keep a mark where the second began.
        value = decode_json(raw.removeprefix(BOM))
    except BROKEN_JSON as error:
        return Refused(describe_json_error(error))
    return value if isinstance(value, dict) else Refused(f"is {describe_type(value)}, not an object")


def byte_lines(charset: Charset) -> Iterator[tuple[Source, bytes | Refused]]:
    """Yield every line that is not blank, as bytes of UTF-8, not parsed yet."""
    path, number = str(charset.file), 0
    with open_bytes(charset.file) as stream:
        while line := stream.readline(LONGEST):  # bytes: only \n ends a line there, not the U+2028 inside a string
            number += 1
            if len(line) == LONGEST and not line.endswith(b"\n"):
                while not line.endswith(b"\n") and (line := stream.readline(LONGEST)):
                    pass
                yield Source(path, number), Refused(TOO_LONG.format(LONGEST))
            elif line.isspace() or (number == 1 and not line.removeprefix(codecs.BOM_UTF8).strip()):
                continue
            else:
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError:
                    yield Source(path, number), charset.refused()
                else:
                    yield Source(path, number), line
