"""A document of any kind as blocks of text: its kind is detected by content first, then the reader of it is called.

No library is imported before a file of its kind is read. Plain text files are read here.
"""

from __future__ import annotations

import codecs
import re
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal

from sftplay.data.encoding import SAMPLE_BYTES, detect_encoding, detect_stream_encoding
from sftplay.data.files import BOM, UNDECODABLE, Charset, open_bytes
from sftplay.errors import DataError, MachineError

BlockKind = Literal["heading", "paragraph", "list", "table", "code"]

Reason = Literal["empty", "encrypted", "scanned", "broken", "wrong_format", "too_large", "encoding", "unsafe"]
"""`unsafe`: reading it would take memory or reach files and hosts without need, as zip bombs and XML entities do."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a document that is not divided: a heading, a paragraph, a whole list, table or piece of code."""

    text: str
    """Markdown, without blank lines around it. Only `|` in the cells of a table is escaped."""

    kind: BlockKind = "paragraph"

    level: int = 0
    """Of a heading, 1 to 6; 0 for all else."""

    page: int | None = None
    """The page, slide or sheet on which the block begins, from 1; None where the format has no pages."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """A document's text. It has at least one block with text."""

    title: str
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    """Remarks for the report, such as "2 of 7 pages have no text"."""

    guessed_encoding: str = ""
    """The encoding that was taken for a text that is not UTF-8 and names none."""


class Unreadable(Exception):
    """A document gives no text; the reason is one word for counting, the detail is for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def need(*modules: str, kind: str) -> None:
    """Raise MachineError where a library of a kind of documents is not installed; import none."""
    lacking = [name for name in modules if find_spec(name) is None]
    if lacking:
        raise MachineError(f"{kind} documents need {', '.join(lacking)}", fix="make install EXTRAS=ingest")


def find_heading(blocks: Iterable[Block]) -> str:
    """Return the text of the first heading; empty where there is none."""
    return next((block.text.lstrip("# ") for block in blocks if block.level), "")


def heading(text: str, level: int, *, page: int | None = None) -> Block:
    level = min(max(level, 1), 6)
    return Block(f"{'#' * level} {' '.join(text.split())}", "heading", level, page)


def to_fence(text: str, language: str = "", *, page: int | None = None) -> Block:
    """Return code in a fence that is longer than every one in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return Block(f"{fence}{language}\n{text}\n{fence}", "code", page=page)


def as_markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as a Markdown table with the first row as the head; empty rows and columns are left out."""
    kept = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    kept = [row for row in kept if any(row)]
    width = max(map(len, kept), default=0)
    used = [place for place in range(width) if any(place < len(row) and row[place] for row in kept)]
    if not used:
        return ""
    lines = ["| " + " | ".join(row[place] if place < len(row) else "" for place in used) + " |" for row in kept]
    return "\n".join([lines[0], "|" + " --- |" * len(used), *lines[1:]])


CONTENTS = re.compile(r"(?:table of )?contents|on this page|in this article", re.I)


def without_empty_contents(blocks: list[Block]) -> list[Block]:
    """Return the blocks without the headings of removed tables of contents."""
    kept = []
    for block, after in zip(blocks, [*blocks[1:], Block("", "heading")]):
        if not (block.kind == after.kind == "heading" and CONTENTS.fullmatch(block.text.lstrip("# "))):
            kept.append(block)
    return kept


MOST_BYTES = 64 << 20
"""Of one text file. The text, its blocks and their row are in memory together, at up to four bytes a character."""

WESTERN = "cp1252"
"""Taken where nothing is likelier: browsers read a page that names no encoding so (WHATWG, Encoding Standard)."""

NO_TEXT = re.compile(rb"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""Control characters that no text holds: all but white space, form feeds, and the escape that terminals and JIS use."""


def read_characters(path: Path, encoding: str = "auto", *, most: int = MOST_BYTES) -> tuple[str, str]:
    """Return the whole text, and its encoding where that was guessed, see `open_charset`.
    Raise Unreadable where it is too large, binary, or not in the encoding.
    """
    check_size(path, most)
    charset, guessed = open_charset(path, encoding)
    with charset.open(newline=None) as stream:
        text = stream.read().removeprefix(BOM)
    check_characters(text, charset)
    return text, guessed


def check_size(path: Path, most: int = MOST_BYTES) -> None:
    """Raise Unreadable where a file that is read as a whole is too large."""
    size = path.stat().st_size
    if size > most:
        raise Unreadable("too_large", f"{size >> 20} MiB; such files are read up to {most >> 20} MiB")


