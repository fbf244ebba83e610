"""Rows with their pages of a cleaned document, and its language."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from sftplay.data.ingest.cleaning import TextBlock, without_lines
from sftplay.data.ingest.duplicates import band_keys, classify_characters, shingles, signature

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
"""Dropped records shown for each reason, and characters of each."""

COLUMNS = ("end", "file", "chars", "key", "key2")
"""Of a chunk's table, one row for each record: end of its line, number of its file, characters, hash of the text."""


def format_example(record: dict[str, Any]) -> dict[str, Any]:
    place = {key: record[key] for key in ("source", "section", "row", "n_chars")}
    return {**place, "text": record["text"][:EXAMPLE_CHARS]}


def warm_up(*languages: str) -> None:
    """Build the tables that every child needs, and the model that identifies languages, before the first fork."""
    classify_characters()
    if languages:
        identifier()


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
    rows: list[tuple[int, ...]] = []
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
            digest = record["sha256"]
            rows.append((end, file, record["n_chars"], int(digest[:16], 16), int(digest[16:32], 16)))
            if signatures:
                compared.write(signature(shingles(text)).tobytes())
    np.array(rows, np.uint64).reshape(len(rows), len(COLUMNS)).tofile(f"{stem}.table")
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
