"""A text file's characters, whole, with their line ends made one kind."""

from __future__ import annotations

from pathlib import Path

from sftplay.data.ingest.extract.document import Unreadable
from sftplay.data.read.encodings import BOM, UNDECODABLE, Charset, likely_encoding
from sftplay.errors import DataError

MOST_BYTES = 64 << 20
"""Of one text file. The text, its blocks and their row stand in memory together, at up to four bytes a character."""


def read_characters(path: Path, encoding: str = "auto", *, most: int = MOST_BYTES) -> str:
    """The whole text.

    Raises:
        Unreadable: it is too large, binary, or not in the encoding.
    """
    size = path.stat().st_size
    if size > most:
        raise Unreadable("too_large", f"{size >> 20} MiB of text; {most >> 20} MiB are read: split the file")
    try:
        charset = Charset(path, encoding)
    except DataError as error:
        raise Unreadable("wrong_format", error.what) from error
    with charset.open(newline=None) as stream:
        text = stream.read().removeprefix(BOM)
    if "\0" in text:
        raise Unreadable("wrong_format", "the file is binary: it holds NUL characters")
    if UNDECODABLE in text:
        likely = likely_encoding(path) if charset.is_utf8 else ""
        advice = f"; it looks like {likely}" if likely else ""
        raise Unreadable("encoding", f"the file holds bytes that are not {charset.name.upper()}{advice}")
    return text
