"""The words of a PDF page with their places and styles, as pdfium finds them; y counts downwards from the top."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import hypot
from typing import Any

BOLD, ITALIC, MONO = 1, 2, 4
FIXED_PITCH, SLANTED, FORCE_BOLD = 1, 1 << 6, 1 << 18
"""Flags of a font; PDF 32000-1:2008, table 123."""

BOLD_NAME = re.compile(r"bold|black|heavy|semibold|demi", re.I)
ITALIC_NAME = re.compile(r"italic|oblique|slanted|(?:^|[-,])it$", re.I)
MONO_NAME = re.compile(
    r"mono|courier|consol|typewriter|cmtt|cmsltt|sftt|ectt|txtt|nimbusmon|inconsolata|menlo|monaco|code|fixed", re.I
)

SOFT_HYPHEN = "\u00ad"
LINE_HYPHENS = (2, 0xFFFE)
"""Signs by which pdfium marks a hyphen at the end of a line; it lets the next line's first word follow at once."""

LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st"}
UPRIGHT = 0.1
"""Radians by which a line may be turned and still count as running text."""


@dataclass(slots=True)
class Word:
    """Characters without a space between them."""

    text: str
    x0: float
    top: float
    x1: float
    bottom: float
    size: float
    """Height of the font in points."""

    style: int
    """BOLD, ITALIC and MONO, added."""

    base: float
    """The line on which the letters stand: fonts of one row share it, while their boxes differ."""

    table: str = ""
    """The Markdown of a ruled table that stands in the place of one word; that has no text then."""

    @property
    def middle(self) -> float:
        """The height of the middle of small letters."""
        return self.base - 0.25 * self.size


Rule = tuple[float, float, float]
"""A drawn line: its place, and where it begins and ends along the other direction."""


@dataclass(frozen=True)
class Rules:
    """The straight lines of a page."""

    across: list[Rule] = field(default_factory=list)
    down: list[Rule] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """One page's words, in the order in which they are written in the file."""

    number: int
    width: float
    height: float
    words: list[Word]
    n_unknown: int
    """Characters whose fonts do not say which letters they are."""

    has_pictures: bool
    rules: Rules


def read_words(page: Any, number: int, *, rules: Rules) -> Page:
    """The words of one page that stand upright; watermarks and labels along the margin are left out."""
    import pypdfium2.raw as raw

    width, height = page.get_size()
    turned = page.get_rotation() // 90
    text_page = page.get_textpage()
    try:
        handle = text_page.raw
        codes = [raw.FPDFText_GetUnicode(handle, place) for place in range(text_page.count_chars())]
        spans = list(_spans(codes))
        reader = _Reader(handle)
        found = [reader.word(codes, begin, end=end, turned=turned) for begin, end in spans]
        left, bottom, right, top = page.get_cropbox()
    finally:
        text_page.close()
    words = [_turn(word, turned, box=(left, bottom, right, top)) for word, angle in found if _is_upright(angle, turned)]
    n_unknown = sum(code in (0, 0xFFFD) or 0xE000 <= code < 0xF900 for code in codes)
    pictures = page.get_objects(filter=(raw.FPDF_PAGEOBJ_IMAGE,), max_depth=2)
    has_pictures = not words and next(iter(pictures), None) is not None
    return Page(number, width, height, words, n_unknown, has_pictures, rules)


class _Reader:
    """Asks pdfium for boxes and fonts; fonts are described once each."""

    def __init__(self, handle: Any) -> None:
        import pypdfium2.raw as raw

        self._raw, self._handle = raw, handle
        self._box, self._matrix = raw.FS_RECTF(), raw.FS_MATRIX()
        self._x, self._y = ctypes.c_double(), ctypes.c_double()
        self._name, self._flags = ctypes.create_string_buffer(128), ctypes.c_int()
        self._styles: dict[tuple[bytes, int], int] = {}

    def word(self, codes: list[int], begin: int, *, end: int, turned: int) -> tuple[Word, float]:
        """The word of some characters in the page's own coordinates, and how its first character is turned."""
        raw, box, matrix = self._raw, self._box, self._matrix
        raw.FPDFText_GetLooseCharBox(self._handle, begin, box)
        left, top, right, bottom = box.left, box.top, box.right, box.bottom
        raw.FPDFText_GetLooseCharBox(self._handle, end - 1, box)
        raw.FPDFText_GetMatrix(self._handle, begin, matrix)
        raw.FPDFText_GetFontInfo(self._handle, begin, self._name, 128, self._flags)
        size = raw.FPDFText_GetFontSize(self._handle, begin) * hypot(matrix.c, matrix.d)
        text = "".join(
            LIGATURES.get(code) or ("-" if code in LINE_HYPHENS else chr(code)) for code in codes[begin:end] if code
        )
        x0, x1 = min(left, box.left), max(right, box.right)
        style = self._style(self._name.value, self._flags.value)
        raw.FPDFText_GetCharOrigin(self._handle, begin, self._x, self._y)
        base = (self._x if turned % 2 else self._y).value
        word = Word(text, x0, max(top, box.top), x1, min(bottom, box.bottom), size, style, base)
        return word, raw.FPDFText_GetCharAngle(self._handle, begin)

    def _style(self, name: bytes, flags: int) -> int:
        if (name, flags) not in self._styles:
            shown = name.decode("latin-1").rpartition("+")[2]
            bold = BOLD if flags & FORCE_BOLD or BOLD_NAME.search(shown) else 0
            italic = ITALIC if flags & SLANTED or ITALIC_NAME.search(shown) else 0
            mono = MONO if flags & FIXED_PITCH or MONO_NAME.search(shown) else 0
            self._styles[name, flags] = bold + italic + mono
        return self._styles[name, flags]


def _spans(codes: list[int]) -> Iterator[tuple[int, int]]:
    """Where words begin and end among the characters."""
    begin = None
    for place, code in enumerate(codes):
        if (code < 33 and code != 2) or code in (0xA0, 0x3000, 0x2028) or chr(code).isspace():
            if begin is not None:
                yield begin, place
            begin = None
        elif code in LINE_HYPHENS and begin is not None:
            yield begin, place + 1
            begin = None
        elif begin is None:
            begin = place
    if begin is not None:
        yield begin, len(codes)


def _is_upright(angle: float, turned: int) -> bool:
    """Whether a character stands upright once the page is shown as it should be."""
    quarter = 1.5707963267948966
    off = (angle + turned * quarter) % (4 * quarter)  # pdfium counts angles clockwise
    return min(off, 4 * quarter - off) < UPRIGHT


def _turn(word: Word, turned: int, *, box: tuple[float, float, float, float]) -> Word:
    """The word with y downwards, on a page turned clockwise by so many quarters."""
    left, bottom, right, top = box
    x0, y1, x1, y0 = word.x0, word.top, word.x1, word.bottom  # y1 is the upper edge, as PDF counts
    base = (top - word.base, word.base - left, word.base - bottom, right - word.base)[turned]
    if turned == 1:
        x0, x1, y0, y1 = y0 - bottom, y1 - bottom, x0 - left, x1 - left
    elif turned == 2:
        x0, x1, y0, y1 = right - x1, right - x0, y0 - bottom, y1 - bottom
    elif turned == 3:
        x0, x1, y0, y1 = top - y1, top - y0, right - x1, right - x0
    else:
        x0, x1, y0, y1 = x0 - left, x1 - left, top - y1, top - y0
    word.x0, word.x1, word.top, word.bottom, word.base = x0, x1, y0, y1, base
    return word
