"""Find files, decode their text, and read rows of JSON with their place."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO, cast

from sftplay.data.records import Refused, Source
from sftplay.data.turns import BROKEN_JSON, decode_json, describe_json_error, describe_type
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


MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BOM = "\ufeff"

UNDECODABLE = "\udcff"  # stands for bytes that are no character; no decoder gives it for anything else
LIKELY = ["cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r"]
LIKELY += ["shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"]
SAMPLE_BYTES, SEARCHED_BYTES = 1 << 16, 1 << 24


class Charset:
    """The encoding of one file, and the refusal of rows that are not in it."""

    def __init__(self, file: Path, named: str = "auto") -> None:
        """Find the encoding: a byte order mark proves it; else the one named; else UTF-16 shows by its NULs, or UTF-8.
        Raise DataError where there is no encoding of that name, or the file is no text at all.
        """
        self.file, self._is_named, self._reason = file, named != "auto", ""
        known = _find_encoding(named) if self._is_named else ""
        with open_bytes(file) as stream:
            head = stream.read(4096)
        for magic, kind, fix in FOREIGN:
            if head.startswith(magic):
                raise DataError(f"is {kind} by its first bytes", where=str(file), fix=fix)
        marked = next((name for mark, name in MARKS if head.startswith(mark)), "")
        self.name = marked or known or _detect_wide(head) or "utf-8"

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
            likely = detect_file_encoding(self.file) if self.is_utf8 and not self._is_named else ""
            advice = f"the file looks like {likely}: set data.encoding: {likely}" if likely else "see data.encoding"
            self._reason = f"holds bytes that are not {self.name.upper()}" + ("" if self._is_named else f"; {advice}")
        return Refused(self._reason)

    def refuses(self, text: str) -> bool:
        """Return whether the row's text holds such bytes."""
        return not text.isascii() and UNDECODABLE in text


def _find_encoding(name: str) -> str:
    """Return Python's own name for an encoding of text files, or raise DataError."""
    # For names and source code, or of Windows only.
    not_of_files = ("undefined", "idna", "punycode", "mbcs", "oem", "unicode_escape", "raw_unicode_escape")
    with suppress(LookupError, ValueError, TypeError):
        found = codecs.lookup(name)
        if found._is_text_encoding and found.name.replace("-", "_") not in not_of_files:
            return "utf-8" if found.name == "utf-8-sig" else found.name
    fix = "write auto, or a name such as cp1252, shift_jis or utf-16"
    raise DataError(f"Python knows no encoding of text called {name!r}", where="data.encoding", fix=fix)


def detect_file_encoding(file: Path) -> str:
    """Guess the encoding of a file by lines near its beginning that are not UTF-8; empty when nothing fits.

    For rows it is only a hint in an error. Documents are read in it, and the report says so.
    """
    part, n_read = b"", 0
    with open_bytes(file) as stream:
        while len(part) < SAMPLE_BYTES and n_read < SEARCHED_BYTES and (line := stream.readline(SAMPLE_BYTES)):
            n_read += len(line)
            part += b"" if is_utf8(line) else line
    return detect_encoding(part)


def detect_encoding(data: bytes) -> str:
    """As `detect_file_encoding`, for bytes at hand."""
    from charset_normalizer import from_bytes

    found = from_bytes(data[:SAMPLE_BYTES], cp_isolation=LIKELY)
    best = found.best()
    if best is None:
        return ""
    # Western files are many times more frequent than central European ones, which share many of its letters.
    western = any("cp1252" in match.could_be_from_charset and match.chaos <= best.chaos for match in found)
    return "cp1252" if western and best.encoding == "cp1250" else str(best.encoding)


def is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _detect_wide(head: bytes) -> str:
    """Return UTF-32 or UTF-16 without a mark: where letters of keys and brackets have their NULs."""
    n = len(head) // 4
    zeros = [head[place : 4 * n : 4].count(0) for place in range(4)]
    for name, (empty, mostly, full) in (("utf-32-le", (3, 2, 0)), ("utf-32-be", (0, 1, 3))):
        if n and zeros[empty] == n and 2 * zeros[mostly] > n > 2 * zeros[full]:
            return name
    even, odd = head[::2].count(0), head[1::2].count(0)
    # Two ASCII characters in UTF-16, as documents and headers begin.
    if re.match(rb"(?:[\t-~]\0){2}", head):
        return "utf-16-le"
    if re.match(rb"(?:\0[\t-~]){2}", head):
        return "utf-16-be"
    is_wide = max(even, odd) > len(head) // 64 and max(even, odd) >= 4 * min(even, odd)
    return ("utf-16-le" if odd > even else "utf-16-be") if is_wide else ""


JsonRow = dict[str, Any]
UnparsedRow = bytes | str | JsonRow | Refused

LONGEST = 1 << 26
"""Most bytes or characters of one row: more is a file without line ends, and would not fit into memory."""

BOM_BYTES = BOM.encode()
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
            elif line.isspace() or (number == 1 and not line.removeprefix(BOM_BYTES).strip()):
                continue
            elif line.isascii() or is_utf8(line):
                yield Source(path, number), line
            else:
                yield Source(path, number), charset.refused()