def open_charset(path: Path, encoding: str) -> tuple[Charset, str]:
    """Return the file's encoding, and its name where it was guessed: it is not UTF-8, and nothing names another one.
    Raise Unreadable where the file is no text, or Python knows no encoding of that name.
    """
    try:
        charset = Charset(path, encoding)
    except DataError as error:
        raise Unreadable("wrong_format", error.what) from None
    if encoding != "auto" or not charset.is_utf8:
        return charset, ""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as stream, suppress(UnicodeDecodeError):
        while piece := stream.read(1 << 20):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
        return charset, ""
    with path.open("rb") as stream:
        _check_text(stream.read(SAMPLE_BYTES))
    with open_bytes(path) as stream:
        guessed = detect_stream_encoding(stream) or WESTERN
    return Charset(path, guessed), guessed


def guess_encoding(data: bytes) -> str:
    """Return the likeliest encoding of bytes that are not UTF-8; raise Unreadable where they are no text."""
    _check_text(data[:SAMPLE_BYTES])
    return detect_encoding(data) or WESTERN


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


START = re.compile(r"^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.*\*\*\*[ \t]*$", re.M)
END = re.compile(r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG EBOOK|End of (?:the )?Project Gutenberg)", re.M)
TITLE = re.compile(r"^Title:[ \t]*(\S.*)$", re.M)


def cut_licence(text: str) -> tuple[str, str]:
    """Return the title in the header and the text between header and licence; "" and all of the text elsewhere."""
    start = START.search(text)
    if not start:
        return "", text
    title = TITLE.search(text, 0, start.start())
    end = END.search(text, start.end())
    return title[1].strip() if title else "", text[start.end() : end.start() if end else None]


def cut_blocks(blocks: list[Block]) -> list[Block]:
    """Do the same for a document in blocks."""
    first = next((place for place, block in enumerate(blocks) if START.search(block.text)), None)
    if first is None:
        return blocks
    rest = blocks[first + 1 :]
    last = next((place for place, block in enumerate(rest) if END.search(block.text)), len(rest))
    return rest[:last]


CHAPTER = re.compile(r"(?:chapter|part|book|appendix|section)\s+(?:[ivxlcdm]+|\d+|[a-z])\b[.:]?.*", re.I)
UNDERLINE = re.compile(r"([=\-~*#^])\1{2,}")
LONGEST_HEADING, LONGEST_TITLE = 80, 200

NARROWEST_WRAP, JOINED_SHARE = 50, 0.75
"""Columns below which no program breaks lines; the share of a paragraph's breaks that the width must explain."""


def read_plain(path: Path, encoding: str) -> Extracted:
    text, guessed = read_characters(path, encoding)
    named, text = cut_licence(text)
    blocks = tuple(split_plain(text))
    title = named or find_heading(blocks)
    if not title and blocks:
        first = blocks[0].text.split("\n")[0].strip()
        title = first if len(first) <= LONGEST_HEADING else path.stem
    return Extracted(title[:LONGEST_TITLE], blocks, guessed_encoding=guessed)


def split_plain(text: str) -> list[Block]:
    """Return the paragraphs of a text as blocks."""
    paragraphs = split_paragraphs(text)
    width = wrap_width(paragraphs)
    return [to_block(paragraph, width) for paragraph in paragraphs]


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, which empty lines divide."""
    parts = [part.strip("\n").rstrip() for part in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text)]
    return [part for part in parts if part.strip()]


def wrap_width(paragraphs: list[str]) -> int:
    """Return the column at which lines of the paragraphs were broken; 0 where they were not.

    A few lines of a broken text are longer: a word or an address without a break.
    """
    lengths = sorted(len(line) for part in paragraphs for line in part.split("\n")[:-1])
    width = lengths[int(len(lengths) * 0.98)] if lengths else 0
    return width if width >= NARROWEST_WRAP else 0


def to_block(part: str, width: int) -> Block:
    """Return one paragraph of a text broken at `width`; a heading where it is a chapter's line or underlined."""
    lines = part.split("\n")
    if len(lines) == 2 and UNDERLINE.fullmatch(lines[1].strip()) and len(lines[0].strip()) <= LONGEST_HEADING:
        return heading(lines[0], 1 if lines[1].strip()[0] in "=#*" else 2)
    if len(lines) == 1 and len(part) <= LONGEST_HEADING and CHAPTER.fullmatch(part.strip()):
        return heading(part, 2)
    # The paragraph becomes one line where the width explains its breaks: the next word would not have fitted.
    breaks = [len(line.rstrip()) + 1 + len((after.split() or [""])[0]) > width - 4 for line, after in pairwise(lines)]
    is_wrapped = width and breaks and sum(breaks) >= JOINED_SHARE * len(breaks)
    return Block(" ".join(line.strip() for line in lines) if is_wrapped else part)


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
        module, name = READERS[kind]
        found: Extracted = getattr(import_module(f"sftplay.data.ingest.extract.{module}"), name)(path, encoding)
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
