"""Word and OpenDocument files become blocks; the archive that office files are."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import (
    Block,
    Extracted,
    Reason,
    Unreadable,
    as_markdown,
    find_heading,
    heading,
    need,
    to_fence,
)
from sftplay.data.ingest.extract.markup import indent, to_cell

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

    def read_xml_parts(self) -> dict[str, bytes]:
        """Return the XML of all parts, which declare no document type; pictures are not unpacked."""
        found = {}
        for name in self.names:
            if name.endswith((".xml", ".rels")):
                found[name] = self.read(name).replace(STRICT_WORD, WORD)
                if b"<!DOCTYPE" in found[name]:
                    raise Unreadable("unsafe", NO_DTD.format(name))
        return found

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


W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"

CONTENTS = re.compile(r"toc (?:\d|heading)|contents \d|table of figures|contents heading", re.I)
DEEPEST = 20
"""Longest chain of styles that are based on each other; it ends a cycle."""

NOTES = ("word/footnotes.xml", "word/endnotes.xml")
AROUND = tuple(f"{W}{name}" for name in ("sdt", "ins", "moveTo", "customXml"))
"""Elements around blocks that add nothing to read: content controls and tracked changes."""

BLOCKS = tuple(f"{W}{name}" for name in ("p", "tbl", "tr"))


def read_word(path: Path, encoding: str) -> Extracted:
    """Return title and blocks; deleted and hidden text and tables of contents are left out."""
    with Archive(path) as archive:
        document = archive.tree("word/document.xml")
        if document is None or document.find(f"{W}body") is None:
            raise Unreadable("broken", "the archive holds no Word document")
        need("anydoc", kind="Word")
        named, found = core_title(archive), archive.tree("word/styles.xml")
        styles = {attribute(style, "styleId"): style for style in found.iter(f"{W}style")} if found is not None else {}
        title = _prepare_word(document, styles)
        parts = archive.read_xml_parts() | {"word/document.xml": _serialize(document)}
    for name in NOTES:
        if parts.get(name):
            notes = parse_xml(parts[name], name)
            _prepare_word(notes, styles)
            parts[name] = _serialize(notes)
    blocks = list(_Converter(parts, "docx").read())
    if title:  # the title is above the headings of the first level
        is_title = [block.level and block.text.lstrip("# ") == title for block in blocks]
        first = is_title.index(True) if True in is_title else len(blocks)
        blocks = [
            heading(block.text.lstrip("# "), block.level + 1) if block.level and place != first else block
            for place, block in enumerate(blocks)
        ]
        blocks[first : first + 1] = [heading(title, 1)]
    return Extracted(title or named or find_heading(blocks) or path.stem, tuple(blocks))


def _prepare_word(root: Any, styles: dict[str | None, Any]) -> str:
    """Remove hidden runs and tables of contents, mark powers; return the text of the first title.

    What anydoc passes over is written so that it finds it: blocks in content controls and tracked changes, numberings
    of styles, the words below ruby, and hyphens that do not break.
    """
    title = ""
    numbers: dict[str | None, tuple[str, str]] = {}
    for block in list(root.iter(f"{W}docPartGallery")):
        if attribute(block, "val") == "Table of Contents":
            part = next(block.iterancestors(f"{W}sdt"), None)
            if part is not None:
                part.getparent().remove(part)
    for around in reversed(list(root.iterdescendants(*AROUND))):
        inner = around.find(f"{W}sdtContent") if around.tag == f"{W}sdt" else around
        if inner is not None and any(child.tag in BLOCKS for child in inner):
            _replace(around, inner)
    for paragraph in list(root.iter(f"{W}p")):
        properties = paragraph.find(f"{W}pPr")
        style_id = attribute(properties.find(f"{W}pStyle"), "val") if properties is not None else None
        if style_id not in styles:
            continue
        name = attribute(styles[style_id].find(f"{W}name"), "val") or ""
        if style_id not in numbers:
            numbers[style_id] = _find_number(style_id, styles)
        if CONTENTS.fullmatch(name.strip()):
            paragraph.getparent().remove(paragraph)
        elif name.lower() == "title" and not title:
            title = " ".join("".join(text.text or "" for text in paragraph.iter(f"{W}t")).split())
        elif numbers[style_id][0]:
            _number(properties, *numbers[style_id])
    for hyphen in root.iter(f"{W}noBreakHyphen"):
        hyphen.tag, hyphen.text = f"{W}t", "-"
    for run in list(root.iter(f"{W}r")):
        properties = run.find(f"{W}rPr")
        if properties is None:
            continue
        hidden = properties.find(f"{W}vanish")
        if hidden is not None and attribute(hidden, "val") not in ("0", "false", "off"):
            run.getparent().remove(run)
        elif attribute(properties.find(f"{W}vertAlign"), "val") == "superscript":
            texts = run.findall(f"{W}t")
            power = "".join(text.text or "" for text in texts).strip()
            if power.lstrip("-+−").isdecimal():
                for place, text in enumerate(texts):
                    text.text = "" if place else f"^{power}"
    for ruby in reversed(list(root.iterdescendants(f"{W}ruby"))):
        _replace(ruby, [part for run in ruby.iterfind(f"{W}rubyBase//{W}r") for part in run if part.tag != f"{W}rPr"])
    return title


def _find_number(style_id: str | None, styles: dict[str | None, Any]) -> tuple[str, str]:
    """Return the numbering of a style's paragraphs and their depth in it; empty where the style names none."""
    depth = ""
    for _ in range(DEEPEST):
        if style_id not in styles:
            break
        found = styles[style_id].find(f"{W}pPr/{W}numPr")
        if found is not None:
            depth = depth or attribute(found.find(f"{W}ilvl"), "val") or "0"
            if number := attribute(found.find(f"{W}numId"), "val"):
                return number, depth
        style_id = attribute(styles[style_id].find(f"{W}basedOn"), "val")
    return "", ""


