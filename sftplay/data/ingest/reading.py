"""What a child does with a file: read it, clean its blocks, and make rows with their pages of them."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import time
import traceback
import unicodedata
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sftplay.data.files import BOM, Charset, find_suffix, parsed
from sftplay.data.ingest.children import FULL, ROWS
from sftplay.data.ingest.duplicates import band_keys, classify_characters, shingles, signature
from sftplay.data.ingest.extract.document import (
    HEAD_BYTES,
    Block,
    Unreadable,
    check_characters,
    detect_kind,
    extract,
    open_charset,
    split_paragraphs,
    to_block,
    wrap_width,
)
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


def warm_up(*words: str) -> None:
    """Import the installed modules that readers of files with such endings need, and build the tables of all children;
    other words are languages, which need a model.
    """
    suffixes = [word for word in words if word.startswith(".")]
    for name in {"ftfy", *(name for suffix in suffixes for name in LIBRARIES.get(suffix, ()))}:
        if find_spec(name.split(".")[0]):
            import_module(name)
    classify_characters()
    if len(suffixes) < len(words):
        identifier()


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
            charset, self._guessed = open_charset(self._path, self._encoding)
            width = None  # that of the first part holds for all: a list in a later one is no broken text
            for begin, text in _read_long_text(charset):
                paragraphs = split_paragraphs(text)
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


TextBlock = tuple[str, str, int, int | None]
"""Text, kind, level of a heading, page."""

SHORTEST, LONGEST = 4, 300
LEAST_DOCUMENTS, SHARE = 5, 0.5
"""A line is removed if it occurs in at least so many documents, and in at least this share of them."""

MOST_LINES = 2_000
"""Lines recorded at each end of one document."""


def line_keys(blocks: Iterable[TextBlock]) -> set[int]:
    """Return the distinct lines of a document that could be boilerplate, as 63-bit hashes."""
    texts = [text for text, kind, _, _ in blocks if kind in ("paragraph", "list")]
    keys = [hash_line(line) for text in texts for line in text.split("\n") if _is_candidate(line)]
    return {*keys[:MOST_LINES], *keys[-MOST_LINES:]}


def hash_line(line: str) -> int:
    """Return the hash of a line without the spaces around it."""
    return int.from_bytes(hashlib.blake2b(line.strip().encode(), digest_size=8).digest(), "big") >> 1


def write_keys(path: Path, keys: Iterable[int]) -> None:
    path.write_bytes(array("q", sorted(keys)).tobytes())


def repeated(documents: Sequence[Path]) -> list[int]:
    """Return the keys of lines that occur in too many documents. `documents` are the files with their keys."""
    least = max(LEAST_DOCUMENTS, SHARE * len(documents))
    if len(documents) < least:
        return []
    sample = documents[:: max(1, len(documents) // 256)]  # a line of half of all documents is not missed in 256 of them
    found = Counter(key for path in sample for key in array("q", path.read_bytes()))
    candidates = {key for key, count in found.items() if count >= 0.7 * least * len(sample) / len(documents)}
    counts = Counter(key for path in documents for key in array("q", path.read_bytes()) if key in candidates)
    return sorted(key for key, count in counts.items() if count >= least)


def without_lines(blocks: Sequence[TextBlock], keys: set[int], *, taken: Counter[str]) -> list[TextBlock]:
    """Return the blocks without these lines; `taken` counts each removed line."""
    if not keys:
        return list(blocks)
    kept = []
    for text, kind, level, page in blocks:
        if kind in ("paragraph", "list"):
            lines = text.split("\n")
            removed = {line for line in lines if _is_candidate(line) and hash_line(line) in keys}
            if removed:
                taken.update(line.strip() for line in lines if line in removed)
                text = "\n".join(line for line in lines if line not in removed).strip("\n")
        if text:
            kept.append((text, kind, level, page))
    return kept


def _is_candidate(line: str) -> bool:
    return SHORTEST <= len(line.strip()) <= LONGEST and any(map(str.isalpha, line))


UNWANTED = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u2060\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, soft hyphens and other invisible ones. Joiners and direction marks stay: some scripts need
them."""

