"""Plain text -> paragraphs. Lines that were broken at a fixed width are joined; verse and tables keep theirs."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from sftplay.data.ingest.extract.document import Block, Extracted, heading
from sftplay.data.ingest.extract.text.characters import read_characters
from sftplay.data.ingest.extract.text.gutenberg import cut_licence

CHAPTER = re.compile(r"(?:chapter|part|book|appendix|section)\s+(?:[ivxlcdm]+|\d+|[a-z])\b[.:]?.*", re.I)
UNDERLINE = re.compile(r"([=\-~*#^])\1{2,}")
LONGEST_HEADING, LONGEST_TITLE = 80, 200

NARROWEST_WRAP, JOINED_SHARE = 50, 0.75
"""Columns below which no program breaks lines; the share of a paragraph's breaks that the width must explain."""


def read_plain(path: Path, encoding: str) -> Extracted:
    """A text file's paragraphs."""
    found = read_characters(path, encoding)
    named, text = cut_licence(found.text)
    blocks = tuple(split_plain(text))
    title = named or next((block.text.lstrip("# ") for block in blocks if block.kind == "heading"), "")
    if not title and blocks:
        first = blocks[0].text.split("\n")[0].strip()
        title = first if len(first) <= LONGEST_HEADING else path.stem
    return Extracted(title[:LONGEST_TITLE], blocks, guessed_encoding=found.guessed_encoding)


def split_plain(text: str) -> list[Block]:
    """The paragraphs of a text, which empty lines divide."""
    parts = [part.strip("\n").rstrip() for part in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text)]
    parts = [part for part in parts if part.strip()]
    width = wrap_width(parts)
    return [to_block(part, width) for part in parts]


def to_block(part: str, width: int) -> Block:
    """One paragraph; a heading where it is a chapter's line or underlined."""
    lines = part.split("\n")
    if len(lines) == 2 and UNDERLINE.fullmatch(lines[1].strip()) and len(lines[0].strip()) <= LONGEST_HEADING:
        return heading(lines[0], 1 if lines[1].strip()[0] in "=#*" else 2)
    if len(lines) == 1 and len(part) <= LONGEST_HEADING and CHAPTER.fullmatch(part.strip()):
        return heading(part, 2)
    return Block(join_lines(lines, width))


def wrap_width(parts: list[str]) -> int:
    """The column at which the text's lines were broken; 0 where they were not."""
    lengths = sorted(len(line) for part in parts for line in part.split("\n")[:-1])
    # A few lines of a broken text are longer: a word or an address without a place to break.
    width = lengths[int(len(lengths) * 0.98)] if lengths else 0
    return width if width >= NARROWEST_WRAP else 0


def join_lines(lines: list[str], width: int) -> str:
    """The paragraph in one line where the width explains its breaks: the next word would not have fitted."""
    if not width or len(lines) == 1:
        return "\n".join(lines)
    full = sum(len(line.rstrip()) + 1 + len((after.split() or [""])[0]) > width - 4 for line, after in pairwise(lines))
    if full < JOINED_SHARE * (len(lines) - 1):
        return "\n".join(lines)
    return " ".join(line.strip() for line in lines)
