"""Word files become blocks; the archive that office files are."""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sftplay.data.ingest.extract.document import Extracted, Reason, Unreadable, find_heading
from sftplay.data.ingest.extract.markup import find_blocks

MOST_PART_BYTES = 48 << 20
"""Of one part, unpacked. Its tree takes about eight times as much memory."""

MOST_READ_BYTES = 128 << 20
"""Of all parts that are read of one document, unpacked."""

MOST_ENTRIES = 50_000

WORD = b"http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT_WORD = b"http://purl.oclc.org/ooxml/wordprocessingml/main"
"""The same vocabulary in documents saved as Strict Open XML; ISO/IEC 29500-1."""

NO_DTD = "{} declares a document type, through which XML entities come in; no office program writes one"

DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)
"""Errors that `zipfile` raises for damaged archives."""


class Archive:
    """A zip archive from which parts are read by name."""

    def __init__(self, path: Path) -> None:
        """Read the directory. Raise Unreadable where it is damaged, locked by a password, or has too many entries."""
        try:
            self._zip = zipfile.ZipFile(path)
        except (*DAMAGES, ValueError) as error:
            raise Unreadable("broken", f"the archive cannot be opened: {error}") from None
        entries = self._zip.infolist()
        if len(entries) > MOST_ENTRIES:
            raise Unreadable("unsafe", f"the archive has {len(entries):,} entries; {MOST_ENTRIES:,} are read")
        if any(entry.flag_bits & 1 for entry in entries):
            raise Unreadable("encrypted", "the archive is locked by a password")
        self.names = {entry.filename.lstrip("/"): entry for entry in entries}
        self._left = MOST_READ_BYTES

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def check_all(self) -> None:
        """Raise Unreadable by the sum of all sizes, for libraries that unpack parts themselves."""
        total = sum(entry.file_size for entry in self.names.values())
        if total > MOST_READ_BYTES:
            raise Unreadable("unsafe", f"unpacked it takes {total >> 20} MiB; {MOST_READ_BYTES >> 20} MiB are read")

    def read(self, name: str) -> bytes:
        """Return one part's bytes; empty where it is missing. Raise Unreadable where it is too large, or damaged."""
        entry = self.names.get(name.lstrip("/"))
        if entry is None:
            return b""
        size = entry.file_size
        if size > min(MOST_PART_BYTES, self._left):
            packed = max(entry.compress_size, 1)
            what = f"{name} takes {size >> 20} MiB unpacked, {size // packed} times its packed size"
            # XML of real documents is packed to a 10th or 30th.
            reason: Reason = "unsafe" if size > 100 * packed else "too_large"
            raise Unreadable(reason, f"{what}; {MOST_PART_BYTES >> 20} MiB are read")
        self._left -= size
        try:
            return self._zip.read(entry)  # never more than the size that has been checked
        except DAMAGES as error:
            raise Unreadable("broken", f"{name} is damaged: {error}") from None

    def tree(self, name: str) -> Any:
        """Return one part's XML tree; None where it is missing."""
        data = self.read(name).replace(STRICT_WORD, WORD)
        return parse_xml(data, name) if data else None


def parse_xml(data: bytes, name: str) -> Any:
    """Parse XML without entities, without a network and with libxml2's bounds on depth and length.
    Raise Unreadable where it is damaged, nested too deeply, or declares entities.
    """
    from lxml import etree

    if b"<!DOCTYPE" in data:
        raise Unreadable("unsafe", NO_DTD.format(name))
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        raise Unreadable("broken", f"{name} is no XML: {error}") from None
    if root.getroottree().docinfo.internalDTD is not None:
        raise Unreadable("unsafe", NO_DTD.format(name))
    return root


def local(element: Any) -> str:
    """Return an element's name without its namespace; empty for comments and instructions."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def attribute(element: Any, name: str) -> str | None:
    """Return an attribute's value by its name without the namespace."""
    found = element.attrib.items() if element is not None else ()
    return next((str(value) for key, value in found if key.rpartition("}")[2] == name), None)


