"""What the paragraphs of a Word document are, by the document's own styles and numbering, in any language."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sftplay.data.ingest.extract.office.archive import Archive, attribute

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
"""Styles that one style is based on, one after another; a circle ends there."""


@dataclass(frozen=True)
class Numbered:
    """A paragraph's place in a numbering: which, and how deep."""

    number: str
    level: int


@dataclass(frozen=True)
class Style:
    """What a paragraph style says, its own parents included."""

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
    """Numbering -> the definition by which it counts together with others."""

    counts: dict[str, dict[int, int]] = field(default_factory=dict)

    def count(self, place: Numbered) -> int:
        """The number of the next paragraph at this place."""
        counts = self.counts.setdefault(self.shared.get(place.number, place.number), {})
        first = self.formats.get(place.number, {}).get(place.level, ("", "", 1))[2]
        counts[place.level] = counts.get(place.level, first - 1) + 1
        for deeper in [level for level in counts if level > place.level]:
            del counts[deeper]
        return counts[place.level]

    def is_ordered(self, place: Numbered) -> bool:
        """Whether the place counts, rather than shows a sign."""
        return self.formats.get(place.number, {}).get(place.level, ("bullet", "", 1))[0] not in ("bullet", "none")

    def label(self, place: Numbered) -> str:
        """What Word writes before the paragraph counted last, such as `2.1`; empty where it is a sign or other text."""
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
    """A number in one of Word's formats; those of few documents are written as digits."""
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
    """Style id -> what its paragraphs are."""
    root = archive.tree("word/styles.xml")
    raw: dict[str, tuple[str, str, Any]] = {}
    for style in root.iter(f"{W}style") if root is not None else ():
        if attribute(style, "type") == "paragraph":
            name = attribute(style.find(f"{W}name"), "val") or ""
            above = attribute(style.find(f"{W}basedOn"), "val") or ""
            raw[attribute(style, "styleId") or ""] = (name, above, style.find(f"{W}pPr"))
    return {each: _resolve(each, raw) for each in raw}


def numbered_by(properties: Any) -> Numbered | None:
    """The place in a numbering that paragraph properties name; number "" where they name only a depth."""
    found = properties.find(f"{W}numPr") if properties is not None else None
    if found is None:
        return None
    depth = attribute(found.find(f"{W}ilvl"), "val") or "0"
    return Numbered(attribute(found.find(f"{W}numId"), "val") or "", int(depth) if depth.isdecimal() else 0)


def outline_level(properties: Any) -> int:
    """The heading level that paragraph properties name, from 1; 0 where they name none."""
    value = attribute(properties.find(f"{W}outlineLvl"), "val") if properties is not None else None
    return int(value) + 1 if value and value.isdecimal() and int(value) < 9 else 0


def _resolve(style_id: str, raw: dict[str, tuple[str, str, Any]]) -> Style:
    """A style with what it takes over from those that it is based on: the nearest that says something counts."""
    kind, level, number, depth = "", 0, "", None
    for _ in range(DEEPEST):
        if style_id not in raw:
            break
        name, above, properties = raw[style_id]
        if not kind:
            kind, level = _kind_of(name, properties)
        place = numbered_by(properties)
        if place is not None:
            number = number or place.number
            depth = place.level if depth is None else depth
        style_id = above
    return Style(kind, level, Numbered(number, depth or 0) if number not in ("", "0") else None)


def _kind_of(name: str, properties: Any) -> tuple[str, int]:
    """What one style says by itself."""
    name = name.strip()
    found = HEADING.fullmatch(name)
    if found or outline_level(properties):
        return "heading", int(found[1]) if found else outline_level(properties)
    for kind, pattern in (("code", CODE), ("contents", CONTENTS), ("quote", QUOTE)):
        if pattern.fullmatch(name):
            return kind, 0
    return ("title", 0) if name.lower() == "title" else ("", 0)


def read_numbering(archive: Archive) -> Numbering:
    """The numberings that a document defines."""
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