def text_lines(charset: Charset) -> Iterator[tuple[Source, str | Refused]]:
    """Yield every line that is not blank, as text in the file's encoding, not parsed yet."""
    path, number = str(charset.file), 0
    with charset.open(newline="\n") as stream:
        while line := stream.readline(LONGEST):
            number += 1
            if len(line) == LONGEST and not line.endswith("\n"):
                while not line.endswith("\n") and (line := stream.readline(LONGEST)):
                    pass
                yield Source(path, number), Refused(TOO_LONG.format(LONGEST))
            elif not line.isspace() and line.strip(f"{BOM} \r\n\t"):
                yield Source(path, number), charset.refused() if charset.refuses(line) else line


BLOCK = 1 << 16
MOST_OF_OBJECT = 1 << 30
"""Most characters of a document that is an object: it is held as a whole before its rows are known."""

DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\r\n]*")
FIX = "correct the file there; jsonl, one row a line, survives a broken row"


def document_rows(charset: Charset) -> Iterator[tuple[Source, str | Refused]]:
    """Yield every row of the document: the line at which it begins, and in an array its number from 1.
    Raise DataError where it is not JSON as a whole.
    """
    with charset.open(newline="") as stream:
        text = _Text(charset, stream)
        text.skip(BOM)
        first = text.next_character()
        if first == "[":
            yield from _array_rows(text)
            text.expect_end()
        elif first:
            yield from _object_rows(text)


class _Text:
    """A document and a place in it. It holds the unread rest of one block or of one row."""

    def __init__(self, charset: Charset, stream: TextIO, *, line: int = 1) -> None:
        """`line` is that of the document's first character."""
        self.charset, self._stream = charset, stream
        self._held, self._at = "", 0
        self._line, self._counted = line, 0  # the line of the character at _counted
        self.most = LONGEST

    def next_character(self) -> str:
        """Return the next character that is not white space; empty at the end. The place is then before it."""
        while True:
            found = SPACE.match(self._held, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._grow():
                return ""

    def skip(self, character: str) -> None:
        if self.next_character() == character:
            self._at += 1

    @property
    def line(self) -> int:
        """The line of the next character."""
        self._line += self._held.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def next_value(self) -> str:
        """Return the text of the next JSON value; the place is then after it."""
        self.next_character()
        while True:
            try:
                _, end = DECODER.raw_decode(self._held, self._at)
            except BROKEN_JSON as error:
                if isinstance(error, json.JSONDecodeError) and self._grow():
                    continue
                flaw = f": {error.msg}" if isinstance(error, json.JSONDecodeError) else f" that can be read: {error}"
                raise self.broken(f"is not JSON{flaw}", getattr(error, "pos", self._at)) from error
            if end == len(self._held) and self._grow():  # a number might go on
                continue
            value, self._at = self._held[self._at : end], end
            return value

    def expect_end(self) -> None:
        """Refuse what follows the document."""
        if self.next_character():
            raise self.broken("has text after the end of the JSON document")

    def broken(self, what: str, at: int | None = None) -> DataError:
        """Return the error about a character, by default the next one."""
        line = self.line + (0 if at is None else self._held.count("\n", self._at, at))
        return DataError(what, where=f"{self.charset.file}:{line}", fix=FIX)

    def _grow(self) -> bool:
        """Read more, at least as much as is held: all attempts to decode one value together then take linear time."""
        kept = self._held[self._at :]
        if len(kept) > self.most:
            raise self.broken(f"has a value of more than {self.most:,} characters, or one that never ends")
        more = self._stream.read(max(BLOCK, len(kept)))
        if more:
            self._line, self._counted = self.line, 0
            self._held, self._at = kept + more, 0
        return bool(more)


def _array_rows(text: _Text) -> Iterator[tuple[Source, str | Refused]]:
    """Yield the elements of the array that begins here; the place is then after it."""
    path, number = str(text.charset.file), 0
    text.skip("[")
    more = text.next_character() != "]"
    while more:
        number += 1
        text.next_character()
        source = Source(path, text.line, number)
        value = text.next_value()
        yield source, text.charset.refused() if text.charset.refuses(value) else value
        more = text.next_character() == ","
        if more:
            text.skip(",")
    if text.next_character() != "]":
        raise text.broken(f"row {number} is followed by neither a comma nor a closing bracket")
    text.skip("]")


def _object_rows(text: _Text) -> Iterator[tuple[Source, str | Refused]]:
    """Yield the rows of the one list in the object that begins here; the object itself where it is a row."""
    from sftplay.data.layouts import detect_layout  # imports the config, which rows of text do without

    charset, names, lists = text.charset, [], []
    text.most = MOST_OF_OBJECT
    text.next_character()
    first = text.line
    whole = text.next_value()
    text.expect_end()
    members = _Text(charset, io.StringIO(whole, newline=""), line=first)
    members.most = MOST_OF_OBJECT
    if members.next_character() == "{":
        members.skip("{")
        while members.next_character() != "}":
            names.append(json.loads(members.next_value()))
            members.skip(":")
            members.next_character()
            line, value = members.line, members.next_value()
            lists += [(value, line)] if value.startswith("[") else []
            members.skip(",")
    if detect_layout(names) is None and len(lists) == 1:
        rows, line = lists[0]
        yield from _array_rows(_Text(charset, io.StringIO(rows, newline=""), line=line))
    else:
        yield Source(str(charset.file), first), charset.refused() if charset.refuses(whole) else whole
