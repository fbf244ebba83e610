"""Lines that stand in many documents, such as licence notes and addresses: how they are found, and taken out.

Only lines of paragraphs and lists count. Headings, tables and code often have the same lines by right.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

TextBlock = tuple[str, str, int, int | None]
"""Text, kind, level of a heading, page."""

SHORTEST, LONGEST = 4, 300
LEAST_DOCUMENTS, SHARE = 5, 0.5
"""A line goes when it stands in at least so many documents, and in at least this share of them."""

MOST_LINES = 2_000
"""Lines noted at each end of one document."""

SAMPLE = 256
"""Documents in which candidates are looked for. A line of half of all documents is not missed there."""


def line_keys(blocks: Iterable[TextBlock]) -> set[int]:
    """The different lines of a document that could be boilerplate, as 63-bit hashes."""
    keys = [key_of(line) for line in _lines(blocks)]
    return {*keys[:MOST_LINES], *keys[-MOST_LINES:]}


def key_of(line: str) -> int:
    """The hash of a line without the spaces around it."""
    return int.from_bytes(hashlib.blake2b(line.strip().encode(), digest_size=8).digest(), "big") >> 1


def write_keys(path: Path, keys: Iterable[int]) -> None:
    """Keep the keys of a document's lines in a file."""
    path.write_bytes(array("q", sorted(keys)).tobytes())


def repeated(documents: Sequence[Path]) -> list[int]:
    """The keys of lines that stand in too many documents. For each document the file with its keys is given."""
    least = max(LEAST_DOCUMENTS, SHARE * len(documents))
    if len(documents) < least:
        return []
    sample = documents[:: max(1, len(documents) // SAMPLE)]
    found = Counter(key for path in sample for key in _read_keys(path))
    candidates = {key for key, count in found.items() if count >= 0.7 * least * len(sample) / len(documents)}
    counts = Counter(key for path in documents for key in _read_keys(path) if key in candidates)
    return sorted(key for key, count in counts.items() if count >= least)


def _read_keys(path: Path) -> array[int]:
    keys = array("q")
    keys.frombytes(path.read_bytes())
    return keys


def without_lines(blocks: Sequence[TextBlock], keys: set[int], *, taken: Counter[str]) -> list[TextBlock]:
    """The blocks without such lines; `taken` counts each line that goes."""
    if not keys:
        return list(blocks)
    kept = []
    for text, kind, level, page in blocks:
        if kind in ("paragraph", "list"):
            lines = text.split("\n")
            stays = [line for line in lines if not (_is_candidate(line) and key_of(line) in keys)]
            if len(stays) < len(lines):
                taken.update(line.strip() for line in lines if _is_candidate(line) and key_of(line) in keys)
                text = "\n".join(stays).strip("\n")
        if text:
            kept.append((text, kind, level, page))
    return kept


def _lines(blocks: Iterable[TextBlock]) -> Iterator[str]:
    for text, kind, _, _ in blocks:
        if kind in ("paragraph", "list"):
            yield from filter(_is_candidate, text.split("\n"))


def _is_candidate(line: str) -> bool:
    return SHORTEST <= len(line.strip()) <= LONGEST and any(map(str.isalpha, line))
