"""Clean text: spaces, control characters, boilerplate lines."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

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
