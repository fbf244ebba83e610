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
from contextlib import ExitStack, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftplay.data.files import BOM, Charset, find_suffix, parsed
from sftplay.data.ingest.by_kind import HEAD_BYTES, detect_kind, extract
from sftplay.data.ingest.children import FULL
from sftplay.data.ingest.cleaning import TextBlock, TextCleaner, line_keys, write_keys
from sftplay.data.ingest.extract.document import Block, Unreadable, check_characters, open_charset, to_block, wrap_width
from sftplay.data.ingest.walk import ROWS
from sftplay.data.read import Dialect, read_raw
from sftplay.data.records import Refused, Source
from sftplay.data.tables import parquet_rows
from sftplay.errors import DataError, SftplayError

PART_CHARS = 1_000_000
"""Most characters of a document that is cut from a long text."""


def _read_long_text(charset: Charset) -> Iterator[tuple[int, str]]:
    """Yield a text in parts, each with the offset of its first character; a line end counts as one character.
    It is cut between paragraphs if possible, else between lines, else between words.
    """
    buffer, begin = "", 0
    with charset.open(newline=None) as stream:
        while piece := stream.read(1 << 18):
            check_characters(piece, charset)
            buffer += piece if begin or buffer else piece.removeprefix(BOM)
            while len(buffer) > PART_CHARS:
                places = (
                    place + len(mark)
                    for mark in ("\n\n", "\n", " ")
                    if (place := buffer.rfind(mark, PART_CHARS // 2, PART_CHARS - len(mark))) >= 0
                )
                end = next(places, PART_CHARS)
                yield begin, buffer[:end]
                buffer, begin = buffer[end:], begin + end
    if buffer:
        yield begin, buffer


def _refuse_row(row: dict[str, object] | Refused) -> tuple[str, str]:
    """Return the reason why a row is no document, and the detail; both empty if it is one."""
    if isinstance(row, Refused):
        return "broken_row", row.reason
    text = row.get("text")
    if not isinstance(text, str):
        return "no_text", f"its keys are {', '.join(map(repr, list(row)[:10]))}"
    if not text.strip():
        return "empty", "text is empty"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "broken_row", "holds half a character"
    return "", ""


LONG_TEXT_BYTES = 16 << 20
"""A text file above this size is cut into documents of at most a million characters."""

SHARD_BYTES = 32 << 20

EXAMPLES = 3
"""Refused rows of one file and reason that are shown."""

PARAGRAPHS = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


def shard_path(stem: str, number: int) -> str:
    return f"{stem}.{number:04}.jsonl"


LIBRARIES = {
    ".md": ("markdown_it",),
    ".html": ("lxml.html",),
    ".htm": ("lxml.html",),
    ".docx": ("lxml.etree", "anydoc"),
    ".pptx": ("lxml.etree",),
    ".xlsx": ("openpyxl",),
    ".odt": ("lxml.etree", "anydoc"),
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
    began, source = time.monotonic(), Path(path)
    try:
        found = _FileReader(source, size=size, encoding=encoding, cleaning=cleaning).write(stem)
    except Unreadable as error:
        found = {"status": "unreadable", "reason": error.reason, "detail": error.detail}
        if error.__cause__ is not None:  # the error of the reader: the fault of the document, or of the reader
            found["traceback"] = _format_trace(error.__cause__)
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
        found = {"status": "unreadable", "reason": "broken", "detail": detail, "traceback": _format_trace(error)}
    facts = None
    with suppress(OSError):
        facts = source.stat()
    is_same = facts is not None and (facts.st_size, facts.st_mtime_ns) == (size, mtime_ns)
    if found["status"] != "stopped" and not is_same:  # the walk over the folder saw another one
        found = {"status": "unreadable", "reason": "changed", "detail": "the file changed while it was read"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {**found, "seconds": time.monotonic() - began, "peak_bytes": peak}


def _format_trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-30))[-20_000:]


class _FileReader:
    """Reads one file; holds what the report says of it."""

    def __init__(self, path: Path, *, size: int, encoding: str, cleaning: list[str]) -> None:
        self._path, self._size, self._encoding = path, size, encoding
        self._cleaner = TextCleaner(cleaning)
        self._keys: set[int] = set()
        self._notes: list[str] = []
        self._guessed = ""
        self._refused: Counter[str] = Counter()
        self._examples: list[dict[str, Any]] = []

    def write(self, stem: str) -> dict[str, Any]:
        """Write the documents into numbered files of bounded size.
        Raise Unreadable where the file gives no text, or far more text than its size.
        """
        self._path.open("rb").close()  # a missing permission must not look like a wrong format
        n_documents, sizes = 0, [0]
        most_bytes = max(64 << 20, 50 * self._size)  # of its text, which may be so much larger than the file
        with ExitStack() as opened:
            stream = opened.enter_context(Path(shard_path(stem, 0)).open("wb"))
            for document in self._documents():
                line = json.dumps(document, ensure_ascii=False).encode() + b"\n"
                if sizes[-1] and sizes[-1] + len(line) > SHARD_BYTES:
                    opened.close()
                    stream = opened.enter_context(Path(shard_path(stem, len(sizes))).open("wb"))
                    sizes.append(0)
                sizes[-1] += stream.write(line)
                n_documents += 1
                if sum(sizes) > most_bytes:
                    raise Unreadable("unsafe", f"its text is larger than {most_bytes >> 20} MiB")
        if not n_documents and not self._refused:
            raise Unreadable("empty", "the file has no rows")
        write_keys(Path(f"{stem}.lines"), self._keys)
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "status": "read", "is_table": is_rows(self._path), "documents": n_documents, "notes": self._notes,
            "sha256": digest, "guessed_encoding": self._guessed,
            "shards": sizes, "cleaned": dict(self._cleaner.changed), "dropped": dict(self._refused),
            "examples": self._examples,
        }  # fmt: skip

    def _documents(self) -> Iterator[dict[str, Any]]:
        if is_rows(self._path):
            yield from self._rows()
        elif self._size > LONG_TEXT_BYTES and _is_text(self._path):
            width = None
            charset, self._guessed = open_charset(self._path, self._encoding)
            for begin, text in _read_long_text(charset):
                paragraphs = [paragraph.strip("\n") for paragraph in PARAGRAPHS.split(text) if paragraph.strip()]
                width = wrap_width(paragraphs) if width is None else width
                blocks = self._clean(to_block(paragraph, width) for paragraph in paragraphs)
                yield {"title": self._path.stem, "blocks": blocks, "place": [begin, begin + len(text)]}
        else:
            found = extract(self._path, self._encoding)
            self._notes, self._guessed = list(found.notes), found.guessed_encoding
            blocks = self._clean(found.blocks)
            self._keys = line_keys(blocks)
            title = self._cleaner.clean(Block(found.title))
            yield {"title": " ".join(title.split()), "blocks": blocks}

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of a jsonl or parquet file that have a column `text`; count the others."""
        rows: Iterator[tuple[Source, dict[str, Any] | Refused]]
        if find_suffix(self._path) == ".parquet":
            rows = parquet_rows(self._path, columns=("text", "title"))
        else:
            rows = ((source, parsed(raw)) for source, raw in read_raw(str(self._path), Dialect(self._encoding)))
        try:
            for source, row in rows:
                reason, detail = _refuse_row(row)
                if reason:
                    self._refused[reason] += 1
                    if self._refused[reason] <= EXAMPLES:
                        self._examples.append({"reason": reason, "row": source.line, "detail": detail})
                elif not isinstance(row, Refused):
                    title = row.get("title")
                    title = title if isinstance(title, str) and title.isprintable() else ""
                    yield {"title": title, "text": row["text"], "row": source.line}
        except DataError as error:  # the file is damaged, or none of its kind
            raise Unreadable("broken", error.what) from error

    def _clean(self, blocks: Iterable[Block]) -> list[TextBlock]:
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
