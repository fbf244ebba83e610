"""Rows that are one line of JSON each. Only a line feed ends a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sftplay.data.json_text import BROKEN_JSON, decode_json, flaw_of
from sftplay.data.layouts.fields import kind_of
from sftplay.data.read.encodings import BOM, Charset, is_utf8
from sftplay.data.read.files import open_bytes
from sftplay.data.records import Refused, Source

Row = dict[str, Any]
Raw = bytes | str | Row | Refused

LONGEST = 1 << 26
"""Most bytes or characters of one row: more is a file without line ends, and would not fit into memory."""

BOM_BYTES = BOM.encode()


def line_rows(charset: Charset) -> Iterator[tuple[Source, bytes | str | Refused]]:
    """Every line that is not blank, not parsed yet: bytes of UTF-8, or text where the file is in another encoding."""
    return _byte_lines(charset) if charset.is_utf8 else text_lines(charset)


def parsed(raw: Raw) -> Row | Refused:
    """The row in a raw line; what is a row or refused already stays what it is."""
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
        return Refused(flaw_of(error))
    return value if isinstance(value, dict) else Refused(f"is {kind_of(value)}, not an object")


def too_long() -> Refused:
    """What stands for a row that is longer than LONGEST."""
    return Refused(f"is longer than {LONGEST:,} characters")


def _byte_lines(charset: Charset) -> Iterator[tuple[Source, bytes | Refused]]:
    path, number = str(charset.file), 0
    with open_bytes(charset.file) as stream:
        while line := stream.readline(LONGEST):  # bytes: only \n ends a line there, not the U+2028 inside a string
            number += 1
            if len(line) == LONGEST and not line.endswith(b"\n"):
                while not line.endswith(b"\n") and (line := stream.readline(LONGEST)):
                    pass
                yield Source(path, number), too_long()
            elif line.isspace() or (number == 1 and not line.removeprefix(BOM_BYTES).strip()):
                continue
            elif line.isascii() or is_utf8(line):
                yield Source(path, number), line
            else:
                yield Source(path, number), charset.refused()


def text_lines(charset: Charset) -> Iterator[tuple[Source, str | Refused]]:
    """Every line that is not blank, as text in the file's encoding."""
    path, number = str(charset.file), 0
    with charset.open(newline="\n") as stream:
        while line := stream.readline(LONGEST):
            number += 1
            if len(line) == LONGEST and not line.endswith("\n"):
                while not line.endswith("\n") and (line := stream.readline(LONGEST)):
                    pass
                yield Source(path, number), too_long()
            elif not line.isspace() and line.strip(f"{BOM} \r\n\t"):
                yield Source(path, number), charset.refused() if charset.refuses(line) else line