SUSPECT = re.compile("[\x80-\u045f\u2010-\u25ff\ufb01\ufb02]{2}|[\xc2\xc3\xce\xd0\xd1\xe2] ")
"""The least trace of a wrong decoding: two characters of a single-byte encoding, the second perhaps now a space. The
real check takes far longer."""

LINE_ENDS = re.compile("\r\n?|[\x0c\x1c-\x1e\x85\u2028\u2029]")
SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
EMPTY_LINES = re.compile(r"\n{3,}")


class TextCleaner:
    """Cleans blocks; counts the blocks that each step changed."""

    def __init__(self, steps: Collection[str]) -> None:
        self._steps = {step: getattr(self, f"_{step}") for step in steps}
        self.changed: Counter[str] = Counter()
        """Step -> blocks."""

    def clean(self, block: Block) -> str:
        text = block.text
        for name, step in self._steps.items():
            new = step(text, block.kind)
            if new != text:
                self.changed[name] += 1
                text = new
        return text

    def _encoding(self, text: str, _kind: str) -> str:
        """Repair a wrong decoding, such as `Ã©` for `é`, where the text shows it."""
        if text.isascii() or not SUSPECT.search(text):
            return text
        from ftfy import fix_encoding
        from ftfy.badness import is_bad

        return str(fix_encoding(text)) if is_bad(text) else text

    def _unicode(self, text: str, _kind: str) -> str:
        """Compose characters (NFC), so that the same word has the same code points everywhere."""
        return text if text.isascii() else unicodedata.normalize("NFC", text)

    def _control(self, text: str, _kind: str) -> str:
        if text.replace("\n", "").isprintable():
            return text
        return UNWANTED.sub("", LINE_ENDS.sub("\n", text))

    def _spaces(self, text: str, kind: str) -> str:
        """Use one kind of space, none at the ends of lines; outside code and tables, no runs of spaces either."""
        if not (text.isascii() or text.replace("\n", "").isprintable()):
            text = SPACES.sub(" ", text)
        if kind in ("code", "table"):
            return "\n".join(map(str.rstrip, text.split("\n"))).strip("\n")
        if "  " in text or "\t" in text or " \n" in text or text.endswith(" "):
            lines = text.split("\n")
            indents = [line[: len(line) - len(line.lstrip())] for line in lines]
            text = "\n".join(indent + " ".join(line.split()) for indent, line in zip(indents, lines, strict=True))
        return (EMPTY_LINES.sub("\n\n", text) if "\n\n\n" in text else text).strip("\n")


SAMPLE_CHARS = 1000
"""Characters of each of the three samples."""

SURE = 0.7
"""Less sure guesses are ignored: headings, names and code are guessed at random, below 0.5."""


def detect_language(text: str) -> tuple[str, float]:
    """Return the ISO 639-1 code of the text's language, and the confidence, 0 to 1."""
    if len(text) > 3 * SAMPLE_CHARS:
        middle = len(text) // 2
        text = f"{text[:SAMPLE_CHARS]} {text[middle : middle + SAMPLE_CHARS]} {text[-SAMPLE_CHARS:]}"
    code, share = identifier().classify(text.lower())  # the model knows few words in capitals
    return str(code), float(share)


