"""docx -> blocks: the body of a Word document as a tree of HTML, which becomes Markdown as all others do.

Running headers and footers, comments, deleted and hidden text and tables of contents are not read. Formulas are
written in one line. docs/decisions.md says why no library does this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Extracted, Unreadable
from sftplay.data.ingest.extract.markup.blocks import blocks_of
from sftplay.data.ingest.extract.office.archive import Archive, attribute, local
from sftplay.data.ingest.extract.office.word_runs import runs_of
from sftplay.data.ingest.extract.office.word_styles import (
    Numbered,
    Style,
    W,
    numbered_by,
    outline_level,
    read_numbering,
    read_styles,
)

WRAPPERS = ("sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag")
"""Elements around paragraphs and tables that add nothing to read."""


def read_word(path: Path, encoding: str) -> Extracted:
    """A docx file's title and blocks."""
    with Archive(path) as archive:
        body = archive.tree("word/document.xml")
        found = body.find(f"{W}body") if body is not None else None
        if found is None:
            raise Unreadable("broken", "the archive holds no Word document")
        converter = Converter(archive)
        tree = converter.convert(found)
        title = converter.title or core_title(archive)
    blocks = tuple(blocks_of(tree))
    title = title or next((block.text.lstrip("# ") for block in blocks if block.kind == "heading"), path.stem)
    return Extracted(title, blocks)


def core_title(archive: Archive) -> str:
    """The title in an office document's properties, where somebody has written one."""
    core = archive.tree("docProps/core.xml")
    found = next((each.text or "" for each in core if local(each) == "title"), "") if core is not None else ""
    title = " ".join(found.split())
    return "" if title.lower().startswith(("microsoft word", "microsoft powerpoint", "untitled")) else title


class Converter:
    """Makes HTML of a document's paragraphs and tables; it knows the document's styles and counts its lists."""

    def __init__(self, archive: Archive) -> None:
        self.styles, self.numbering = read_styles(archive), read_numbering(archive)
        self.notes = {kind: _notes_of(archive.tree(f"word/{kind}s.xml")) for kind in ("footnote", "endnote")}
        self.title = ""
        self._cited: list[tuple[str, str]] = []

    def convert(self, body: Any) -> Any:
        """The whole document, with its notes at the end."""
        from lxml import etree

        root = etree.Element("body")
        self._add_children(body, root)
        for number, (kind, note_id) in enumerate(self._cited, 1):
            holder = etree.SubElement(root, "div")
            self._add_children(self.notes[kind][note_id], holder)
            first = next(holder.iter("p"), None)
            if first is not None:
                first.text = f"[^{number}]: {(first.text or '').lstrip()}"
        if self.title:  # the title is above the headings of the first level
            for element in [each for each in root.iter("h1", "h2", "h3", "h4", "h5") if not each.get("title")]:
                element.tag = f"h{int(element.tag[1]) + 1}"
        return root

    def cite(self, kind: str, note_id: str) -> str:
        """The sign of a note in the text; the note itself follows at the document's end."""
        if note_id not in self.notes[kind]:
            return ""
        self._cited.append((kind, note_id))
        return f"[^{len(self._cited)}]"

    def _add_children(self, element: Any, parent: Any) -> None:
        for child in element:
            name = local(child)
            if name == "p":
                self._add_paragraph(child, parent)
            elif name == "tbl":
                self._add_table(child, parent)
            elif name in WRAPPERS and _gallery(child) != "Table of Contents":
                self._add_children(child, parent)

    def _add_paragraph(self, paragraph: Any, parent: Any) -> None:
        from lxml import etree

        properties = paragraph.find(f"{W}pPr")
        style_id = attribute(properties.find(f"{W}pStyle"), "val") if properties is not None else None
        style = self.styles.get(style_id or "", Style())
        place = self._place(numbered_by(properties), style)
        text, boxes = runs_of(paragraph, self)
        if style.kind == "contents":
            return
        if text.strip():
            level = outline_level(properties) or (style.level if style.kind == "heading" else 0)
            if place is not None:
                number = self.numbering.count(place)
            if style.kind == "title" and not self.title:
                self.title = " ".join(text.split())
                etree.SubElement(parent, "h1", title="yes").text = text
            elif level:
                label = self.numbering.label(place) if place is not None else ""
                etree.SubElement(parent, f"h{min(level, 6)}").text = f"{label} {text}".strip()
            elif place is not None:
                tag = "ol" if self.numbering.is_ordered(place) else "ul"
                _add_item(parent, text, place=place, tag=tag, number=number)
            elif style.kind == "code":
                _add_code(parent, text)
            else:
                holder = etree.SubElement(parent, "blockquote") if style.kind == "quote" else parent
                _set_text(etree.SubElement(holder, "p"), text)
        for box in boxes:
            self._add_children(box, parent)

    def _place(self, own: Numbered | None, style: Style) -> Numbered | None:
        """The paragraph's place in a numbering: its own before its style's; number 0 takes it out of all."""
        if own is None:
            return style.numbered
        if own.number == "" and style.numbered is not None:
            return Numbered(style.numbered.number, own.level)
        return own if own.number not in ("", "0") else None

    def _add_table(self, table: Any, parent: Any) -> None:
        from lxml import etree

        made = etree.SubElement(parent, "table")
        above: dict[int, Any] = {}  # column -> the cell that hangs down in it
        for row in table.iter(f"{W}tr"):
            if next(row.iterancestors(f"{W}tbl")) is not table:
                continue
            line, column = etree.SubElement(made, "tr"), 0
            for cell in [each for each in row.iter(f"{W}tc") if next(each.iterancestors(f"{W}tr")) is row]:
                properties = cell.find(f"{W}tcPr")
                width = _number(properties, "gridSpan")
                merge = properties.find(f"{W}vMerge") if properties is not None else None
                if merge is not None and attribute(merge, "val") != "restart" and column in above:
                    top = above[column]
                    top.set("rowspan", str(int(top.get("rowspan", "1")) + 1))
                else:
                    made_cell = etree.SubElement(line, "td", colspan=str(width))
                    self._add_children(cell, made_cell)
                    above.pop(column, None)
                    if merge is not None:
                        above[column] = made_cell
                column += width


