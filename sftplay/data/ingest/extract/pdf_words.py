"""Words, lists and tables on a page of PDF."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import hypot, pi, tau
from statistics import median
from typing import Any

from sftplay.data.ingest.extract.document import as_markdown

SIGNS = "•◦▪▫‣⁃∙●○■□◆◇➢➤✓✔❖\uf0b7\uf0a7\uf0d8\uf076\uf0fc·"
MARKER = re.compile(rf"(?:([{SIGNS}]|[-–—*](?=\s))|(\(?(?:\d{{1,3}}|[a-zA-Z]|[ivx]{{1,5}})[.)])(?=\s))\s*")
"""A sign, or a number or letter with a dot or bracket behind it."""


def split_marker(text: str) -> tuple[str, str]:
    """Return the Markdown marker of a list's item and its text; "" where the text begins with none."""
    found = MARKER.match(text)
    if not found or not text[found.end() :].strip():
        return "", text
    number = found[2] or ""
    rest = text[found.end() :].strip()
    if not number:
        return "- ", rest
    digits = number.strip("().")
    return (f"{digits}. " if digits.isdecimal() else f"- {number} "), rest


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
"""Characters that pdfium puts for a hyphen at the end of a line; the next line's first word follows at once."""

SHOWN_AS = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st"}
SHOWN_AS |= dict.fromkeys(LINE_HYPHENS, "-")
"""Ligatures and hyphens of a PDF."""


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
    """The Markdown of a ruled table. Such a word has no text."""

    @property
    def middle(self) -> float:
        """The height of the middle of small letters."""
        return self.base - 0.25 * self.size


Rule = tuple[float, float, float]
"""A line on the page: its place, and its begin and end along the other direction."""


@dataclass(frozen=True)
class Rules:
    """The straight lines of a page."""

    across: list[Rule] = field(default_factory=list)
    down: list[Rule] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """One page's words, in the order of the file."""

    number: int
    height: float
    words: list[Word]
    n_unknown: int
    """Characters that their fonts do not map to letters."""

    has_pictures: bool
    rules: Rules


def read_words(page: Any, number: int, *, rules: Rules) -> Page:
    """Return the upright words of one page; watermarks and labels along the margin are left out."""
    import pypdfium2.raw as raw

    _, height = page.get_size()
    turned = page.get_rotation() // 90
    box, matrix, x, y = raw.FS_RECTF(), raw.FS_MATRIX(), ctypes.c_double(), ctypes.c_double()
    name, flags = ctypes.create_string_buffer(128), ctypes.c_int()
    words = []
    text_page = page.get_textpage()
    try:
        handle = text_page.raw
        codes = [raw.FPDFText_GetUnicode(handle, place) for place in range(text_page.count_chars())]
        edges = page.get_cropbox()
        for begin, end in _spans(codes):
            off = (raw.FPDFText_GetCharAngle(handle, begin) + turned * pi / 2) % tau  # pdfium counts angles clockwise
            if min(off, tau - off) >= 0.1:  # a line may be turned by 0.1 rad and still counts as running text
                continue
            raw.FPDFText_GetLooseCharBox(handle, begin, box)
            left, top, right, bottom = box.left, box.top, box.right, box.bottom
            raw.FPDFText_GetLooseCharBox(handle, end - 1, box)
            raw.FPDFText_GetMatrix(handle, begin, matrix)
            raw.FPDFText_GetFontInfo(handle, begin, name, 128, flags)
            raw.FPDFText_GetCharOrigin(handle, begin, x, y)
            size = raw.FPDFText_GetFontSize(handle, begin) * hypot(matrix.c, matrix.d)
            text = "".join(SHOWN_AS.get(code) or chr(code) for code in codes[begin:end] if code)
            x0, y0, x1, y1 = min(left, box.left), max(top, box.top), max(right, box.right), min(bottom, box.bottom)
            base = (x if turned % 2 else y).value
            word = Word(text, x0, y0, x1, y1, size, _detect_style(name.value, flags.value), base)
            words.append(_turn(word, turned, box=edges))
    finally:
        text_page.close()
    n_unknown = sum(code in (0, 0xFFFD) or 0xE000 <= code < 0xF900 for code in codes)
    pictures = page.get_objects(filter=(raw.FPDF_PAGEOBJ_IMAGE,), max_depth=2)
    has_pictures = not words and next(iter(pictures), None) is not None
    return Page(number, height, words, n_unknown, has_pictures, rules)


@lru_cache(maxsize=1024)
def _detect_style(name: bytes, flags: int) -> int:
    shown = name.decode("latin-1").rpartition("+")[2]
    bold = BOLD if flags & FORCE_BOLD or BOLD_NAME.search(shown) else 0
    italic = ITALIC if flags & SLANTED or ITALIC_NAME.search(shown) else 0
    mono = MONO if flags & FIXED_PITCH or MONO_NAME.search(shown) else 0
    return bold + italic + mono