def _number(properties: Any, number: str, depth: str) -> None:
    """Write a style's numbering into a paragraph that names none itself: anydoc leaves out the style's depth."""
    from lxml import etree

    place = properties.find(f"{W}numPr")
    if place is None:
        place = etree.SubElement(properties, f"{W}numPr")
    if place.find(f"{W}numId") is None:
        for name, value in (("ilvl", depth), ("numId", number)):
            if place.find(f"{W}{name}") is None:
                etree.SubElement(place, f"{W}{name}", {f"{W}val": value})


TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
DRAWN = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
HOLDERS = ("text", "section", "text-box", "list-item", "list-header", "table-cell")
"""Elements that hold paragraphs. A frame may stand there by itself."""

OPENDOCUMENT = {"text": "odt", "presentation": "odp", "spreadsheet": "ods"}
REMOVED = (
    *("annotation", "annotation-end", "table-of-content", "notes", "alphabetical-index", "illustration-index"),
    *("ruby-text", "page-number", "bookmark-ref"),
)
"""Parts without text of the document: comments, speaker's notes, indexes with page numbers, readings of words."""


def read_opendocument(path: Path, encoding: str) -> Extracted:
    """Return title and blocks; slides and sheets are pages."""
    with Archive(path) as archive:
        if b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise Unreadable("encrypted", "the document is locked by a password")
        content, meta, parts = archive.tree("content.xml"), archive.tree("meta.xml"), archive.read_xml_parts()
    body: Any = next((child for child in content if local(child) == "body"), ()) if content is not None else ()
    kind = OPENDOCUMENT.get(local(body[0]), "") if len(body) else ""
    if not kind:
        raise Unreadable("broken", "the archive holds no OpenDocument")
    need("anydoc", kind="OpenDocument")
    named = next((node.text or "" for node in meta.iter() if local(node) == "title"), "") if meta is not None else ""
    title = _prepare_opendocument(content)
    pages = [child for child in body[0] if local(child) in ("page", "table")] if kind != "odt" else [None]
    blocks: list[Block] = []
    for number, page in enumerate(pages, 1):
        if page is not None:
            body[0][:] = [page]
        found = list(_Converter(parts | {"content.xml": _serialize(content)}, kind).read())
        if kind == "ods" and found and not found[0].level:  # anydoc names sheets only where there are several
            found.insert(0, heading(attribute(page, "name") or "", 2))
        blocks += [Block(block.text, block.kind, block.level, number if page is not None else None) for block in found]
    return Extracted(named.strip() or title or find_heading(blocks) or path.stem, tuple(blocks))


def _prepare_opendocument(content: Any) -> str:
    """Remove what is no text of the document, make titles headings; return the first title.

    anydoc finds no numbered paragraphs, and a frame only in a paragraph.
    """
    parents = {
        attribute(style, "name"): attribute(style, "parent-style-name")
        for style in content.iter()
        if local(style) == "style"
    }
    title = ""
    for element in list(content.iterdescendants()):
        name, above = local(element), element.getparent()
        if name in REMOVED:
            _remove(element)
        elif name == "numbered-paragraph":
            _replace(element, element)
        elif name and element.tag.startswith(DRAWN) and local(above) in HOLDERS:
            holder = element.makeelement(f"{TEXT}p")
            above.replace(element, holder)
            holder.append(element)
        elif name == "p":
            style = attribute(element, "style-name")
            for _ in range(DEEPEST):
                style = parents.get(style) or style
            if (style or "").lower() == "title":
                element.tag = element.tag[:-1] + "h"
                title = title or " ".join("".join(element.itertext()).split())
    return title


