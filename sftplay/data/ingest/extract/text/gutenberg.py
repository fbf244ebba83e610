"""Cuts the header and the licence from a Project Gutenberg text."""

from __future__ import annotations

import re

from sftplay.data.ingest.extract.document import Block

START = re.compile(r"^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.*\*\*\*[ \t]*$", re.M)
END = re.compile(r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG EBOOK|End of (?:the )?Project Gutenberg)", re.M)
TITLE = re.compile(r"^Title:[ \t]*(\S.*)$", re.M)


def cut_licence(text: str) -> tuple[str, str]:
    """The title named in the header and the text between header and licence; "" and all of the text elsewhere."""
    start = START.search(text)
    if not start:
        return "", text
    title = TITLE.search(text, 0, start.start())
    end = END.search(text, start.end())
    return title[1].strip() if title else "", text[start.end() : end.start() if end else None]


def cut_blocks(blocks: list[Block]) -> list[Block]:
    """The same for a document in blocks."""
    first = next((place for place, block in enumerate(blocks) if START.search(block.text)), None)
    if first is None:
        return blocks
    rest = blocks[first + 1 :]
    last = next((place for place, block in enumerate(rest) if END.search(block.text)), len(rest))
    return rest[:last]