def _spans(codes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each word among the characters."""
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


def _turn(word: Word, turned: int, *, box: tuple[float, float, float, float]) -> Word:
    """Return the word with y downwards, on a page turned clockwise by so many quarters."""
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


HEBREW_OR_ARABIC = re.compile("[\u0590-\u08ff\ufb1d-\ufefc]")

GUTTER = 0.8
"""Least width of a gutter in sizes of the font. Spaces in justified text are half as wide at most."""

LEAST_ROWS, LEAST_WORDS, LEAST_FILL = 4, 3.0, 0.55
"""Least content of each side of a gutter: rows, words in its usual row, share of the width that this row fills. Cells
of a table have less."""

MOST_CROSSED = 0.7
"""Share of rows that may cross a gutter."""

DEEPEST, EDGE, STEP, MOST_STEPS = 4, 0.15, 2.0, 400
"""Columns within columns; share of the width at both sides where no gutter is looked for; points between trials; trials
on a page of any width."""


@dataclass(slots=True)
class PdfRow:
    """Words side by side, from left to right, or from right to left in scripts that are written so."""

    words: list[Word]
    top: float
    bottom: float
    x0: float
    x1: float
    size: float
    """The font's size of most of its characters."""

    middle: float
    """Of the longest word of that size."""

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def is_code(self) -> bool:
        return all(word.style & MONO for word in self.words)


def to_rows(words: list[Word]) -> list[PdfRow]:
    """Return the rows of some words, from top to bottom."""
    groups: list[list[Word]] = []
    for word in sorted(words, key=lambda word: (word.middle, word.x0)):
        for group in reversed(groups[-6:]):
            # The largest distance between middles of words in one row.
            near = 0.45 * max(min(group[0].size, word.size), 1)
            if abs(group[0].middle - word.middle) <= near:
                group.append(word)
                break
        else:
            groups.append([word])
    return sorted(map(_to_row, groups), key=lambda row: row.middle)


def _to_row(words: list[Word]) -> PdfRow:
    words = sorted(words, key=lambda word: word.x0)
    right_to_left = [word for word in words if HEBREW_OR_ARABIC.search(word.text)]
    if 2 * len(right_to_left) > len(words):
        words.reverse()
    sizes: Counter[float] = Counter()
    for word in words:
        sizes[word.size] += len(word.text)
    size = max(sizes, key=lambda candidate: sizes[candidate])
    longest = max((word for word in words if word.size == size), key=lambda word: len(word.text))
    top, bottom = min(word.top for word in words), max(word.bottom for word in words)
    x0, x1 = min(word.x0 for word in words), max(word.x1 for word in words)
    return PdfRow(words, top, bottom, x0, x1, size, longest.middle)


def to_columns(words: list[Word], depth: int = 0) -> list[list[PdfRow]]:
    """Return the words' rows by column, in reading order."""
    rows = to_rows(words)
    place = find_gutter(rows) if depth < DEEPEST else None
    if place is None:
        return [rows] if rows else []
    columns: list[list[PdfRow]] = []
    for band, is_divided in _bands(rows, place, half=half_gutter(rows)):
        if not is_divided:
            columns.append(band)
            continue
        inside = [word for row in band for word in row.words]
        for side in ([w for w in inside if w.x1 <= place + STEP], [w for w in inside if w.x1 > place + STEP]):
            columns += to_columns(side, depth + 1)
    return columns


def find_gutter(rows: list[PdfRow]) -> float | None:
    """Return the x of the gutter that divides most text; None where the rows are one column."""
    if len(rows) < LEAST_ROWS:
        return None
    left, right = min(row.x0 for row in rows), max(row.x1 for row in rows)
    half = half_gutter(rows)
    step_points = max(STEP, (right - left) / MOST_STEPS)
    first, n_steps = left + EDGE * (right - left), int((1 - 2 * EDGE) * (right - left) / step_points)
    crossed = [0] * (n_steps + 1)
    for row in rows:
        for x0, x1 in segments(((word.x0, word.x1) for word in row.words), 2 * half):
            begin, end = int((x0 - half - first) / step_points), int((x1 + half - first) / step_points)
            for step in range(max(begin, 0), min(end, n_steps)):
                crossed[step] += 1
    scores = {}
    for x in (first + step * step_points for step in range(n_steps) if crossed[step] <= MOST_CROSSED * len(rows)):
        bands = _bands(rows, x, half=half)
        scores[x] = sum(_score(band, x, edges=(left, right)) for band, is_divided in bands if is_divided)
    best = max(scores.values(), default=0)
    return median(x for x in scores if scores[x] == best) if best else None


def half_gutter(rows: list[PdfRow]) -> float:
    return GUTTER * median(row.size for row in rows) / 2


def segments(spans: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return the begin and end of each group of a row's words or cells, divided by at least the gap."""
    found: list[tuple[float, float]] = []
    for x0, x1 in sorted(spans):
        if found and x0 - found[-1][1] < gap:
            found[-1] = found[-1][0], max(x1, found[-1][1])
        else:
            found.append((x0, x1))
    return found


def _bands(rows: list[PdfRow], x: float, *, half: float) -> list[tuple[list[PdfRow], bool]]:
    """Return the rows in runs, and for each run whether its rows leave the strip at x free; short runs do not count."""
    bands: list[tuple[list[PdfRow], bool]] = []
    for row in rows:
        is_free = all(word.x1 <= x - half or word.x0 >= x + half for word in row.words)
        if bands and bands[-1][1] == is_free:
            bands[-1][0].append(row)
        else:
            bands.append(([row], is_free))
    divided = []
    for band, is_free in bands:
        n_left = sum(any(word.x1 <= x for word in row.words) for row in band)
        n_right = sum(any(word.x1 > x for word in row.words) for row in band)
        divided.append((band, is_free and min(n_left, n_right) >= LEAST_ROWS))
    return divided


def _score(band: list[PdfRow], x: float, *, edges: tuple[float, float]) -> int:
    """Return the characters on the side that has fewer; 0 where a side is no running text."""
    scores = []
    for is_left in (True, False):
        sides = [[word for word in row.words if (word.x1 <= x) is is_left] for row in band]
        sides = [side for side in sides if side]
        width = x - edges[0] if is_left else edges[1] - x
        fills = [(max(w.x1 for w in side) - min(w.x0 for w in side)) / max(width, 1) for side in sides]
        if median(map(len, sides)) < LEAST_WORDS or median(fills) < LEAST_FILL:
            return 0
        scores.append(sum(len(word.text) for side in sides for word in side))
    return min(scores)


LEAST_TABLE_ROWS, MOST_COLUMNS = 3, 40
FAR = 2.6
"""Heights of a row by which the rows of a table may be apart."""


def find_tables(rows: list[PdfRow]) -> list[tuple[int, int, str]]:
    """Return the tables among a column's rows: the first row, the end, and the Markdown."""
    found, place = [], 0
    while place < len(rows):
        end = _find_end(rows, place)
        text = _format_rows(rows[place:end]) if end - place >= LEAST_TABLE_ROWS else None
        if text is not None:
            found.append((place, end, text))
        place = end if text is not None else place + 1
    return found


def find_cells(row: PdfRow) -> list[tuple[float, float]]:
    """Return the begin and end of each cell of a row; a list's sign belongs to its item."""
    # The least space between cells is given in sizes of the font.
    found = segments(((word.x0, word.x1) for word in row.words), 1.15 * row.size)
    if len(found) > 1 and MARKER.fullmatch(f"{row.words[0].text} ") and found[0][1] <= row.words[0].x1 + 0.1:
        found[:2] = [(found[0][0], found[1][1])]
    return found


def _find_end(rows: list[PdfRow], begin: int) -> int:
    """Return the place after the last row of several cells that follows without a gap or a full row of text."""
    if len(find_cells(rows[begin])) < 2 or rows[begin].is_code:
        return begin
    last, single = begin, 0
    for place in range(begin + 1, len(rows)):
        row = rows[place]
        if row.top - rows[place - 1].bottom > FAR * row.size or row.is_code:
            break
        if len(find_cells(row)) >= 2:
            last, single = place, 0
        else:
            single += 1
            if single > 2:
                break
    return last + 1


def _format_rows(rows: list[PdfRow]) -> str | None:
    """Return the table of some rows as Markdown; None where their cells are not aligned."""
    cells = [found for row in rows if len(found := find_cells(row)) >= 2]
    most = max(map(len, cells), default=0)
    # Cells that overlap share a column; wider cells are left out.
    columns = segments((cell for line in cells if len(line) >= max(2, most - 1) for cell in line), 0)
    if not 2 <= len(columns) <= MOST_COLUMNS or len(cells) < LEAST_TABLE_ROWS:
        return None
    if sum(map(len, cells)) < 0.6 * len(columns) * len(cells):
        return None
    grid: list[list[str]] = []
    for row in rows:
        line = [""] * len(columns)
        for word in row.words:
            middle = (word.x0 + word.x1) / 2
            distances = [max(x0 - middle, middle - x1, 0.0) for x0, x1 in columns]
            column = distances.index(min(distances))
            line[column] = f"{line[column]} {word.text}".strip()
        if grid and not line[0] and any(grid[-1]):  # a cell's further lines
            grid[-1] = [f"{above} {below}".strip() for above, below in zip(grid[-1], line)]
        else:
            grid.append(line)
    return as_markdown(grid)
