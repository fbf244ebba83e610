"""Blocks of text of marked-up pages: paragraphs, lists, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from sftplay.data.ingest.extract.document import Block, heading

DROPPED_NAMES = """
    script style noscript template svg button select input textarea iframe object embed head img audio video canvas
    map area link meta rp rt
"""
DROPPED = frozenset(DROPPED_NAMES.split())
"""Elements that hold no text of the document."""

BREAK = "\x00"
"""Stands for a line break until white space is made one; HTML cannot hold it."""

CODE, DOCUTILS_CODE = ("code", "kbd", "samp", "tt"), "docutils literal"
"""Elements of inline code, and the class by which docutils marks it."""

POWER = re.compile(r"[-+−]?\d+|[a-z]", re.A)
EDGE = re.compile(rf"[ \t\r\n\f]*{BREAK}[ \t\r\n\f]*")
SPACES = re.compile(r"[ \t\r\n\f]+")


def tidy(text: str) -> str:
    """Return the text with white space as a browser shows it, and line breaks where the document has them."""
    return SPACES.sub(" ", EDGE.sub(BREAK, text)).strip(f" {BREAK}").replace(BREAK, "\n")


def inline_text(element: Any) -> str:
    """Return the text of an element and its inline children; not tidied, without the element's tail."""
    tag = element.tag
    if not isinstance(tag, str) or tag in DROPPED:  # comments and instructions have no name
        return ""
    if tag == "br":
        return BREAK
    if tag == "math":
        return math_text(element)
    inner = (element.text or "") + "".join(inline_text(child) + (child.tail or "") for child in element)
    is_code = tag in CODE or element.get("class") == DOCUTILS_CODE
    if is_code and inner.strip() and "`" not in inner:
        return f"`{inner.strip()}`"
    if tag == "q":
        return f"“{inner}”"
    if tag == "sup" and POWER.fullmatch(inner.strip()):
        return f"^{inner.strip()}"
    return inner


def math_text(element: Any) -> str:
    """Return a formula as TeX where the document holds it, else as its characters."""
    tex = element.get("alttext") or ""
    for note in element.iter("annotation"):
        if "tex" in (note.get("encoding") or ""):
            tex = note.text or tex
    tex = tex.strip().removeprefix("{\\displaystyle").removesuffix("}" if "displaystyle" in tex else "").strip()
    return f"${tex}$" if tex else "".join(element.itertext())


MOST_COLUMNS, MOST_ROWS_SPANNED, MOST_CELLS = 200, 1_000, 200_000
"""A document may claim any span; these bound its cost."""

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


def as_markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as a Markdown table with the first row as the head; empty rows and columns are left out."""
    kept = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    kept = [row for row in kept if any(row)]
    width = max(map(len, kept), default=0)
    used = [place for place in range(width) if any(place < len(row) and row[place] for row in kept)]
    if not used:
        return ""
    lines = ["| " + " | ".join(row[place] if place < len(row) else "" for place in used) + " |" for row in kept]
    return "\n".join([lines[0], "|" + " --- |" * len(used), *lines[1:]])


def _build_grid(cells_by_row: list[list[Any]]) -> list[list[str]]:
    """Return a table's texts by row and column; a merged cell fills all its places."""
    grid: list[list[str]] = []
    hanging: dict[int, tuple[int, str]] = {}  # column -> rows still to fill, text
    n_cells = 0
    for cells in cells_by_row:
        line: list[str] = []
        for cell in cells:
            _fill(line, hanging)
            text = _cell_text(cell)
            rows, columns = _span(cell, "rowspan", most=MOST_ROWS_SPANNED), _span(cell, "colspan", most=MOST_COLUMNS)
            for place in range(columns):
                shown = "" if place else text
                if rows > 1:
                    # A short cell is repeated, so that every row can be read alone.
                    hanging[len(line)] = (rows - 1, shown if len(shown) <= 80 else "")
                line.append(shown)
            if len(line) > MOST_COLUMNS:
                break
        _fill(line, hanging)
        n_cells += len(line)
        if n_cells > MOST_CELLS:
            break
        grid.append(line)
    return grid


