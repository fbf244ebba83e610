"""Read Word documents: styles, runs, paragraphs, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sftplay.data.ingest.extract.document import Extracted, Unreadable
from sftplay.data.ingest.extract.markup.blocks import find_blocks
from sftplay.data.ingest.extract.office.archive import Archive, attribute, local

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
HEADING = re.compile(r"heading (\d)", re.I)
CODE = re.compile(r"html preformatted|macro text|(?:source ?)?code(?: ?block)?|preformatted(?: text)?|listing", re.I)
CONTENTS = re.compile(r"toc (?:\d|heading)|contents \d|table of figures|contents heading", re.I)
QUOTE = re.compile(r"(?:intense |block )?quot(?:e|ation)s?|block text", re.I)
ROMAN = (
    *((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")),
    *((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")),
)
DEEPEST = 20
"""Longest chain of styles that are based on each other; it ends a cycle."""


@dataclass(frozen=True)
class Numbered:
    """A paragraph's place in a numbering: the numbering and the depth."""

    number: str
    level: int


@dataclass(frozen=True)
class Style:
    """The settings of a paragraph style, with those of its parents."""

    kind: str = ""
    """heading, title, code, contents, quote or empty."""

    level: int = 0
    numbered: Numbered | None = None


@dataclass
class Numbering:
    """The lists of a document and how far each has counted."""

    formats: dict[str, dict[int, tuple[str, str, int]]] = field(default_factory=dict)
    """Numbering -> level -> format, pattern of the text, first number."""

    shared: dict[str, str] = field(default_factory=dict)
    """Numbering -> the definition that it counts together with others."""

    counts: dict[str, dict[int, int]] = field(default_factory=dict)

    def count(self, place: Numbered) -> int:
        """Return the number of the next paragraph at this place."""
        counts = self.counts.setdefault(self.shared.get(place.number, place.number), {})
        first = self.formats.get(place.number, {}).get(place.level, ("", "", 1))[2]
        counts[place.level] = counts.get(place.level, first - 1) + 1
        for deeper in [level for level in counts if level > place.level]:
            del counts[deeper]
        return counts[place.level]

    def is_ordered(self, place: Numbered) -> bool:
        """Whether the list at this place is numbered, not bulleted."""
        return self.formats.get(place.number, {}).get(place.level, ("bullet", "", 1))[0] not in ("bullet", "none")

    def label(self, place: Numbered) -> str:
        """Return the number that Word shows before the last paragraph, such as `2.1`; empty for bullets and text."""
        levels = self.formats.get(place.number, {})
        form, pattern, _ = levels.get(place.level, ("", "", 1))
        if form in ("", "bullet", "none"):
            return ""
        counts = self.counts.get(self.shared.get(place.number, place.number), {})

        def number(found: re.Match[str]) -> str:
            level = int(found[1]) - 1
            level_form, _, first = levels.get(level, ("decimal", "", 1))
            return as_number(counts.get(level, first), level_form)

        return re.sub(r"%(\d)", number, pattern).strip()


