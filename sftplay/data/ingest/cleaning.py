"""Clean text, without boilerplate lines, and rows with their pages of it."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from sftplay.data.ingest.duplicates import band_keys, classify_characters, shingles, signature
from sftplay.data.ingest.extract.document import Block

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