def _fill(line: list[str], hanging: dict[int, tuple[int, str]]) -> None:
    """Append the cells that span down from rows above."""
    while len(line) in hanging:
        left, text = hanging.pop(len(line))
        if left > 1:
            hanging[len(line)] = (left - 1, text)
        line.append(text)


def _span(cell: Any, name: str, *, most: int) -> int:
    digits = (cell.get(name) or "1").strip()
    return min(max(int(digits), 1), most) if digits.isdecimal() and len(digits) < 6 else 1


BLOCK_NAMES = """
    address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu nav ol p pre search section summary table
    tbody td tfoot th thead tr ul
"""
BLOCKS = frozenset(BLOCK_NAMES.split())
LISTS = ("ul", "ol", "menu", "dir")
LANGUAGE = re.compile(
    r"(?:language-|lang-|brush: ?|highlight-source-|highlight-)([a-z0-9+#-]+)"
    r"|\bcode ([a-z0-9+#-]+) (?:literal-block|doctest)"
)
CODE_SIGNS = re.compile(r"[{}=<>$#\\|@]|\(\)|\w[_/]\w")
PARAGRAPHS = re.compile(rf"(?:{BREAK}[ \t\r\n\f]*){{2,}}")


def find_blocks(element: Any) -> list[Block]:
    """Return the blocks of an element, without its tail."""
    out: list[Block] = []
    _walk(element, out)
    return out


def _walk(element: Any, out: list[Block]) -> None:
    pending = element.text or ""
    for child in element:
        if isinstance(child.tag, str) and child.tag not in DROPPED:
            if not BLOCKS.isdisjoint(inner.tag for inner in child.iter()):
                _add_paragraphs(pending, out)
                pending = ""
                _add(child, out)
            else:
                pending += inline_text(child)
        pending += child.tail or ""
    _add_paragraphs(pending, out)


def _add(element: Any, out: list[Block]) -> None:
    tag = element.tag
    if tag in HEADINGS:
        text = " ".join(tidy(inline_text(element)).split())
        if text:
            out.append(heading(text, int(tag[1])))
    elif tag in LISTS:
        text = _list_text(element)
        if text:
            out.append(Block(text, "list"))
    elif tag == "table":
        _add_table(element, out)
    elif tag == "pre":
        _add_pre(element, out)
    elif tag == "dl":
        _add_definitions(element, out)
    elif tag == "blockquote":
        inner = find_blocks(element)
        out += [block if block.level else Block(_prefix(block.text, "> ", others="> ")) for block in inner]
    else:
        _walk(element, out)


def _add_paragraphs(text: str, out: list[Block]) -> None:
    """Add running text; two line breaks in a row are the end of a paragraph."""
    if text.strip():
        out += [Block(part) for paragraph in PARAGRAPHS.split(text) if (part := tidy(paragraph))]


def _list_text(element: Any) -> str:
    """Return a list as Markdown, with the blocks of each item indented below it."""
    lines = []
    first = element.get("start") or "1"
    number = int(first) if first.isdecimal() and len(first) < 10 else 1
    for item in element:
        if item.tag in LISTS:  # not allowed, but frequent: a list directly in a list belongs to the item before
            inner = _list_text(item)
            lines += [_prefix(inner, "  ", others="  ")] if inner else []
        elif isinstance(item.tag, str) and item.tag not in DROPPED:
            # A list follows its paragraph directly, all else after an empty line.
            blocks = find_blocks(item)
            inner = "".join(("\n" if block.kind == "list" else "\n\n") + block.text for block in blocks).lstrip("\n")
            if inner:
                marker = f"{number}. " if element.tag == "ol" else "- "
                lines.append(_prefix(inner, marker, others=" " * len(marker)))
                number += 1
    return "\n".join(lines)