def as_number(value: int, form: str) -> str:
    """Return a number in one of Word's formats; rare formats are written as digits."""
    if form in ("lowerLetter", "upperLetter"):
        letter = chr(ord("a") + (value - 1) % 26) * ((value - 1) // 26 + 1)
        return letter.upper() if form == "upperLetter" else letter
    if form in ("lowerRoman", "upperRoman") and 0 < value < 4000:
        text = ""
        for size, sign in ROMAN:
            text, value = text + sign * (value // size), value % size
        return text if form == "upperRoman" else text.lower()
    return str(value)


def read_styles(archive: Archive) -> dict[str, Style]:
    """Return style id -> style."""
    root = archive.tree("word/styles.xml")
    raw: dict[str, tuple[str, str, Any]] = {}
    for style in root.iter(f"{W}style") if root is not None else ():
        if attribute(style, "type") == "paragraph":
            name = attribute(style.find(f"{W}name"), "val") or ""
            above = attribute(style.find(f"{W}basedOn"), "val") or ""
            raw[attribute(style, "styleId") or ""] = (name, above, style.find(f"{W}pPr"))
    return {style_id: _resolve(style_id, raw) for style_id in raw}


def numbered_by(properties: Any) -> Numbered | None:
    """Return the place in a numbering from paragraph properties; number "" where they name only a depth."""
    found = properties.find(f"{W}numPr") if properties is not None else None
    if found is None:
        return None
    depth = attribute(found.find(f"{W}ilvl"), "val") or "0"
    return Numbered(attribute(found.find(f"{W}numId"), "val") or "", int(depth) if depth.isdecimal() else 0)


def outline_level(properties: Any) -> int:
    """Return the heading level from paragraph properties, from 1; 0 where they name none."""
    value = attribute(properties.find(f"{W}outlineLvl"), "val") if properties is not None else None
    return int(value) + 1 if value and value.isdecimal() and int(value) < 9 else 0


def _resolve(style_id: str, raw: dict[str, tuple[str, str, Any]]) -> Style:
    """Return a style with what it inherits; the nearest style that sets something counts."""
    kind, level, number, depth = "", 0, "", None
    for _ in range(DEEPEST):
        if style_id not in raw:
            break
        name, above, properties = raw[style_id]
        if not kind:
            kind, level = _classify_style(name, properties)
        place = numbered_by(properties)
        if place is not None:
            number = number or place.number
            depth = place.level if depth is None else depth
        style_id = above
    return Style(kind, level, Numbered(number, depth or 0) if number not in ("", "0") else None)


def _classify_style(name: str, properties: Any) -> tuple[str, int]:
    """Return kind and level of one style, without its parents."""
    name = name.strip()
    found = HEADING.fullmatch(name)
    if found or outline_level(properties):
        return "heading", int(found[1]) if found else outline_level(properties)
    for kind, pattern in (("code", CODE), ("contents", CONTENTS), ("quote", QUOTE)):
        if pattern.fullmatch(name):
            return kind, 0
    return ("title", 0) if name.lower() == "title" else ("", 0)


def read_numbering(archive: Archive) -> Numbering:
    """Return the numberings that a document defines."""
    found = Numbering()
    root = archive.tree("word/numbering.xml")
    if root is None:
        return found
    shapes = {}
    for shape in root.findall(f"{W}abstractNum"):
        levels = {}
        for level in shape.findall(f"{W}lvl"):
            start = attribute(level.find(f"{W}start"), "val") or "1"
            form = attribute(level.find(f"{W}numFmt"), "val") or "decimal"
            text = attribute(level.find(f"{W}lvlText"), "val") or ""
            depth = attribute(level, "ilvl") or "0"
            levels[int(depth) if depth.isdecimal() else 0] = (form, text, int(start) if start.isdecimal() else 1)
        shapes[attribute(shape, "abstractNumId")] = levels
    for number in root.findall(f"{W}num"):
        name, shape_id = attribute(number, "numId") or "", attribute(number.find(f"{W}abstractNumId"), "val")
        found.formats[name] = shapes.get(shape_id, {})
        restarts = number.find(f"{W}lvlOverride") is not None
        found.shared[name] = name if restarts else f"shape {shape_id}"
    return found


SKIPPED = (
    "pPr",
    "rPr",
    "del",
    "moveFrom",
    "instrText",
    "delText",
    "Fallback",
    "commentReference",
    "annotationRef",
    "rt",
)
SIGNS = {"tab": "\t", "cr": "\n", "noBreakHyphen": "-", "softHyphen": ""}
SUPERSCRIPT = "superscript"


class NoteNumbering(Protocol):
    """Numbers the notes of a document."""

    def cite(self, kind: str, note_id: str) -> str: ...


def read_paragraph(paragraph: Any, notes: NoteNumbering) -> tuple[str, list[Any]]:
    """Return a paragraph's text with its line breaks, and the contents of its text boxes."""
    boxes: list[Any] = []
    return "".join(_texts(paragraph, notes, boxes=boxes)), boxes


def _texts(element: Any, notes: NoteNumbering, *, boxes: list[Any]) -> list[str]:
    """Return the texts below an element, in order."""
    out: list[str] = []
    for child in element:
        name = local(child)
        if name == "t":
            out.append(child.text or "")
        elif name in SIGNS:
            out.append(SIGNS[name])
        elif name == "br":
            out.append("\n" if attribute(child, "type") in (None, "textWrapping") else " ")
        elif name in ("footnoteReference", "endnoteReference"):
            out.append(notes.cite(name.removesuffix("Reference"), attribute(child, "id") or ""))
        elif name == "txbxContent":
            boxes.append(child)
        elif name == "oMath":
            out.append(f"${formula(child)}$")
        elif name == "r":
            out += _run(child, notes, boxes=boxes)
        elif name and name not in SKIPPED:
            out += _texts(child, notes, boxes=boxes)
    return out


def _run(run: Any, notes: NoteNumbering, *, boxes: list[Any]) -> list[str]:
    """Return the texts of a run: none of a hidden run, `^` before a power."""
    properties = run.find(f"{W}rPr")
    if properties is not None and properties.find(f"{W}vanish") is not None:
        return []
    texts = _texts(run, notes, boxes=boxes)
    raised = properties is not None and attribute(properties.find(f"{W}vertAlign"), "val") == SUPERSCRIPT
    digits = "".join(texts).strip()
    return [f"^{digits}"] if raised and digits.lstrip("-+−").isdecimal() else texts


def formula(element: Any) -> str:
    """Return a formula in one line, with the structures that change its meaning: fractions, powers, indices, roots."""
    out = ""
    for child in element:
        name = local(child)
        if name == "t":
            out += child.text or ""
        elif name == "f":
            out += f"({_part(child, 'num')})/({_part(child, 'den')})"
        elif name in ("sSup", "sSub", "sSubSup"):
            out += _part(child, "e")
            out += f"_{{{_part(child, 'sub')}}}" if name != "sSup" else ""
            out += f"^{{{_part(child, 'sup')}}}" if name != "sSub" else ""
        elif name == "rad":
            out += f"sqrt({_part(child, 'e')})"
        elif name == "d":
            out += f"({_part(child, 'e')})"
        elif name and not name.endswith("Pr"):
            out += formula(child)
    return out


def _part(element: Any, name: str) -> str:
    """Return the formula in one part of a structure."""
    return "".join(formula(child) for child in element if local(child) == name)


WRAPPERS = ("sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag")
"""Elements around paragraphs and tables that hold no text of their own."""


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
    blocks = tuple(find_blocks(tree))
    title = title or next((block.text.lstrip("# ") for block in blocks if block.kind == "heading"), path.stem)
    return Extracted(title, blocks)


def core_title(archive: Archive) -> str:
    """Return the title in an office document's properties, if a person has written one."""
    core = archive.tree("docProps/core.xml")
    found = next((child.text or "" for child in core if local(child) == "title"), "") if core is not None else ""
    title = " ".join(found.split())
    return "" if title.lower().startswith(("microsoft word", "microsoft powerpoint", "untitled")) else title


class Converter:
    """Converts a document's paragraphs and tables to HTML; it holds the document's styles and counts its lists."""

    def __init__(self, archive: Archive) -> None:
        self.styles, self.numbering = read_styles(archive), read_numbering(archive)
        self.notes = {kind: _read_notes(archive.tree(f"word/{kind}s.xml")) for kind in ("footnote", "endnote")}
        self.title = ""
        self._cited: list[tuple[str, str]] = []

    def convert(self, body: Any) -> Any:
        """Return the whole document as HTML, with its notes at the end."""
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
            headings = list(root.iter("h1", "h2", "h3", "h4", "h5"))
            for element in [element for element in headings if not element.get("title")]:
                element.tag = f"h{int(element.tag[1]) + 1}"
        return root

    def cite(self, kind: str, note_id: str) -> str:
        """Return the mark of a note in the text; the note itself follows at the document's end."""
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
        text, boxes = read_paragraph(paragraph, self)
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

    def _place(self, direct: Numbered | None, style: Style) -> Numbered | None:
        """Return the paragraph's place in a numbering: direct formatting before its style; number 0 means none."""
        if direct is None:
            return style.numbered
        if direct.number == "" and style.numbered is not None:
            return Numbered(style.numbered.number, direct.level)
        return direct if direct.number not in ("", "0") else None

    def _add_table(self, table: Any, parent: Any) -> None:
        from lxml import etree

        made = etree.SubElement(parent, "table")
        above: dict[int, Any] = {}  # column -> the cell that spans down in it
        for row in table.iter(f"{W}tr"):
            if next(row.iterancestors(f"{W}tbl")) is not table:
                continue
            line, column = etree.SubElement(made, "tr"), 0
            for cell in [inner for inner in row.iter(f"{W}tc") if next(inner.iterancestors(f"{W}tr")) is row]:
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


def _read_notes(root: Any) -> dict[str, Any]:
    """Return the notes of one kind by their ids."""
    return {attribute(note, "id") or "": note for note in root} if root is not None else {}


def _number(properties: Any, name: str) -> int:
    value = attribute(properties.find(f"{W}{name}"), "val") if properties is not None else None
    return max(int(value), 1) if value and value.isdecimal() and len(value) < 4 else 1


def _gallery(element: Any) -> str:
    """Return the kind of building block behind a part of a document."""
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
    """Add a line of code to the code block before it, or begin a new block."""
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
        is_target = depth == place.level
        key = (place.number, tag) if is_target else None
        if last is None or last.tag not in ("ul", "ol") or (key and key != (last.get("number"), last.tag)):
            start = str(number) if is_target else "1"
            last = etree.SubElement(holder, tag, number=place.number, start=start)
        holder = last
        if is_target or len(last) == 0:  # where a depth is left out, the item takes the deepest one there is
            break
        holder = last[-1]
    _set_text(etree.SubElement(etree.SubElement(holder, "li"), "p"), text)