def add_element(parent: Any, tag: str, *, text: str | None = None, **attributes: str) -> Any:
    """Append an element of HTML to its parent and return it; the text's line breaks become `br`."""
    made = parent.makeelement(tag, attributes)
    parent.append(made)
    first, *others = (text or "").split("\n")
    made.text = first if text is not None else None
    for line in others:
        add_element(made, "br").tail = line
    return made


def add_code(parent: Any, text: str) -> None:
    """Add a line of code to the code block at the end of the parent, or begin a new block."""
    if len(parent) and parent[-1].tag == "pre":
        parent[-1].text += f"\n{text}"
    else:
        add_element(parent, "pre", **{"class": "code"}).text = text


def add_item(parent: Any, text: str, *, level: int, tag: str = "ul", name: str = "", start: int = 1) -> None:
    """Add an item to the list at the end of the parent, at its level from 0, or begin a list with this tag and name."""
    holder = parent
    for depth in range(level + 1):
        is_target = depth == level
        last: Any = holder[-1] if len(holder) else None
        is_list = last is not None and last.tag in ("ul", "ol")
        if not is_list or (is_target and (name, tag) != (last.get("name"), last.tag)):
            last = add_element(holder, tag, name=name, start=str(start if is_target else 1))
        holder = last
        if is_target or len(last) == 0:  # where a level is left out, the item takes the deepest one there is
            break
        holder = last[-1]
    add_element(add_element(holder, "li"), "p", text=text)


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


WRAPPERS = ("sdt", "sdtContent", "customXml", "ins", "moveTo", "smartTag")
"""Elements around paragraphs and tables that hold no text of their own."""

SKIPPED = (
    *("pPr", "rPr", "del", "moveFrom", "instrText", "delText", "Fallback", "commentReference", "annotationRef", "rt"),
)
SIGNS = {"tab": "\t", "cr": "\n", "noBreakHyphen": "-", "softHyphen": ""}


class Numbered(NamedTuple):
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

    def find_format(self, place: Numbered) -> tuple[str, str, int]:
        """Return format, pattern and first number of a list; those of a bulleted one where it is not defined."""
        return self.formats.get(place.number, {}).get(place.level, ("bullet", "", 1))

    def count(self, place: Numbered) -> int:
        """Return the number of the next paragraph at this place."""
        counts = self.counts.setdefault(self.shared.get(place.number, place.number), {})
        counts[place.level] = counts.get(place.level, self.find_format(place)[2] - 1) + 1
        for deeper in [level for level in counts if level > place.level]:
            del counts[deeper]
        return counts[place.level]

    def is_ordered(self, place: Numbered) -> bool:
        """Whether the list at this place is numbered, not bulleted."""
        return self.find_format(place)[0] not in ("bullet", "none")

    def label(self, place: Numbered) -> str:
        """Return the number that Word shows before the last paragraph, such as `2.1`; empty for bullets and text."""
        if not self.is_ordered(place):
            return ""
        counts = self.counts.get(self.shared.get(place.number, place.number), {})

        def number(found: re.Match[str]) -> str:
            level = int(found[1]) - 1
            form, _, first = self.formats[place.number].get(level, ("decimal", "", 1))
            return as_number(counts.get(level, first), form)

        return re.sub(r"%(\d)", number, self.find_format(place)[1]).strip()


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


def _read_value(properties: Any, name: str) -> str:
    """Return the value of one property; empty where it is not set."""
    return attribute(properties.find(f"{W}{name}"), "val") or "" if properties is not None else ""


def _read_number(properties: Any, name: str, *, default: int) -> int:
    value = _read_value(properties, name)
    return int(value) if value.isdecimal() else default


def _read_place(properties: Any) -> Numbered | None:
    """Return the place in a numbering from paragraph properties; number "" where they name only a depth."""
    found = properties.find(f"{W}numPr") if properties is not None else None
    if found is None:
        return None
    return Numbered(_read_value(found, "numId"), _read_number(found, "ilvl", default=0))


def _read_heading_level(properties: Any) -> int:
    """Return the heading level from paragraph properties, from 1; 0 where they name none."""
    level = _read_number(properties, "outlineLvl", default=9)
    return level + 1 if level < 9 else 0


