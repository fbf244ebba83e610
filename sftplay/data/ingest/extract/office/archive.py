"""Read parts of an office document within bounds: sizes are checked before unpacking, XML fetches nothing.

Parts that are not asked for, such as pictures, are never unpacked, whatever size they claim.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Reason, Unreadable

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
