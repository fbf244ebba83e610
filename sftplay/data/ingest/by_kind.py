"""Finds out what kind of document a file is, by its content first, and gives it to that kind's reader.

No library is imported before a file of its kind is read.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from sftplay.data.ingest.extract.document import Extracted, Unreadable

SUFFIXES = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "md",
    ".markdown": "md",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".docx": "docx",
    ".pdf": "pdf",
}
"""File name ending -> kind; what a walk over a folder takes as documents."""

FOREIGN = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"SQLite format 3", "a database"),
)
"""First bytes of kinds that are sometimes given a document's name."""

HEAD_BYTES = 4096


def extract(path: Path, encoding: str = "auto") -> Extracted:
    """The document's title and blocks.

    `encoding` is that of text files without a byte order mark; "auto" takes UTF-8, or UTF-16 where it shows.

    Raises:
        Unreadable: it gives no text, with the reason.
        MachineError: the library for this kind is not installed.
    """
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if not head.strip():
        raise Unreadable("empty", "the file is empty" if not head else "the file holds only white space")
    kind = kind_of(path, head)
    found = reader_of(kind)(path, encoding)
    if not any(block.text.strip() for block in found.blocks):
        raise Unreadable("empty", "the document holds no text")
    return found


def kind_of(path: Path, head: bytes) -> str:
    """The kind of a document with these first bytes.

    Raises:
        Unreadable: it is no kind that is read.
    """
    suffix = path.suffix.lower()
    foreign = next((name for magic, name in FOREIGN if head.startswith(magic)), "")
    if foreign or suffix not in SUFFIXES:
        raise Unreadable("wrong_format", f"the content is {foreign or 'of an unknown kind'}, the name ends in {suffix}")
    return SUFFIXES[suffix]


READERS = {
    "txt": ("text.plain", "read_plain"),
    "md": ("text.markdown", "read_markdown"),
    "html": ("markup.page", "read_page"),
    "docx": ("office.word", "read_word"),
    "pdf": ("pdf.read", "read_pdf"),
}
"""Kind -> the module below `extract` and its function; it is imported when a file of the kind is read."""


def reader_of(kind: str) -> Callable[[Path, str], Extracted]:
    """The function that reads a kind."""
    module, name = READERS[kind]
    reader: Callable[[Path, str], Extracted] = getattr(import_module(f"sftplay.data.ingest.extract.{module}"), name)
    return reader