def _prefix(text: str, first: str, *, others: str) -> str:
    lines = text.split("\n")
    return "\n".join([first + lines[0], *((others + line).rstrip() for line in lines[1:])])


def _add_definitions(element: Any, out: list[Block]) -> None:
    """Add terms and their definitions: a list if all are short, else paragraphs."""
    parts = [part for part in element.iter("dt", "dd") if next(part.iterancestors("dl")) is element]
    inner = [(part.tag, find_blocks(part)) for part in parts]
    if any(len(blocks) > 1 or any(block.kind != "paragraph" for block in blocks) for _, blocks in inner):
        for _, blocks in inner:
            out += blocks
        return
    lines: list[str] = []
    for tag, blocks in inner:
        text = " ".join(blocks[0].text.split()) if blocks else ""
        if tag == "dd" and lines and text:
            lines[-1] += f" {text}" if lines[-1].endswith(":") else f": {text}"
        elif text:
            lines.append(f"- {text}")
    if lines:
        out.append(Block("\n".join(lines), "list"))


def _add_table(element: Any, out: list[Block]) -> None:
    """Add a table with its caption before it; of a layout table, add the blocks of its cells."""
    for caption in element.iter("caption"):
        if next(caption.iterancestors("table")) is element:
            _walk(caption, out)
    rows = []  # without those of tables in the cells
    for child in element:
        if child.tag in ("tr", "thead", "tbody", "tfoot"):
            rows += [child] if child.tag == "tr" else [row for row in child if row.tag == "tr"]
    cells_by_row = [[cell for cell in row if cell.tag in ("td", "th")] for row in rows]
    widths = [sum(_span(cell, "colspan", most=MOST_COLUMNS) for cell in cells) for cells in cells_by_row]
    is_layout = max(widths, default=0) <= 1 or element.get("role") in ("presentation", "none")
    if is_layout or any(inner.tag in HEADINGS for inner in element.iter()):
        for cell in chain.from_iterable(cells_by_row):
            _walk(cell, out)
    elif text := as_markdown(_build_grid(cells_by_row)):
        out.append(Block(text, "table"))


def _cell_text(cell: Any) -> str:
    """Return a cell in one line: its blocks in order, items of lists and rows of inner tables divided by `;`."""
    parts = []
    for block in find_blocks(cell):
        lines = block.text.split("\n")
        if block.kind == "table":
            rows = [line.strip("| ").replace(" | ", ", ") for line in [lines[0], *lines[2:]]]
            parts.append("; ".join(rows).replace("\\|", "|"))
        elif block.kind == "list":
            parts.append("; ".join(re.sub(r"^\s*(?:-|\d+\.) ", "", line).strip() for line in lines))
        elif block.kind == "code":
            parts.append(" ".join(lines[1:-1]))
        else:
            parts.append(block.text.lstrip("# ") if block.level else " ".join(lines))
    return " ".join(parts)


def _add_pre(element: Any, out: list[Block]) -> None:
    """Add preformatted text: code in a fence, verse and letters line by line."""
    text = inline_text(element).replace(BREAK, "\n") if element.find("br") is not None else "".join(element.itertext())
    lines = text.expandtabs(4).replace("\r", "").strip("\n").split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    if not text.strip():
        return
    classes = " ".join([element.get("class") or "", *(e.get("class") or "" for e in element.iter("code"))])
    above = " ".join(ancestor.get("class") or "" for ancestor in list(element.iterancestors())[:2])
    is_code = element.find(".//code") is not None or bool(classes.strip()) or CODE_SIGNS.search(text) is not None
    if not is_code:
        parts = [part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip()]
        out += [Block(part if "\n" in part else part.strip()) for part in parts]
        return
    named = LANGUAGE.search(classes) or LANGUAGE.search(above)
    language = named[1] or named[2] if named else ""
    language = "" if language in ("default", "text", "none", "plaintext", "notranslate") else language
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    out.append(Block(f"{fence}{language}\n{text}\n{fence}", "code"))
