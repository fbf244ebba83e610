"""Turn shards into the records of OUT: remove boilerplate, cut documents into sections, apply filters, add provenance
and the signatures for near-duplicates.

It runs in a child process. A record's line, signature and band keys are in files of the same stem.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.data.ingest.duplicates import band_keys, shingles, signature, warm_tables
from sftplay.data.ingest.steps.cleaning import TextBlock, without_lines
from sftplay.data.ingest.steps.language import SURE, detect_language, identifier

EXAMPLES, EXAMPLE_CHARS = 3, 300
"""Dropped records shown for each reason, and characters of each."""

MOST_TAKEN = 100
"""Distinct lines of boilerplate that are listed."""

COLUMNS = ("end", "file", "chars", "key", "key2")
"""Of a chunk's table, one row for each record: end of its line, number of its file, characters, hash of the text."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Documents of one file."""

    file: int
    name: str
    path: str
    file_sha256: str


@dataclass
class ChunkCounts:
    """Counts of the documents of a chunk; the outer keys are files."""

    documents: Counter[int] = field(default_factory=Counter)
    dropped: dict[int, Counter[str]] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def drop(self, file: int, reason: str, *, record: dict[str, Any], detail: str) -> None:
        """Count a record that a filter drops."""
        self.dropped.setdefault(file, Counter())[reason] += 1
        if sum(example["reason"] == reason for example in self.examples) < EXAMPLES:
            self.examples.append({"reason": reason, "detail": detail, **format_example(record)})


def format_example(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as the report shows it."""
    place = {key: record[key] for key in ("source", "section", "row", "n_chars")}
    return {**place, "text": record["text"][:EXAMPLE_CHARS]}


def warm_up(*languages: str) -> None:
    """Build the tables that every child needs, and the model that identifies languages, before the first fork."""
    warm_tables()
    if languages:
        identifier()


def finish(
    *, shards: list[dict[str, Any]], stem: str, lines: str, by: str, min_chars: int, max_chars: int | None,
    languages: list[str], signatures: bool, near: float,
) -> dict[str, Any]:  # fmt: skip
    """Write the chunk `stem` from shards; return its counts."""
    keys, counts = set(json.loads(Path(lines).read_text())), ChunkCounts()
    filters = Filters(min_chars, max_chars, languages)
    rows: list[tuple[int, ...]] = []
    end = 0
    with Path(f"{stem}.jsonl").open("wb") as texts, Path(f"{stem}.signatures").open("wb") as compared:
        for shard in (Shard(**fields) for fields in shards):
            for record in read_records(shard, keys, by=by, counts=counts):
                counts.documents[shard.file] += 1
                reason, detail = filters.refuse(record["text"])
                if reason:
                    counts.drop(shard.file, reason, record=record, detail=detail)
                    continue
                end += texts.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                rows.append((end, shard.file, record["n_chars"], *_key(record["sha256"])))
                if signatures:
                    compared.write(signature(shingles(record["text"])).tobytes())
    np.array(rows, np.uint64).reshape(len(rows), len(COLUMNS)).tofile(f"{stem}.table")
    if signatures:
        band_keys(np.fromfile(f"{stem}.signatures", np.uint32), near).tofile(f"{stem}.bands")
    return {
        "records": len(rows), "documents": dict(counts.documents), "dropped": counts.dropped,
        "taken": dict(counts.taken.most_common(MOST_TAKEN)), "examples": counts.examples,
    }  # fmt: skip


def read_table(stem: str) -> NDArray[np.uint64]:
    """Return a chunk's table: uint64 [records, COLUMNS]."""
    return np.fromfile(f"{stem}.table", np.uint64).reshape(-1, len(COLUMNS))


@dataclass(frozen=True)
class Filters:
    """The conditions for keeping a text."""

    min_chars: int
    max_chars: int | None
    languages: list[str]

    def refuse(self, text: str) -> tuple[str, str]:
        """Return the reason why the text is dropped, and the detail; both empty if it is kept."""
        if not text.strip():
            return "empty", "no text is left"
        if len(text) < self.min_chars:
            return "short", f"{len(text)} characters; --min-chars is {self.min_chars}"
        if self.max_chars is not None and len(text) > self.max_chars:
            return "long", f"{len(text):,} characters; --max-chars is {self.max_chars:,}"
        code, share = detect_language(text) if self.languages else ("", 0.0)
        if share >= SURE and code not in self.languages:
            return "language", f"looks like {code}, {share:.0%} sure"
        return "", ""


def read_records(shard: Shard, keys: set[int], *, by: str, counts: ChunkCounts) -> Iterator[dict[str, Any]]:
    """Yield the records of a shard's documents, in order."""
    with Path(shard.path).open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            document = json.loads(line)
            if "text" in document:
                yield _record(shard, document, text=document["text"], section="", pages=[])
                continue
            blocks = without_lines(document["blocks"], keys, taken=counts.taken)
            sections = list(split_sections(blocks)) if by == "section" else []
            for section, part in sections or [("", blocks)]:
                text, pages = joined(part)
                yield _record(shard, document, text=text, section=section, pages=pages)


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


def _record(
    shard: Shard, document: dict[str, Any], *, text: str, section: str, pages: list[list[int]]
) -> dict[str, Any]:
    return {
        "text": text, "source": shard.name, "title": document["title"], "section": section, "pages": pages,
        "row": document.get("row"), "place": document.get("place"), "n_chars": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(), "file_sha256": shard.file_sha256,
    }  # fmt: skip


def _key(digest: str) -> tuple[int, int]:
    return int(digest[:16], 16), int(digest[16:32], 16)
