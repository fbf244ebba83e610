"""Slides and sheets of Microsoft Office become blocks."""

from __future__ import annotations

import posixpath
import warnings
from contextlib import closing
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, Extracted, Unreadable, as_markdown, find_heading, heading, need
from sftplay.data.ingest.extract.markup import find_blocks
from sftplay.data.ingest.extract.office import NO_DTD, Archive, attribute, core_title, local

MOST_CELLS, MOST_EMPTY_ROWS = 20_000_000, 10_000
"""Of one document, empty ones too; rows without text that end a sheet."""

READING = {"read_only": True, "data_only": True, "keep_links": False}


def read_sheets(path: Path, encoding: str) -> Extracted:
    """Return title and blocks; a sheet is a page."""
    need("openpyxl", kind="Excel")
    import openpyxl

    with Archive(path) as archive:
        archive.check_all()
        for name in archive.names:  # openpyxl reads XML by itself
            if name.endswith((".xml", ".rels")) and b"<!DOCTYPE" in archive.read(name):
                raise Unreadable("unsafe", NO_DTD.format(name))
        if "xl/workbook.xml" not in archive.names:
            raise Unreadable("broken", "the archive holds no Excel workbook")
        named = core_title(archive)
    blocks: list[Block] = []
    notes: list[str] = []
    n_cells = 0
    # Warnings concern what openpyxl loses in writing; nothing is written here.
    with warnings.catch_warnings(action="ignore"), closing(openpyxl.load_workbook(path, **READING)) as book:
        for number, sheet in enumerate(book.worksheets, 1):
            if sheet.sheet_state != "visible":
                notes.append(f"the hidden sheet {sheet.title!r} is left out")
                continue
            sheet.reset_dimensions()  # the stored size of a sheet may be wrong, in both directions
            rows, n_empty = [], 0
            for row in sheet.iter_rows(values_only=True):
                cells = ["" if value is None else cell_text(value) for value in row]
                n_cells, n_empty = n_cells + len(row), 0 if any(cells) else n_empty + 1
                rows += [cells] if any(cells) else []
                if n_cells > MOST_CELLS:
                    raise Unreadable("too_large", f"more than {MOST_CELLS:,} cells: split the workbook")
                if n_empty > MOST_EMPTY_ROWS:
                    break
            if text := as_markdown(rows):
                blocks += [heading(sheet.title, 2, page=number), Block(text, "table", page=number)]
    return Extracted(named or path.stem, tuple(blocks), tuple(notes))