def _notes_of(root: Any) -> dict[str, Any]:
    """The notes of one kind by their ids."""
    return {attribute(note, "id") or "": note for note in root} if root is not None else {}


def _number(properties: Any, name: str) -> int:
    value = attribute(properties.find(f"{W}{name}"), "val") if properties is not None else None
    return max(int(value), 1) if value and value.isdecimal() and len(value) < 4 else 1


def _gallery(element: Any) -> str:
    """The kind of building block that a part of a document was made from."""
    found = element.find(f"{W}sdtPr/{W}docPartObj/{W}docPartGallery")
    return attribute(found, "val") or ""


def _set_text(element: Any, text: str) -> None:
    """Put text into an element, with its line breaks."""
    from lxml import etree

    first, *others = text.split("\n")
    element.text = first
    for line in others:
        etree.SubElement(element, "br").tail = line


def _add_code(parent: Any, text: str) -> None:
    """Add a line of code to the code before it, or begin a new one."""
    from lxml import etree

    last = parent[-1] if len(parent) else None
    if last is not None and last.tag == "pre":
        last.text += f"\n{text}"
    else:
        etree.SubElement(parent, "pre", {"class": "code"}).text = text


def _add_item(parent: Any, text: str, *, place: Numbered, tag: str, number: int) -> None:
    """Add an item to the list that ends the parent, at its depth, or begin a list."""
    from lxml import etree

    holder = parent
    for depth in range(place.level + 1):
        last = holder[-1] if len(holder) else None
        is_own = depth == place.level
        key = (place.number, tag) if is_own else None
        if last is None or last.tag not in ("ul", "ol") or (key and key != (last.get("number"), last.tag)):
            start = str(number) if is_own else "1"
            last = etree.SubElement(holder, tag, number=place.number, start=start)
        holder = last
        if is_own or len(last) == 0:  # where a depth is left out, the item stands at the depth that there is
            break
        holder = last[-1]
    _set_text(etree.SubElement(etree.SubElement(holder, "li"), "p"), text)
