"""Joins lines into running text: words divided at the end of a line become whole, compounds keep their hyphen."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sftplay.data.ingest.extract.pdf.words import SOFT_HYPHEN

DIVIDED = re.compile(rf"([^\W\d_]+)[-‐{SOFT_HYPHEN}]$")
LONGEST_WORD = 80
FRACTION = re.compile(r"(?<=\d) ?⁄ ?(?=\d)")
BEGINS = re.compile(r"[^\W\d_]+")
COMPOUND = (
    "self",
    "non",
    "well",
    "cross",
    "half",
    "all",
    "ex",
    "anti",
    "multi",
    "semi",
    "high",
    "low",
    "long",
    "short",
)
"""First parts that in English mostly keep their hyphen where the document does not say."""


class Vocabulary:
    """Words and compounds as the document writes them within its lines."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.words: set[str] = set()
        self.compounds: set[str] = set()
        for text in texts:
            lowered = text.lower().strip(".,;:!?()[]\"'“”‘’")
            (self.compounds if "-" in lowered else self.words).add(lowered)

    def join(self, lines: list[str]) -> str:
        """The lines as one text."""
        text = ""
        for line in lines:
            line = line.strip()
            divided, begins = DIVIDED.search(text[-LONGEST_WORD:]), BEGINS.match(line)
            if not text:
                text = line
            elif divided and begins and begins[0][0].islower():
                text = text[:-1] + line if not self._keeps(divided, begins[0]) else text.rstrip(SOFT_HYPHEN) + line
            elif text.endswith(("-", "‐")) and begins and text[-2:-1].isalnum():
                text += line  # Anglo-Saxon, COVID-19
            else:
                text = f"{text.rstrip(SOFT_HYPHEN)} {line}"
        return FRACTION.sub("/", text.replace(SOFT_HYPHEN, ""))

    def _keeps(self, divided: re.Match[str], rest: str) -> bool:
        """Whether the hyphen belongs to the word."""
        if divided[0].endswith(SOFT_HYPHEN):
            return False
        first = divided[1].lower()
        if f"{first}-{rest}".lower() in self.compounds:
            return True
        return f"{first}{rest}".lower() not in self.words and first in COMPOUND
