"""Files that are read piece by piece, because they may be larger than memory: long texts, and tables of texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sftplay.data.ingest.extract.document import Unreadable
from sftplay.data.ingest.extract.text.characters import check_characters
from sftplay.data.read.encodings import BOM, Charset
from sftplay.data.read.files import suffix_of
from sftplay.data.read.jsonl import parsed
from sftplay.data.read.sources import Dialect, read_raw
from sftplay.data.read.tables import parquet_rows
from sftplay.data.records import Refused
from sftplay.errors import DataError

PART_CHARS = 1_000_000
"""Most characters of a document that is cut from a long text."""

READ_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class Part:
    """A document cut from a long text."""

    text: str
    begin: int
    """Its first character's place in the file's text, where each line ends in one character."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row of a table, or why it is no document."""

    number: int
    """Its line, or its place in a parquet file, from 1."""

    text: str = ""
    title: str = ""
    reason: str = ""
    detail: str = ""


def long_text(charset: Charset) -> Iterator[Part]:
    """A text in parts, cut between paragraphs where there is such a place, else between lines, else between words.

    Raises:
        Unreadable: it is binary, or not in the encoding.
    """
    buffer, begin = "", 0
    with charset.open(newline=None) as stream:
        while piece := stream.read(READ_CHARS):
            check_characters(piece, charset)
            buffer += piece if begin or buffer else piece.removeprefix(BOM)
            while len(buffer) > PART_CHARS:
                end = _place_to_cut(buffer)
                yield Part(buffer[:end], begin)
                buffer, begin = buffer[end:], begin + end
    if buffer:
        yield Part(buffer, begin)


def text_rows(path: Path, encoding: str) -> Iterator[TextRow]:
    """The rows of a jsonl or parquet file, each with its column `text`.

    Raises:
        Unreadable: the file is damaged, or none of that kind.
    """
    try:
        if suffix_of(path) == ".parquet":
            for source, row in parquet_rows(path, columns=("text", "title")):
                yield _text_row(source.line, row)
        else:
            for source, raw in read_raw(str(path), Dialect(encoding)):
                yield _text_row(source.line, parsed(raw))
    except DataError as error:
        raise Unreadable("broken", error.what) from error


def _text_row(number: int, row: dict[str, object] | Refused) -> TextRow:
    if isinstance(row, Refused):
        return TextRow(number, reason="broken_row", detail=row.reason)
    text, title = row.get("text"), row.get("title")
    if not isinstance(text, str):
        return TextRow(number, reason="no_text", detail=f"its keys are {', '.join(map(repr, list(row)[:10]))}")
    if not text.strip():
        return TextRow(number, reason="empty", detail="text is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        return TextRow(number, reason="broken_row", detail="holds half a character")
    return TextRow(number, text, title if isinstance(title, str) and title.isprintable() else "")


def _place_to_cut(text: str) -> int:
    """Behind the last paragraph, line or word in the second half of the allowed length."""
    for mark in ("\n\n", "\n", " "):
        place = text.rfind(mark, PART_CHARS // 2, PART_CHARS - len(mark))
        if place >= 0:
            return place + len(mark)
    return PART_CHARS
