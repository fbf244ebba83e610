"""A text file's characters, whole, with their line ends made one kind; and the encoding of one that names none."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from sftplay.data.ingest.extract.document import Unreadable
from sftplay.data.read.encodings import BOM, SAMPLE_BYTES, UNDECODABLE, Charset, likely_encoding, likely_encoding_of
from sftplay.errors import DataError

MOST_BYTES = 64 << 20
"""Of one text file. The text, its blocks and their row stand in memory together, at up to four bytes a character."""

READ_BYTES = 1 << 20
WESTERN = "cp1252"
"""Taken where nothing is likelier: browsers read a page that names no encoding so (WHATWG, Encoding Standard)."""

NO_TEXT = re.compile(rb"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""Control characters that no text holds: all but white space, form feeds, and the escape that terminals and JIS use."""


class Characters(NamedTuple):
    """The characters of a document."""

    text: str
    guessed_encoding: str = ""
    """The encoding that was taken for bytes that are not UTF-8 and name none; empty where it is known."""


def read_characters(path: Path, encoding: str = "auto", *, most: int = MOST_BYTES) -> Characters:
    """The whole text.

    Raises:
        Unreadable: it is too large, binary, or not in the encoding.
    """
    size = path.stat().st_size
    if size > most:
        raise Unreadable("too_large", f"{size >> 20} MiB of text; {most >> 20} MiB are read: split the file")
    charset, guessed = open_charset(path, encoding)
    with charset.open(newline=None) as stream:
        text = stream.read().removeprefix(BOM)
    check_characters(text, charset)
    return Characters(text, guessed)


def open_charset(path: Path, encoding: str) -> tuple[Charset, str]:
    """The file's encoding, and its name where it was guessed: the file is not UTF-8, and nothing names another one.

    Raises:
        Unreadable: the file is no text, or Python knows no encoding of that name.
    """
    try:
        charset = Charset(path, encoding)
    except DataError as error:
        raise Unreadable("wrong_format", error.what) from None
    if encoding != "auto" or not charset.is_utf8 or _is_utf8(path):
        return charset, ""
    with path.open("rb") as stream:
        _check_text(stream.read(SAMPLE_BYTES))
    guessed = likely_encoding(path) or WESTERN
    return Charset(path, guessed), guessed


def guess_encoding(data: bytes) -> str:
    """The likeliest encoding of bytes that are not UTF-8.

    Raises:
        Unreadable: they are no text.
    """
    _check_text(data[:SAMPLE_BYTES])
    return likely_encoding_of(data) or WESTERN


def check_characters(text: str, charset: Charset) -> None:
    """Raise Unreadable where a text, or a piece of one, holds NULs or bytes that are no character."""
    if "\0" in text:
        raise Unreadable("wrong_format", "the file is binary: it holds NUL characters")
    if UNDECODABLE in text:
        raise Unreadable("encoding", f"the file holds bytes that are not {charset.name.upper()}")


def _check_text(head: bytes) -> None:
    if b"\0" in head:
        raise Unreadable("wrong_format", "the file is binary: it holds NUL characters")
    if NO_TEXT.search(head):
        raise Unreadable("encoding", "the file is not UTF-8, and holds control characters that no text has")


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(READ_BYTES):
                decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