def read_styles(archive: Archive) -> dict[str, Style]:
    """Return style id -> style, with what it inherits; the nearest style that sets something counts."""
    root = archive.tree("word/styles.xml")
    styles = root.iter(f"{W}style") if root is not None else ()
    raw = {attribute(style, "styleId") or "": style for style in styles if attribute(style, "type") == "paragraph"}
    found = {}
    for style_id in raw:
        kind, level, number, depth = "", 0, "", None
        above = style_id
        for _ in range(DEEPEST):
            if above not in raw:
                break
            style = raw[above]
            properties = style.find(f"{W}pPr")
            if not kind:
                kind, level = _classify_style(_read_value(style, "name").strip(), properties)
            place = _read_place(properties)
            if place is not None:
                number = number or place.number
                depth = place.level if depth is None else depth
            above = _read_value(style, "basedOn")
        found[style_id] = Style(kind, level, Numbered(number, depth or 0) if number not in ("", "0") else None)
    return found


def _classify_style(name: str, properties: Any) -> tuple[str, int]:
    """Return kind and level of one style, without its parents."""
    found, level = HEADING.fullmatch(name), _read_heading_level(properties)
    if found or level:
        return "heading", int(found[1]) if found else level
    for kind, pattern in (("code", CODE), ("contents", CONTENTS), ("quote", QUOTE)):
        if pattern.fullmatch(name):
            return kind, 0
    return ("title", 0) if name.lower() == "title" else ("", 0)


def read_numbering(archive: Archive) -> Numbering:
    found = Numbering()
    root = archive.tree("word/numbering.xml")
    if root is None:
        return found
    shapes = {}
    for shape in root.findall(f"{W}abstractNum"):
        levels = {}
        for level in shape.findall(f"{W}lvl"):
            depth, form = attribute(level, "ilvl") or "0", _read_value(level, "numFmt") or "decimal"
            start = _read_number(level, "start", default=1)
            levels[int(depth) if depth.isdecimal() else 0] = (form, _read_value(level, "lvlText"), start)
        shapes[attribute(shape, "abstractNumId")] = levels
    for number in root.findall(f"{W}num"):
        name, shape_id = attribute(number, "numId") or "", attribute(number.find(f"{W}abstractNumId"), "val")
        found.formats[name] = shapes.get(shape_id, {})
        restarts = number.find(f"{W}lvlOverride") is not None
        found.shared[name] = name if restarts else f"shape {shape_id}"
    return found


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
    return "".join(formula(child) for child in element if local(child) == name)


