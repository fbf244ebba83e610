"""Slides and OpenDocument files become blocks."""

from __future__ import annotations

import posixpath
import warnings
from contextlib import closing
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, Extracted, Unreadable, find_heading, heading, need
from sftplay.data.ingest.extract.markup import BREAK, as_markdown, find_blocks
from sftplay.data.ingest.extract.word import (
    NO_DTD,
    Archive,
    add_code,
    add_element,
    add_item,
    attribute,
    core_title,
    local,
)

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
        return f"{value:.10g}"
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
                if "notesSlide" in target:
                    notes = archive.tree(target)
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


SKIPPED = (
    *("tracked-changes", "annotation", "annotation-end", "sequence-decls", "forms", "table-of-content", "notes"),
    *("user-index", "alphabetical-index", "illustration-index", "table-index", "variable-decls", "shapes"),
)
"""Parts without text of the document: deletions, comments, indexes with page numbers, speaker's notes."""

CODE = ("preformatted", "source", "code")


def read_opendocument(path: Path, encoding: str) -> Extracted:
    """Return title and blocks; slides and sheets are pages."""
    with Archive(path) as archive:
        if b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise Unreadable("encrypted", "the document is locked by a password")
        content, meta = archive.tree("content.xml"), archive.tree("meta.xml")
    body = next((child for child in content if local(child) == "body"), None) if content is not None else None
    if body is None or len(body) == 0:
        raise Unreadable("broken", "the archive holds no OpenDocument")
    reader = _Converter(content)
    named = next((node.text or "" for node in meta.iter() if local(node) == "title"), "") if meta is not None else ""
    blocks: list[Block] = []
    pages = [child for child in body[0] if local(child) in ("page", "table")] if local(body[0]) != "text" else []
    for number, page in enumerate(pages, 1):
        root = content.makeelement("body")
        if local(page) == "table":
            add_element(root, "h2").text = attribute(page, "name") or ""
        reader.add(page, root)
        made = find_blocks(root)
        keeps = len(made) > 1 or (made and not made[0].level)
        blocks += [Block(block.text, block.kind, block.level, number) for block in made if keeps]
    if not pages:
        root = content.makeelement("body")
        reader.add_children(body[0], root)
        blocks = find_blocks(root)
    title = named.strip() or reader.title or find_heading(blocks) or path.stem
    return Extracted(title, tuple(blocks))


class _Converter:
    def __init__(self, content: Any) -> None:
        self.title = ""
        self._parents: dict[str, str] = {}
        self._ordered: dict[tuple[str, int], bool] = {}
        for style in content.iter():
            if local(style) == "style":
                self._parents[attribute(style, "name") or ""] = attribute(style, "parent-style-name") or ""
            elif local(style) in ("list-level-style-number", "list-level-style-bullet"):
                level = int(attribute(style, "level") or "1")
                name = attribute(style.getparent(), "name") or ""
                is_numbered = local(style).endswith("number") and bool(attribute(style, "num-format"))
                self._ordered[name, level] = is_numbered

    def add_children(self, element: Any, parent: Any) -> None:
        for child in element:
            self.add(child, parent)

    def add(self, element: Any, parent: Any) -> None:
        name = local(element)
        if not name or name in SKIPPED:
            return
        if name in ("p", "h"):
            self._add_paragraph(element, parent)
        elif name == "list":
            self._add_list(element, parent)
        elif name == "table":
            self._add_table(element, add_element(parent, "table"))
        else:
            self.add_children(element, parent)

    def _add_paragraph(self, element: Any, parent: Any) -> None:
        text, frames = self._text(element)
        style = self._style(attribute(element, "style-name") or "")
        if text.strip(f" \n{BREAK}"):
            if local(element) == "h" or style == "title":
                level = int(attribute(element, "outline-level") or "1") if style != "title" else 1
                add_element(parent, f"h{min(max(level, 1), 6)}").text = text.replace(BREAK, " ")
                self.title = self.title or (" ".join(text.replace(BREAK, " ").split()) if style == "title" else "")
            elif any(word in style for word in CODE):
                add_code(parent, text.replace(BREAK, "\n"))
            else:
                add_element(parent, "p", text=text.replace("\n", " ").replace(BREAK, "\n"))
        for frame in frames:
            self.add_children(frame, parent)

    def _text(self, element: Any) -> tuple[str, list[Any]]:
        """Return the text of a paragraph, and the frames in it that hold further paragraphs."""
        out, frames = [element.text or ""], []
        for child in element:
            name = local(child)
            if name == "s":
                out.append(" " * min(int(attribute(child, "c") or "1"), 200))
            elif name in ("tab", "line-break"):
                out.append("\t" if name == "tab" else BREAK)
            elif name in ("frame", "text-box", "custom-shape", "g"):
                frames.append(child)
            elif name == "note":
                notes = [self._text(part)[0] for part in child.iter() if local(part) == "p"]
                out.append(f" ({' '.join(notes).strip()})")
            elif name and name not in SKIPPED and name not in ("page-number", "ruby-text", "bookmark-ref"):
                text, inner = self._text(child)
                out.append(text)
                frames += inner
            out.append(child.tail or "")
        return "".join(out), frames

    def _style(self, name: str) -> str:
        """Return a paragraph's named style; an automatic style is replaced by its parent."""
        for _ in range(20):
            if name not in self._parents or not self._parents[name]:
                break
            name = self._parents[name]
        return name.lower().replace("_20_", " ")

    def _add_list(self, element: Any, parent: Any, *, style: str = "", level: int = 1) -> None:
        style = attribute(element, "style-name") or style
        made = add_element(parent, "ol" if self._ordered.get((style, level)) else "ul")
        for item in element:
            if local(item) not in ("list-item", "list-header"):
                continue
            holder = add_element(made, "li")
            for child in item:
                if local(child) == "list":
                    self._add_list(child, holder, style=style, level=level + 1)
                else:
                    self.add(child, holder)

    def _add_table(self, table: Any, made: Any) -> None:
        for row in table.iter():
            if local(row) != "table-row" or next(e for e in row.iterancestors() if local(e) == "table") is not table:
                continue
            cells = [child for child in row if local(child) in ("table-cell", "covered-table-cell")]
            while cells and len(cells[-1]) == 0:  # a sheet's empty cells up to its edge
                cells.pop()
            for _ in range(_count(row, "number-rows-repeated") if cells else 0):
                line = add_element(made, "tr")
                for cell in cells:
                    if local(cell) == "covered-table-cell":
                        continue
                    spans = {"colspan": "number-columns-spanned", "rowspan": "number-rows-spanned"}
                    for _ in range(_count(cell, "number-columns-repeated")):
                        counts = {span: str(_count(cell, name)) for span, name in spans.items()}
                        self.add_children(cell, add_element(line, "td", **counts))


def _count(element: Any, name: str) -> int:
    value = attribute(element, name) or "1"
    # Whole empty sheets are stored as repeats.
    return min(max(int(value), 1), 1_000) if value.isdecimal() and len(value) < 8 else 1
