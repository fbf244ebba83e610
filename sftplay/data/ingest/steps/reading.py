"""Read one file: clean its blocks, and write its documents into shards."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from sftplay.data.ingest.by_kind import HEAD_BYTES, detect_kind, extract
from sftplay.data.ingest.children.fork_server import FULL
from sftplay.data.ingest.extract.document import Block, Unreadable
from sftplay.data.ingest.extract.text import check_characters, open_charset, to_block, wrap_width
from sftplay.data.ingest.settings import ROWS
from sftplay.data.ingest.steps.cleaning import TextBlock, TextCleaner, line_keys, write_keys
from sftplay.data.read.encodings import BOM, Charset
from sftplay.data.read.files import find_suffix
from sftplay.data.read.json_rows import parsed
from sftplay.data.read.sources import Dialect, read_raw
from sftplay.data.read.tables import parquet_rows
from sftplay.data.records import Refused
from sftplay.errors import DataError, SftplayError

PART_CHARS = 1_000_000
"""Most characters of a document that is cut from a long text."""

READ_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class TextPart:
    """A document cut from a long text."""

    text: str
    begin: int
    """Offset of its first character in the file's text, with one character for each line end."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row of a table, or the reason why it is no document."""

    number: int
    """Its line, or its number in a parquet file, from 1."""

    text: str = ""
    title: str = ""
    reason: str = ""
    detail: str = ""


def long_text(charset: Charset) -> Iterator[TextPart]:
    """Yield a text in parts, cut between paragraphs if possible, else between lines, else between words.

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
                yield TextPart(buffer[:end], begin)
                buffer, begin = buffer[end:], begin + end
    if buffer:
        yield TextPart(buffer, begin)


def text_rows(path: Path, encoding: str) -> Iterator[TextRow]:
    """Yield the rows of a jsonl or parquet file, each with its column `text`.

    Raises:
        Unreadable: the file is damaged, or none of that kind.
    """
    try:
        if find_suffix(path) == ".parquet":
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
    """Return the end of the last paragraph, line or word in the second half of the allowed length."""
    for mark in ("\n\n", "\n", " "):
        place = text.rfind(mark, PART_CHARS // 2, PART_CHARS - len(mark))
        if place >= 0:
            return place + len(mark)
    return PART_CHARS


LONG_TEXT_BYTES = 16 << 20
"""A text file above this size is cut into documents of at most a million characters."""

SHARD_BYTES = 32 << 20

MOST_GROWTH, ALWAYS_BYTES = 50, 64 << 20
"""A file's text may be so many times larger than the file, and may always have this size."""

MOST_FRAMES, MOST_TRACE = 30, 20_000
"""Frames and characters that are kept of a traceback."""

EXAMPLES = 3
"""Refused rows of one file and reason that are shown."""

PARAGRAPHS = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


class ShardWriter:
    """Writes documents into numbered files of bounded size."""

    def __init__(self, stem: str, most_bytes: int) -> None:
        self._stem, self._most_bytes = stem, most_bytes
        self._in_shard = self._in_all = 0
        self.sizes: list[int] = []
        self._stream = self._open()

    def _open(self) -> BinaryIO:
        return Path(shard_path(self._stem, len(self.sizes))).open("wb")

    def write(self, document: dict[str, Any]) -> None:
        """Write one more document.

        Raises:
            Unreadable: the file's text is far larger than the file.
        """
        line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
        if self._in_shard and self._in_shard + len(line) > SHARD_BYTES:
            self.close()
            self._stream = self._open()
        self._stream.write(line)
        self._in_shard += len(line)
        self._in_all += len(line)
        if self._in_all > self._most_bytes:
            raise Unreadable("unsafe", f"its text is larger than {self._most_bytes >> 20} MiB")

    def close(self) -> None:
        """End the last shard."""
        self._stream.close()
        self.sizes.append(self._in_shard)
        self._in_shard = 0


def shard_path(stem: str, number: int) -> str:
    """Return the path of a shard."""
    return f"{stem}.{number:04}.jsonl"


LIBRARIES = {
    ".md": ("markdown_it",),
    ".html": ("lxml.html",),
    ".htm": ("lxml.html",),
    ".docx": ("lxml.etree",),
    ".pptx": ("lxml.etree", "pptx"),
    ".xlsx": ("openpyxl",),
    ".odt": ("lxml.etree",),
    ".pdf": ("pypdfium2.raw",),
    ".rst": ("docutils.core", "docutils.parsers.rst"),
    ".eml": ("email.parser", "email.policy"),
    ".parquet": ("pyarrow.parquet",),
}
"""File name ending -> modules that its reader imports. Imported before the first fork, they cost a file nothing."""


def warm_up(*suffixes: str) -> None:
    """Import the installed modules that the readers of such files need."""
    for name in {"ftfy", *(name for suffix in suffixes for name in LIBRARIES.get(suffix, ()))}:
        if find_spec(name.split(".")[0]):
            import_module(name)