@cache
def identifier() -> Any:
    """Return the model, which takes a second to load."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


EXAMPLES, EXAMPLE_CHARS = 3, 300
"""Dropped records and refused rows shown for each reason, and characters of each."""

RECORD = np.dtype([("end", np.uint64), ("file", np.uint64), ("chars", np.uint64), ("key", "S16")])
"""A row of a chunk's table: end of the record's line, number of its file, characters, hash of the text."""


def format_example(record: dict[str, Any]) -> dict[str, Any]:
    place = {key: record[key] for key in ("source", "section", "row", "n_chars")}
    return {**place, "text": record["text"][:EXAMPLE_CHARS]}


def finish(
    *, shards: list[dict[str, Any]], stem: str, lines: str, by: str, min_chars: int, max_chars: int | None,
    languages: list[str], signatures: bool, near: float,
) -> dict[str, Any]:  # fmt: skip
    """Write the chunk `stem` from shards, each the `path` of documents and the `name` and `file_sha256` of their file.

    Return its counts; those of `dropped` are by the number of the `file`.
    """
    keys, taken = set(json.loads(Path(lines).read_text())), Counter[str]()
    dropped: dict[int, Counter[str]] = {}
    examples: list[dict[str, Any]] = []
    rows: list[tuple[int, int, int, bytes]] = []
    end = 0
    read = partial(_read_records, keys=keys, by=by, taken=taken)
    records = ((shard["file"], record) for shard in shards for record in read(shard))
    with Path(f"{stem}.jsonl").open("wb") as texts, Path(f"{stem}.signatures").open("wb") as compared:
        for file, record in records:
            text = record["text"]
            reason, detail = _refuse(text, min_chars=min_chars, max_chars=max_chars, languages=languages)
            if reason:
                dropped.setdefault(file, Counter())[reason] += 1
                if sum(example["reason"] == reason for example in examples) < EXAMPLES:
                    examples.append({"reason": reason, "detail": detail, **format_example(record)})
                continue
            end += texts.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            rows.append((end, file, record["n_chars"], bytes.fromhex(record["sha256"][:32])))
            if signatures:
                compared.write(signature(shingles(text)).tobytes())
    np.array(rows, RECORD).tofile(f"{stem}.table")
    if signatures:
        band_keys(np.fromfile(f"{stem}.signatures", np.uint32), near).tofile(f"{stem}.bands")
    most_taken = dict(taken.most_common(100))
    return {"records": len(rows), "dropped": dropped, "taken": most_taken, "examples": examples}


def _refuse(text: str, *, min_chars: int, max_chars: int | None, languages: list[str]) -> tuple[str, str]:
    """Return the reason why a filter drops the text, and the detail; both empty if it is kept."""
    if not text.strip():
        return "empty", "no text is left"
    if len(text) < min_chars:
        return "short", f"{len(text)} characters; --min-chars is {min_chars}"
    if max_chars is not None and len(text) > max_chars:
        return "long", f"{len(text):,} characters; --max-chars is {max_chars:,}"
    code, share = detect_language(text) if languages else ("", 0.0)
    if share >= SURE and code not in languages:
        return "language", f"looks like {code}, {share:.0%} sure"
    return "", ""


def _read_records(shard: dict[str, Any], *, keys: set[int], by: str, taken: Counter[str]) -> Iterator[dict[str, Any]]:
    with Path(shard["path"]).open(encoding="utf-8", newline="\n") as stream:
        for document in map(json.loads, stream):
            parts: list[tuple[str, str, list[list[int]]]] = [("", document["text"], [])] if "text" in document else []
            if not parts:
                blocks = without_lines(document["blocks"], keys, taken=taken)
                sections = list(split_sections(blocks)) if by == "section" else []
                parts = [(section, *joined(part)) for section, part in sections or [("", blocks)]]
            for section, text, pages in parts:
                yield {
                    "text": text, "source": shard["name"], "title": document["title"], "section": section,
                    "pages": pages, "row": document.get("row"), "place": document.get("place"), "n_chars": len(text),
                    "sha256": hashlib.sha256(text.encode()).hexdigest(), "file_sha256": shard["file_sha256"],
                }  # fmt: skip


def split_sections(blocks: list[TextBlock]) -> Iterator[tuple[str, list[TextBlock]]]:
    """Cut the document before each heading; yield parts with their path of headings. A lone heading joins the next."""
    trail: list[tuple[int, str]] = []
    part: list[TextBlock] = []
    name = ""
    for block in blocks:
        text, kind, level, _ = block
        if kind == "heading":
            if any(inner[1] != "heading" for inner in part):
                yield name, part
                part = []
            trail = [*((depth, title) for depth, title in trail if depth < level), (level, text.lstrip("# "))]
            name = " > ".join(title for _, title in trail)
        part.append(block)
    if part:
        yield name, part


def joined(blocks: list[TextBlock]) -> tuple[str, list[list[int]]]:
    """Return the blocks as one text, and its pages: [page, first character, end], without gaps between them."""
    pages: list[list[int]] = []
    end = 0
    for place, (text, _, _, page) in enumerate(blocks):
        begin, end = end, end + len(text) + (2 if place < len(blocks) - 1 else 0)
        if page is not None and pages and pages[-1][0] == page and pages[-1][2] == begin:
            pages[-1][2] = end
        elif page is not None:
            pages.append([page, begin, end])
    return "\n\n".join(text for text, _, _, _ in blocks), pages
