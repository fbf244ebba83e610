"""Markdown -> its blocks as they are written, without pictures; HTML between them becomes Markdown."""

from __future__ import annotations

import re
from pathlib import Path

from sftplay.data.ingest.extract.document import Block, Extracted, Kind, heading
from sftplay.data.ingest.extract.markup.page import parse_page
from sftplay.data.ingest.extract.text.characters import read_characters

KINDS: dict[str, Kind] = {
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "table_open": "table",
    "fence": "code",
    "code_block": "code",
}
"""Tokens of markdown-it; all other blocks are paragraphs."""

FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*\n", re.S)
FRONT_TITLE = re.compile(r"^title:[ \t]*[\"']?(.+?)[\"']?[ \t]*$", re.M)
PICTURE = re.compile(r" ?(?:\[!\[[^\]]*\]\([^)\s]*(?:\s\"[^\"]*\")?\)\]\([^)]*\)|!\[[^\]]*\]\([^)]*\))")
"""A picture, or a link that shows nothing but one, such as a badge."""

MOST_MARKDOWN_BYTES = 16 << 20
"""Of one file. Its tokens take about thirty times as much memory."""

COMMENT = re.compile(r"<!--.*?-->", re.S)


def read_markdown(path: Path, encoding: str) -> Extracted:
    """A Markdown file's blocks."""
    text, guessed = read_characters(path, encoding, most=MOST_MARKDOWN_BYTES)
    front = FRONT_MATTER.match(text)
    named = FRONT_TITLE.search(front[1]) if front else None
    blocks = split_markdown(text[front.end() :] if front else text)
    title = named[1] if named else next((block.text.lstrip("# ") for block in blocks if block.kind == "heading"), "")
    return Extracted(title or path.stem, tuple(blocks), guessed_encoding=guessed)


def split_markdown(text: str) -> list[Block]:
    """The text's outermost blocks, each with its lines as they stand in the text."""
    from markdown_it import MarkdownIt

    lines = text.split("\n")
    blocks = []
    tokens = MarkdownIt("commonmark").enable("table").disable("inline").parse(text)
    for place, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0 or token.type == "hr":
            continue
        body = "\n".join(lines[token.map[0] : token.map[1]]).strip("\n").rstrip()
        if token.type == "heading_open":
            blocks.append(heading(tokens[place + 1].content, int(token.tag[1])))
        elif token.type == "html_block":
            blocks += parse_page(f"<body>{body}</body>", is_whole=True)[1] if COMMENT.sub("", body).strip() else []
        else:
            kind = KINDS.get(token.type, "paragraph")
            body = body if kind == "code" else PICTURE.sub("", body).strip()
            blocks += [Block(body, kind)] if body else []
    return blocks
