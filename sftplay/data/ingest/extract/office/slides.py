"""Read slides and sheets of Office files."""

from __future__ import annotations

import posixpath
import warnings
from collections.abc import Iterable
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, Extracted, Unreadable, heading, need
from sftplay.data.ingest.extract.markup.blocks import as_markdown, find_blocks
from sftplay.data.ingest.extract.office.archive import NO_DTD, Archive, attribute, local
from sftplay.data.ingest.extract.office.word import core_title

MOST_CELLS, MOST_EMPTY_ROWS = 20_000_000, 10_000
"""Of one document, empty ones too; rows without text that end a sheet."""


def read_sheets(path: Path, encoding: str) -> Extracted:
    """An xlsx file's title and blocks; a sheet is a page."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern what openpyxl loses in writing; nothing is written here
        book = openpyxl.load_workbook(path, read_only=True, data_only=True, keep_links=False)
        try:
            left = MOST_CELLS
            for number, sheet in enumerate(book.worksheets, 1):
                if sheet.sheet_state != "visible":
                    notes.append(f"the hidden sheet {sheet.title!r} is left out")
                    continue
                sheet.reset_dimensions()  # the stored size of a sheet may be wrong, in both directions
                rows, n_cells = _read_rows(sheet.iter_rows(values_only=True))
                left -= n_cells
                if left < 0:
                    raise Unreadable("too_large", f"more than {MOST_CELLS:,} cells: split the workbook")
                text = as_markdown(rows)
                if text:
                    blocks += [heading(sheet.title, 2, page=number), Block(text, "table", page=number)]
        finally:
            book.close()
    return Extracted(named or path.stem, tuple(blocks), tuple(notes))


def _read_rows(rows: Iterable[tuple[Any, ...]]) -> tuple[list[list[str]], int]:
    """Return the rows with text, and the number of cells that were read."""
    found: list[list[str]] = []
    n_cells = n_empty = 0
    for row in rows:
        n_cells += len(row)
        cells = ["" if value is None else cell_text(value) for value in row]
        if any(cells):
            found.append(cells)
            n_empty = 0
        else:
            n_empty += 1
        if n_cells > MOST_CELLS or n_empty > MOST_EMPTY_ROWS:
            break
    return found, n_cells


def cell_text(value: Any) -> str:
    """Return a cell's value as people write it."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, datetime):
        at_midnight = (value.hour, value.minute, value.second) == (0, 0, 0)
        return value.date().isoformat() if at_midnight else value.isoformat(" ", "seconds")
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)


TITLES = ("title", "ctrTitle")
HEADERS_FOOTERS = ("dt", "ftr", "sldNum", "hdr")
"""Placeholders for date, footer, number and header."""


def read_slides(path: Path, encoding: str) -> Extracted:
    """A pptx file's title and blocks; a slide is a page."""
    with Archive(path) as archive:
        show = archive.tree("ppt/presentation.xml")
        if show is None:
            raise Unreadable("broken", "the archive holds no presentation")
        targets = relations(archive, "ppt/presentation.xml")
        order = next((child for child in show if local(child) == "sldIdLst"), ())
        names = [targets.get(_relation_id(slide), "") for slide in order]
        blocks: list[Block] = []
        for number, name in enumerate(names, 1):
            slide = archive.tree(name) if name else None
            if slide is not None and slide.get("show") != "0":
                made = find_blocks(_slide_tree(slide, archive, name=name))
                blocks += [Block(block.text, block.kind, block.level, number) for block in made]
        title = core_title(archive)
    title = title or next((block.text.lstrip("# ") for block in blocks if block.level), path.stem)
    return Extracted(title, tuple(blocks))


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


def _relation_id(element: Any) -> str:
    """Return the id of a relation; the element also has an `id` without a namespace."""
    return next((str(value) for key, value in element.attrib.items() if key.endswith("}id")), "")