def _remove(element: Any) -> None:
    """Remove an element and keep the text that follows it."""
    parent, before = element.getparent(), element.getprevious()
    if before is not None:
        before.tail = (before.tail or "") + (element.tail or "")
    else:
        parent.text = (parent.text or "") + (element.tail or "")
    parent.remove(element)


def _replace(element: Any, inner: Iterable[Any]) -> None:
    """Put in an element's place what is in it."""
    for child in list(inner):
        element.addprevious(child)
    _remove(element)


def _serialize(root: Any) -> bytes:
    from lxml import etree

    return bytes(etree.tostring(root, encoding="UTF-8", xml_declaration=True))


class _Converter:
    """Converts the document that anydoc makes of an archive's parts; it counts the notes that are cited."""

    def __init__(self, parts: dict[str, bytes], kind: str) -> None:
        """Parse the parts. Raise Unreadable where anydoc refuses them."""
        import anydoc

        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for name, data in parts.items():
                archive.writestr(name, data)
        try:
            self._document = anydoc.to_document(packed.getvalue(), kind)
        except anydoc.ResourceLimitError as error:
            raise Unreadable("unsafe", str(error)) from None
        except anydoc.ConvertError as error:
            raise Unreadable("broken", str(error)) from None
        self._cited: dict[str, int] = {}

    def read(self) -> Iterator[Block]:
        yield from self._convert(self._document.blocks)
        notes = {note.id: note.blocks for note in self._document.notes}
        for name, number in list(self._cited.items()):  # a note in a note is not followed
            text = "\n\n".join(block.text for block in self._convert(notes.get(name, [])))
            yield Block(f"[^{number}]: {text}")

    def _convert(self, blocks: list[Any]) -> Iterator[Block]:
        for block in blocks:
            if block.kind == "code_block":
                yield to_fence(block.text or "", block.lang or "")
            elif block.kind == "math":
                yield Block(f"${block.text}$")
            elif block.kind == "list":
                yield Block(self._list(block.list), "list")
            elif block.kind == "table":
                yield from self._table(block.table)
            elif block.kind == "block_quote":
                for inner in self._convert(block.blocks or []):
                    yield inner if inner.level else Block(indent(inner.text, "> ", others="> "))
            elif text := self._text(block.content or []).strip():
                yield heading(text, block.level) if block.level else Block(text)

    def _text(self, content: list[Any]) -> str:
        out = []
        for inline in content:
            if inline.kind == "text" and inline.style.code and (inline.text or "").strip():
                out.append(f"`{inline.text}`")
            elif inline.kind == "link":
                out.append(self._text(inline.content or []))
            elif inline.kind == "note_ref":
                out.append(f"[^{self._cited.setdefault(inline.note_id, len(self._cited) + 1)}]")
            elif inline.kind == "checkbox":
                out.append("[x] " if inline.checked else "[ ] ")
            elif inline.kind not in ("image", "anchor"):
                text = "\n" if inline.kind == "line_break" else inline.text or ""
                out.append(f"${text}$" if inline.kind == "math" else text)
        return "".join(out)

    def _list(self, found: Any) -> str:
        lines = []
        for number, item in enumerate(found.items, found.start):
            blocks = self._convert(item.blocks)
            inner = "".join(("\n" if block.kind == "list" else "\n\n") + block.text for block in blocks).lstrip("\n")
            marker = "- " if found.marker == "bullet" else f"{number}. "
            lines += [indent(inner, marker, others=" " * len(marker))] if inner else []
        return "\n".join(lines)

    def _table(self, table: Any) -> Iterator[Block]:
        if table.kind == "layout" or max(map(len, table.grid), default=0) < 2:
            for slot in (slot for row in table.grid for slot in row if slot.kind == "origin"):
                yield from self._convert(slot.cell.blocks)
            return
        grid: list[list[str]] = []
        for place, row in enumerate(table.grid):
            line: list[str] = []
            for slot in row:
                # A short cell is repeated in the rows that it spans, so that every row can be read alone.
                is_below = slot.kind == "covered" and slot.origin_row < place and slot.origin_col == len(line)
                above = grid[slot.origin_row][slot.origin_col] if is_below else ""
                text = to_cell(list(self._convert(slot.cell.blocks))) if slot.kind == "origin" else above
                line.append(text if len(text) <= 80 or not is_below else "")
            grid.append(line)
        if text := as_markdown(grid):
            yield Block(text, "table")


def core_title(archive: Archive) -> str:
    """Return the title in an office document's properties, if a person has written one."""
    core = archive.tree("docProps/core.xml")
    found = next((child.text or "" for child in core if local(child) == "title"), "") if core is not None else ""
    title = " ".join(found.split())
    return "" if title.lower().startswith(("microsoft word", "microsoft powerpoint", "untitled")) else title