def read_word(path: Path, encoding: str) -> Extracted:
    with Archive(path) as archive:
        body = archive.tree("word/document.xml")
        found = body.find(f"{W}body") if body is not None else None
        if found is None:
            raise Unreadable("broken", "the archive holds no Word document")
        converter = Converter(archive)
        tree = converter.convert(found)
        title = converter.title or core_title(archive)
    blocks = tuple(find_blocks(tree))
    return Extracted(title or find_heading(blocks) or path.stem, blocks)


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
        self.notes: dict[str, dict[str, Any]] = {}
        for kind in ("footnote", "endnote"):
            root = archive.tree(f"word/{kind}s.xml")
            self.notes[kind] = {attribute(note, "id") or "": note for note in root} if root is not None else {}
        self.title = ""
        self._cited: list[tuple[str, str]] = []

    def convert(self, body: Any) -> Any:
        """Return the whole document as HTML, with its notes at the end."""
        root = body.makeelement("body")
        self._add_children(body, root)
        for number, (kind, note_id) in enumerate(self._cited, 1):
            holder = add_element(root, "div")
            self._add_children(self.notes[kind][note_id], holder)
            first = next(holder.iter("p"), None)
            if first is not None:
                first.text = f"[^{number}]: {(first.text or '').lstrip()}"
        if self.title:  # the title is above the headings of the first level
            headings = list(root.iter("h1", "h2", "h3", "h4", "h5"))
            for element in [element for element in headings if not element.get("title")]:
                element.tag = f"h{int(element.tag[1]) + 1}"
        return root

    def _add_children(self, element: Any, parent: Any) -> None:
        for child in element:
            name = local(child)
            if name == "p":
                self._add_paragraph(child, parent)
            elif name == "tbl":
                self._add_table(child, parent)
            elif name in WRAPPERS:
                block = child.find(f"{W}sdtPr/{W}docPartObj/{W}docPartGallery")
                if attribute(block, "val") != "Table of Contents":
                    self._add_children(child, parent)

    def _add_paragraph(self, paragraph: Any, parent: Any) -> None:
        properties = paragraph.find(f"{W}pPr")
        style = self.styles.get(_read_value(properties, "pStyle"), Style())
        place = _read_place(properties)  # direct formatting goes before the style; number 0 means none
        if place is None:
            place = style.numbered
        elif place.number == "" and style.numbered is not None:
            place = Numbered(style.numbered.number, place.level)
        elif place.number in ("", "0"):
            place = None
        boxes: list[Any] = []
        text = "".join(self._read_texts(paragraph, boxes))
        if style.kind == "contents":
            return
        if text.strip():
            level = _read_heading_level(properties) or (style.level if style.kind == "heading" else 0)
            number = self.numbering.count(place) if place is not None else 0
            if style.kind == "title" and not self.title:
                self.title = " ".join(text.split())
                add_element(parent, "h1", title="yes").text = text
            elif level:
                label = self.numbering.label(place) if place is not None else ""
                add_element(parent, f"h{min(level, 6)}").text = f"{label} {text}".strip()
            elif place is not None:
                tag = "ol" if self.numbering.is_ordered(place) else "ul"
                add_item(parent, text, level=place.level, tag=tag, name=place.number, start=number)
            elif style.kind == "code":
                add_code(parent, text)
            else:
                holder = add_element(parent, "blockquote") if style.kind == "quote" else parent
                add_element(holder, "p", text=text)
        for box in boxes:
            self._add_children(box, parent)

    def _read_texts(self, element: Any, boxes: list[Any]) -> list[str]:
        """Return the texts below an element, in order; text boxes are added to `boxes`."""
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
                kind, note_id = name.removesuffix("Reference"), attribute(child, "id") or ""
                if note_id in self.notes[kind]:  # the note itself follows at the document's end
                    self._cited.append((kind, note_id))
                    out.append(f"[^{len(self._cited)}]")
            elif name == "txbxContent":
                boxes.append(child)
            elif name == "oMath":
                out.append(f"${formula(child)}$")
            elif name == "r":
                properties = child.find(f"{W}rPr")
                is_hidden = properties is not None and properties.find(f"{W}vanish") is not None
                texts = self._read_texts(child, boxes) if not is_hidden else []
                digits = "".join(texts).strip()
                is_power = _read_value(properties, "vertAlign") == "superscript" and digits.lstrip("-+−").isdecimal()
                out += [f"^{digits}"] if is_power else texts
            elif name and name not in SKIPPED:
                out += self._read_texts(child, boxes)
        return out

    def _add_table(self, table: Any, parent: Any) -> None:
        made = add_element(parent, "table")
        above: dict[int, Any] = {}  # column -> the cell that spans down in it
        for row in table.iter(f"{W}tr"):
            if next(row.iterancestors(f"{W}tbl")) is not table:
                continue
            line, column = add_element(made, "tr"), 0
            for cell in [inner for inner in row.iter(f"{W}tc") if next(inner.iterancestors(f"{W}tr")) is row]:
                properties = cell.find(f"{W}tcPr")
                width = _read_value(properties, "gridSpan")
                columns = max(int(width), 1) if width.isdecimal() and len(width) < 4 else 1
                merge = properties.find(f"{W}vMerge") if properties is not None else None
                if merge is not None and attribute(merge, "val") != "restart" and column in above:
                    top = above[column]
                    top.set("rowspan", str(int(top.get("rowspan", "1")) + 1))
                else:
                    made_cell = add_element(line, "td", colspan=str(columns))
                    self._add_children(cell, made_cell)
                    above.pop(column, None)
                    if merge is not None:
                        above[column] = made_cell
                column += columns