def cell_text(value: Any) -> str:
    """Return a cell's value as people write it."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"  # the digits that a sheet keeps
    if isinstance(value, datetime):
        at_midnight = (value.hour, value.minute, value.second) == (0, 0, 0)
        return value.date().isoformat() if at_midnight else value.isoformat(" ", "seconds")
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)


def read_slides(path: Path, encoding: str) -> Extracted:
    """Return title and blocks; a slide is a page, with its notes after it."""
    with Archive(path) as archive:
        show = archive.tree("ppt/presentation.xml")
        if show is None:
            raise Unreadable("broken", "the archive holds no presentation")
        targets = relations(archive, "ppt/presentation.xml")
        order = next((child for child in show if local(child) == "sldIdLst"), ())
        blocks: list[Block] = []
        for number, item in enumerate(order, 1):
            # The element also has an `id` without a namespace.
            relation = next((str(value) for key, value in item.attrib.items() if key.endswith("}id")), "")
            name = targets.get(relation, "")
            slide = archive.tree(name) if name else None
            if slide is None or slide.get("show") == "0":
                continue
            root = show.makeelement("body")
            _add_shapes(next((node for node in slide.iter() if local(node) == "spTree"), ()), root)
            for head in reversed(root.findall("h2")):  # a title comes first, wherever its shape is in the file
                root.insert(0, head)
            for target in relations(archive, name).values():
                if "notesSlide" in target and (notes := archive.tree(target)) is not None:
                    _add_shapes(next((node for node in notes.iter() if local(node) == "spTree"), ()), root)
            blocks += [Block(block.text, block.kind, block.level, number) for block in find_blocks(root)]
        title = core_title(archive)
    return Extracted(title or find_heading(blocks) or path.stem, tuple(blocks))


def relations(archive: Archive, part: str) -> dict[str, str]:
    """Return relation id -> part of the archive, for one part; addresses outside the archive are left out."""
    folder, name = posixpath.split(part)
    root = archive.tree(f"{folder}/_rels/{name}.rels")
    found = {}
    for relation in root if root is not None else ():
        if attribute(relation, "TargetMode") != "External":
            target = attribute(relation, "Target") or ""
            found[attribute(relation, "Id") or ""] = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
    return found


def _add_shapes(tree: Any, root: Any) -> None:
    for shape in tree:
        name = local(shape)
        if name == "grpSp":
            _add_shapes(shape, root)
        elif name == "AlternateContent":
            _add_shapes(next((child for child in shape if local(child) == "Choice"), ()), root)
        elif name == "sp":
            place = next((node for node in shape.iter() if local(node) == "ph"), None)
            kind = attribute(place, "type") or ("body" if place is not None else "")
            body = next((child for child in shape if local(child) == "txBody"), None)
            if body is not None and kind not in ("dt", "ftr", "sldNum", "hdr"):  # date, footer, number and header
                _add_text(body, root, kind=kind)
        elif name == "graphicFrame":
            for table in [inner for inner in shape.iter() if local(inner) == "tbl"]:
                _add_table(table, root)


def _add_text(body: Any, root: Any, *, kind: str) -> None:
    """Add the paragraphs of one shape: a title, items of a list, or plain paragraphs."""
    paragraphs = [(child, text) for child in body if local(child) == "p" and (text := paragraph_text(child)).strip()]
    nodes = (local(node) for paragraph, _ in paragraphs for node in paragraph.iter())
    if kind in ("title", "ctrTitle") and paragraphs:
        add_element(root, "h2").text = " ".join(text for _, text in paragraphs)
    elif (kind in ("body", "obj") and len(paragraphs) > 1) or any(name in ("buChar", "buAutoNum") for name in nodes):
        for paragraph, text in paragraphs:
            properties = next((child for child in paragraph if local(child) == "pPr"), None)
            level = attribute(properties, "lvl") or "0"
            add_item(root, text, level=min(int(level), 8) if level.isdecimal() else 0)
        add_element(root, "hr")  # the next shape begins another list
    else:
        for _, text in paragraphs:
            add_element(root, "p").text = text


def paragraph_text(paragraph: Any) -> str:
    """Return the text of a paragraph's runs, fields and line breaks."""
    text = ""
    for element in paragraph.iter():
        if local(element) == "br":
            text += " "
        elif local(element) == "t" and local(element.getparent()) != "fld":
            text += element.text or ""
    return text


def _add_table(table: Any, root: Any) -> None:
    made = add_element(root, "table")
    for row in (child for child in table if local(child) == "tr"):
        line = add_element(made, "tr")
        for cell in row:
            if local(cell) == "tc" and not (attribute(cell, "hMerge") or attribute(cell, "vMerge")):
                columns, rows = attribute(cell, "gridSpan") or "1", attribute(cell, "rowSpan") or "1"
                holder = add_element(line, "td", colspan=columns, rowspan=rows)
                for paragraph in [inner for inner in cell.iter() if local(inner) == "p"]:
                    add_element(holder, "p").text = paragraph_text(paragraph)


def add_element(parent: Any, tag: str, **attributes: str) -> Any:
    """Append an element of HTML to its parent and return it."""
    made = parent.makeelement(tag, attributes)
    parent.append(made)
    return made


def add_item(parent: Any, text: str, *, level: int) -> None:
    """Add an item to the list at the end of the parent, at its level from 0, or begin a list."""
    holder = parent
    for depth in range(level + 1):
        last: Any = holder[-1] if len(holder) else None
        holder = last if last is not None and last.tag == "ul" else add_element(holder, "ul")
        if depth == level or len(holder) == 0:  # where a level is left out, the item takes the deepest one there is
            break
        holder = holder[-1]
    add_element(add_element(holder, "li"), "p").text = text