def _slide_tree(slide: Any, archive: Archive, *, name: str) -> Any:
    """Return a slide as HTML, followed by its notes."""
    from lxml import etree

    root = etree.Element("body")
    _add_shapes(next((node for node in slide.iter() if local(node) == "spTree"), ()), root)
    heads = [element for element in root if element.tag == "h2"]
    for head in reversed(heads):  # a title comes first, wherever its shape is in the file
        root.insert(0, head)
    for target in relations(archive, name).values():
        if "notesSlide" in target:
            notes = archive.tree(target)
            spoken = etree.Element("body")
            _add_shapes(next((node for node in notes.iter() if local(node) == "spTree"), ()), spoken)
            for element in spoken:
                root.append(element)
    return root


def _add_shapes(tree: Any, root: Any) -> None:
    """Add the text of shapes, of groups of shapes and of tables."""
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
            if body is not None and kind not in HEADERS_FOOTERS:
                _add_text(body, root, kind=kind)
        elif name == "graphicFrame":
            for table in shape.iter():
                if local(table) == "tbl":
                    _add_table(table, root)


def _add_text(body: Any, root: Any, *, kind: str) -> None:
    """Add the paragraphs of one shape: a title, items of a list, or plain paragraphs."""
    from lxml import etree

    paragraphs = [(_level(child), paragraph_text(child), child) for child in body if local(child) == "p"]
    paragraphs = [paragraph for paragraph in paragraphs if paragraph[1].strip()]
    if kind in TITLES and paragraphs:
        etree.SubElement(root, "h2").text = " ".join(text for _, text, _ in paragraphs)
        return
    is_list = kind in ("body", "obj") and len(paragraphs) > 1
    if is_list or any(_has_bullet(paragraph) for _, _, paragraph in paragraphs):
        for level, text, _ in paragraphs:
            _add_item(root, text, level=level)
        root.append(etree.Element("hr"))  # the next shape begins another list
        return
    for _, text, _ in paragraphs:
        etree.SubElement(root, "p").text = text


def paragraph_text(paragraph: Any) -> str:
    """Return the text of a paragraph's runs, fields and line breaks."""
    out = []
    for element in paragraph.iter():
        name = local(element)
        if name == "t" and local(element.getparent()) != "fld":
            out.append(element.text or "")
        elif name == "br":
            out.append(" ")
    return "".join(out)


def _level(paragraph: Any) -> int:
    properties = next((child for child in paragraph if local(child) == "pPr"), None)
    value = attribute(properties, "lvl") or "0"
    return min(int(value), 8) if value.isdecimal() else 0


def _has_bullet(paragraph: Any) -> bool:
    return any(local(node) in ("buChar", "buAutoNum") for node in paragraph.iter())


def _add_item(root: Any, text: str, *, level: int) -> None:
    """Add an item to the last list, at most one level below the levels that exist."""
    from lxml import etree

    holder = root
    for depth in range(level + 1):
        last = holder[-1] if len(holder) else None
        if last is None or last.tag != "ul":
            last = etree.SubElement(holder, "ul")
        holder = last
        if depth == level or len(last) == 0:
            break
        holder = last[-1]
    etree.SubElement(etree.SubElement(holder, "li"), "p").text = text


def _add_table(table: Any, root: Any) -> None:
    """Add a table with its merged cells."""
    from lxml import etree

    made = etree.SubElement(root, "table")
    for row in table:
        if local(row) == "tr":
            line = etree.SubElement(made, "tr")
            for cell in row:
                if local(cell) == "tc" and not (attribute(cell, "hMerge") or attribute(cell, "vMerge")):
                    spans = {
                        "colspan": attribute(cell, "gridSpan") or "1",
                        "rowspan": attribute(cell, "rowSpan") or "1",
                    }
                    holder = etree.SubElement(line, "td", spans)
                    for paragraph in cell.iter():
                        if local(paragraph) == "p":
                            etree.SubElement(holder, "p").text = paragraph_text(paragraph)