def read_file(*, path: str, stem: str, size: int, mtime_ns: int, encoding: str, cleaning: list[str]) -> dict[str, Any]:
    """Write the file's documents into shards, and the keys of its lines; return the report on the file."""
    began, reader = time.monotonic(), _FileReader(Path(path), stem, size=size, encoding=encoding, cleaning=cleaning)
    try:
        found = reader.read()
    except Unreadable as error:
        found = {"status": "unreadable", "reason": error.reason, "detail": error.detail}
        if error.__cause__ is not None:  # the error of the reader: the fault of the document, or of the reader
            found["traceback"] = _trace(error.__cause__)
    except MemoryError:
        found = {"status": "unreadable", "reason": "memory", "detail": "its reader needs more memory than it may have"}
    except OSError as error:
        if error.errno in FULL:
            raise
        found = {"status": "unreadable", "reason": "not_readable", "detail": error.strerror or str(error)}
    except SftplayError as error:  # a library is missing: no file of this kind can be read here
        found = {"status": "stopped", "error": error.as_json()}
    except Exception as error:  # noqa: BLE001 - a document's parser is foreign code; its errors are counted
        detail = f"{type(error).__name__}: {error}"[:500]
        found = {"status": "unreadable", "reason": "broken", "detail": detail, "traceback": _trace(error)}
    if found["status"] != "stopped" and not _is_same(Path(path), size, mtime_ns=mtime_ns):
        found = {"status": "unreadable", "reason": "changed", "detail": "the file changed while it was read"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {**found, "seconds": time.monotonic() - began, "peak_bytes": peak}


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-MOST_FRAMES))[-MOST_TRACE:]


class _FileReader:
    """Reads one file into shards."""

    def __init__(self, path: Path, stem: str, *, size: int, encoding: str, cleaning: list[str]) -> None:
        self._path, self._stem, self._size, self._encoding = path, stem, size, encoding
        self._cleaner = TextCleaner(cleaning)
        self._shards = ShardWriter(stem, max(ALWAYS_BYTES, MOST_GROWTH * size))
        self._keys: set[int] = set()
        self._notes: list[str] = []
        self._guessed = ""
        self._refused: Counter[str] = Counter()
        self._examples: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any]:
        self._path.open("rb").close()  # a missing permission must not look like a wrong format
        n_documents = 0
        for document in self._documents():
            self._shards.write(document)
            n_documents += 1
        if not n_documents and not self._refused:
            raise Unreadable("empty", "the file has no rows")
        self._shards.close()
        write_keys(Path(f"{self._stem}.lines"), self._keys)
        with self._path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {
            "status": "read", "is_table": is_rows(self._path), "documents": n_documents, "notes": self._notes,
            "sha256": digest, "guessed_encoding": self._guessed,
            "shards": self._shards.sizes, "cleaned": dict(self._cleaner.changed), "dropped": dict(self._refused),
            "examples": self._examples,
        }  # fmt: skip

    def _documents(self) -> Iterator[dict[str, Any]]:
        if is_rows(self._path):
            yield from self._rows()
        elif self._size > LONG_TEXT_BYTES and _is_text(self._path):
            yield from self._parts()
        else:
            found = extract(self._path, self._encoding)
            self._notes, self._guessed = list(found.notes), found.guessed_encoding
            blocks = self._cleaned(found.blocks)
            self._keys = line_keys(blocks)
            title = self._cleaner.clean(Block(found.title))
            yield {"title": " ".join(title.split()), "blocks": blocks}

    def _rows(self) -> Iterator[dict[str, Any]]:
        for row in text_rows(self._path, self._encoding):
            if row.reason:
                self._refused[row.reason] += 1
                if self._refused[row.reason] <= EXAMPLES:
                    self._examples.append({"reason": row.reason, "row": row.number, "detail": row.detail})
            else:
                yield {"title": row.title, "text": row.text, "row": row.number}

    def _parts(self) -> Iterator[dict[str, Any]]:
        width = None
        charset, self._guessed = open_charset(self._path, self._encoding)
        for part in long_text(charset):
            paragraphs = [paragraph.strip("\n") for paragraph in PARAGRAPHS.split(part.text) if paragraph.strip()]
            width = wrap_width(paragraphs) if width is None else width
            blocks = self._cleaned(to_block(paragraph, width) for paragraph in paragraphs)
            yield {"title": self._path.stem, "blocks": blocks, "place": [part.begin, part.begin + len(part.text)]}

    def _cleaned(self, blocks: Iterable[Block]) -> list[TextBlock]:
        cleaned = ((self._cleaner.clean(block), block.kind, block.level, block.page) for block in blocks)
        return [block for block in cleaned if block[0]]


def is_rows(path: Path) -> bool:
    """Whether the file is a table with one document in each row."""
    return path.name.lower().endswith(ROWS)


def is_streamed(path: Path, size: int) -> bool:
    """Whether the file is read piece by piece, so that its size does not decide its memory."""
    return is_rows(path) or (size > LONG_TEXT_BYTES and _is_text(path))


def _is_text(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    try:
        return detect_kind(path, head) in ("txt", "md")
    except Unreadable:
        return False


def _is_same(path: Path, size: int, *, mtime_ns: int) -> bool:
    """Whether the file is still the one that the walk over the folder saw."""
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (size, mtime_ns)
