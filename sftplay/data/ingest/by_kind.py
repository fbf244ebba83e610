"""Detect what kind of document a file is, by its content first, and call the reader of that kind.

No library is imported before a file of its kind is read.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from sftplay.data.ingest.extract.document import Extracted, Unreadable
from sftplay.errors import MachineError

SUFFIXES = {
    **dict.fromkeys((".txt", ".text"), "txt"),
    **dict.fromkeys((".md", ".markdown"), "md"),
    **dict.fromkeys((".rst", ".rest"), "rst"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".docx", ".docm", ".dotx"), "docx"),
    **dict.fromkeys((".pptx", ".pptm", ".ppsx"), "pptx"),
    **dict.fromkeys((".xlsx", ".xlsm"), "xlsx"),
    **dict.fromkeys((".odt", ".odp", ".ods", ".ott"), "odf"),
    ".pdf": "pdf",
    ".eml": "eml",
}
"""File name ending -> kind; what a walk over a folder takes as documents."""

READERS = {
    "txt": ("document", "read_plain"),
    "md": ("markup", "read_markdown"),
    "rst": ("markup", "read_restructured"),
    "eml": ("markup", "read_mail"),
    "html": ("markup", "read_page"),
    "docx": ("office", "read_word"),
    "pptx": ("slides", "read_slides"),
    "xlsx": ("slides", "read_sheets"),
    "odf": ("office", "read_opendocument"),
    "pdf": ("pdf", "read_pdf"),
}
"""Kind -> the module below `extract` and its function; it is imported when a file of the kind is read."""

TEXT_KINDS = ("txt", "md", "rst", "eml", "html")
"""Kinds that cannot be told apart by content with certainty: the file name decides."""

FOREIGN_BEGINNINGS = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"II*\0", "a TIFF image"),
    (b"\x1f\x8b", "a gzip file"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ\0", "an xz file"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"SQLite format 3", "a database"),
    (b"PAR1", "a parquet file"),
    (b"{\\rtf", "an RTF document: save it as docx"),
)
"""First bytes of kinds that are sometimes given a document's name."""

KIND_BY_PART = {
    "word/document.xml": "docx",
    "ppt/presentation.xml": "pptx",
    "xl/workbook.xml": "xlsx",
    "content.xml": "odf",
}
"""A part of a zip archive -> the kind of document that has it."""

OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
LOCKED_STREAM = "EncryptedPackage".encode("utf-16-le")
"""The name of a stream in a locked docx, pptx or xlsx, which is packed as an old Office file is ([MS-OFFCRYPTO])."""

HTML_BEGINNING = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype html|html[\s>])", re.I | re.S
)
HEAD_BYTES = 4096
DIRECTORY_BYTES = 1 << 16


def extract(path: Path, encoding: str = "auto") -> Extracted:
    """Return the document's title and blocks.

    `encoding` is that of text files without a byte order mark; "auto" takes UTF-8, UTF-16 where it shows, else the
    likeliest one, with a note.

    Raises:
        Unreadable: it gives no text, with the reason.
        MachineError: the library for this kind is not installed.
        MemoryError: it does not fit into the memory limit of one document.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise Unreadable("broken", f"the file cannot be opened: {error.strerror}") from None
    if not head.strip():
        raise Unreadable("empty", "the file is empty" if not head else "the file begins with nothing but white space")
    kind = detect_kind(path, head)
    try:
        found = find_reader(kind)(path, encoding)
    except (Unreadable, MachineError, MemoryError):
        raise
    except Exception as error:  # the border to foreign parsers: whatever they raise is a counted record
        raise Unreadable("broken", f"{type(error).__name__}: {error}"[:300]) from error
    if not any(block.text.strip() for block in found.blocks):
        raise Unreadable("empty", "the document holds no text")
    if found.guessed_encoding:
        note = f"not UTF-8 and names no encoding: read as {found.guessed_encoding}, the likeliest"
        found = replace(found, notes=(*found.notes, note))
    named = SUFFIXES.get(path.suffix.lower())
    if named != kind:
        found = replace(found, notes=(*found.notes, f"read as {kind} by its content, the name ends in {path.suffix!r}"))
    return found


def detect_kind(path: Path, head: bytes) -> str:
    """Return the kind of a document with these first bytes. Raise Unreadable where it is not supported."""
    named = SUFFIXES.get(path.suffix.lower(), "")
    foreign = next((name for magic, name in FOREIGN_BEGINNINGS if head.startswith(magic)), "")
    if foreign:
        raise Unreadable("wrong_format", f"the content is {foreign}; the name ends in {path.suffix!r}")
    if b"%PDF-" in head[:1024] and (named not in TEXT_KINDS or head.startswith(b"%PDF-")):
        return "pdf"
    if head.startswith(OLD_OFFICE):
        with path.open("rb") as stream:
            ends = stream.read(DIRECTORY_BYTES)
            stream.seek(max(path.stat().st_size - DIRECTORY_BYTES, 0))
            if LOCKED_STREAM in ends + stream.read(DIRECTORY_BYTES):
                raise Unreadable("encrypted", "the office document is locked by a password")
        what = "an old Office document (doc, xls, ppt) or a mail of Outlook: save it as docx"
        raise Unreadable("wrong_format", what)
    if head.startswith(b"PK\x03\x04"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = {name.lstrip("/") for name in archive.namelist()}
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise Unreadable("broken", f"the archive cannot be opened: {error}") from None
        kind = next((kind for part, kind in KIND_BY_PART.items() if part in names), "")
        if not kind:
            raise Unreadable("wrong_format", "the content is a zip archive without a document")
        return kind
    if HTML_BEGINNING.match(head):
        return "html"
    if named in TEXT_KINDS:
        return named
    what = "damaged from its first byte or" if named else "of an unknown kind,"
    raise Unreadable("wrong_format", f"the content is {what} something else than {path.suffix!r} says")


def find_reader(kind: str) -> Callable[[Path, str], Extracted]:
    module, name = READERS[kind]
    reader: Callable[[Path, str], Extracted] = getattr(import_module(f"sftplay.data.ingest.extract.{module}"), name)
    return reader
