"""Find the structure of PDF pages: headings, lists, headers and footers, hyphens at line ends."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from sftplay.data.ingest.extract.document import BlockKind
from sftplay.data.ingest.extract.pdf.lists import split_marker
from sftplay.data.ingest.extract.pdf.tables import find_tables
from sftplay.data.ingest.extract.pdf.words import BOLD, ITALIC, MONO, SOFT_HYPHEN, Page, PdfRow, Word, segments, to_rows

MARGIN = 0.13
"""Share of a page's height, at the top and at the bottom, that may hold headers and footers."""

NUMBER_MARGIN = 0.1
MOST_ROWS = 3
"""Rows at each edge that may be headers or footers."""

LEAST_PAGES, LEAST_SHARE = 3, 0.25
"""Pages, or share of a short document's pages, on which a header or footer recurs. A chapter's header recurs in its
chapter only, so this number of pages is enough in a long document."""

HEIGHT_POINTS = 6.0
"""Headers and footers have the same height on all pages, within rounding."""

NUMBER_AT_END, NUMBER_AT_BEGIN = re.compile(r"(?<!\d)(\d{1,4})\W*$"), re.compile(r"\W*(\d{1,4})\b")
PAGE_NUMBER = re.compile(
    r"(?:page|p\.|seite|side|página|pagina|стр\.?)?\s*[-–—|(\[]*\s*"
    r"(?:\d{1,4}|[ivxlc]{1,6}|[A-Z]?\d{0,2}[-.]\d{1,3})\s*[-–—|)\]]*(?:\s*(?:/|of|von|de|из)\s*\d{1,4})?",
    re.I,
)


def find_headers_footers(pages: list[Page]) -> set[int]:
    """Return the ids of the Word objects in headers and footers."""
    edges = [(page, edge, row) for page in pages for edge, row in _edge_rows(page)]
    seen: Counter[tuple[str, str, int]] = Counter()
    counted: Counter[tuple[str, int, int]] = Counter()
    for page, edge, row in edges:
        seen.update({(edge, _pattern(row), _height(page, row) + near) for near in (0, 1)})
        counted.update({(edge, _height(page, row) + near, step) for near in (0, 1) for step in _offsets(page, row)})
    most = max(2, min(LEAST_PAGES, round(LEAST_SHARE * len(pages)) or 2))
    found: set[int] = set()
    for page, edge, row in edges:
        returns = max(seen[edge, _pattern(row), _height(page, row) + near] for near in (0, 1))
        keys = [(edge, _height(page, row) + near, step) for near in (0, 1) for step in _offsets(page, row)]
        counts = max((counted[key] for key in keys), default=0)
        if returns >= most or counts >= most or _is_page_number(page, row):
            found.update(id(word) for word in row.words)
    return found


def _edge_rows(page: Page) -> list[tuple[str, PdfRow]]:
    """Return the outermost rows in the margins of a page."""
    words: dict[str, list[Word]] = {"top": [], "bottom": []}
    for word in page.words:
        if word.middle < MARGIN * page.height:
            words["top"].append(word)
        elif word.middle > (1 - MARGIN) * page.height:
            words["bottom"].append(word)
    top, bottom = to_rows(words["top"])[:MOST_ROWS], to_rows(words["bottom"])[-MOST_ROWS:]
    return [*(("top", row) for row in top), *(("bottom", row) for row in bottom)]


def _pattern(row: PdfRow) -> str:
    """Return a row's text with its numbers, which change from page to page, replaced by `#`."""
    return re.sub(r"\d+", "#", row.text.lower())


def _offsets(page: Page, row: PdfRow) -> set[int]:
    """Return the numbers at a row's ends less the page's number: the same on all pages for a page number."""
    ends = [NUMBER_AT_END.search(row.text), NUMBER_AT_BEGIN.match(row.text)]
    return {int(found[1]) - page.number for found in ends if found}


def _height(page: Page, row: PdfRow) -> int:
    """Return the distance of a row from the nearer edge, in steps."""
    return int(min(row.middle, page.height - row.middle) / HEIGHT_POINTS)


def _is_page_number(page: Page, row: PdfRow) -> bool:
    """Whether a row at the edge holds a page number only."""
    at_edge = min(row.middle, page.height - row.middle) < NUMBER_MARGIN * page.height
    return at_edge and PAGE_NUMBER.fullmatch(row.text.strip()) is not None


DIVIDED = re.compile(rf"([^\W\d_]+)[-‐{SOFT_HYPHEN}]$")
LONGEST_WORD = 80
FRACTION = re.compile(r"(?<=\d) ?⁄ ?(?=\d)")
BEGINS = re.compile(r"[^\W\d_]+")
COMPOUND = (
    "self",
    "non",
    "well",
    "cross",
    "half",
    "all",
    "ex",
    "anti",
    "multi",
    "semi",
    "high",
    "low",
    "long",
    "short",
)
"""First parts that in English mostly keep their hyphen where the document does not say."""


class Vocabulary:
    """Words and compounds as the document writes them within its lines."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.words: set[str] = set()
        self.compounds: set[str] = set()
        for text in texts:
            lowered = text.lower().strip(".,;:!?()[]\"'“”‘’")
            (self.compounds if "-" in lowered else self.words).add(lowered)

    def join(self, lines: list[str]) -> str:
        """Return the lines as one text."""
        text = ""
        for line in lines:
            line = line.strip()
            divided, begins = DIVIDED.search(text[-LONGEST_WORD:]), BEGINS.match(line)
            if not text:
                text = line
            elif divided and begins and begins[0][0].islower():
                text = text[:-1] + line if not self._keeps(divided, begins[0]) else text.rstrip(SOFT_HYPHEN) + line
            elif text.endswith(("-", "‐")) and begins and text[-2:-1].isalnum():
                text += line  # Anglo-Saxon, COVID-19
            else:
                text = f"{text.rstrip(SOFT_HYPHEN)} {line}"
        return FRACTION.sub("/", text.replace(SOFT_HYPHEN, ""))

    def _keeps(self, divided: re.Match[str], rest: str) -> bool:
        """Whether the hyphen belongs to the word."""
        if divided[0].endswith(SOFT_HYPHEN):
            return False
        first = divided[1].lower()
        if f"{first}-{rest}".lower() in self.compounds:
            return True
        return f"{first}{rest}".lower() not in self.words and first in COMPOUND


LARGER = 1.12
"""A line is a heading from this multiple of the body text's size."""

MOST_LEVELS = 4
LONGEST_HEADING, MOST_HEADING_ROWS = 200, 3
LONGEST_STYLED = 100
"""Most characters of a heading that only its style marks."""

APART, PITCH_LIMIT = 1.3, 2.5
"""A paragraph ends at this multiple of the usual distance of rows; the usual distance is below so many font sizes."""

LABEL_GAP = 2.0
"""Gap in font sizes between words of one height that do not belong together, such as labels in a picture."""

CAPTION = re.compile(r"(?:figure|fig\.?|table|listing|chart|plate|abbildung|tabelle)\s*\w*\d", re.I)
LEADERS = re.compile(r"(?:\.\s?){4,}\s*\w{1,6}$")
"""Dots up to a page number: a line of a table of contents."""

ENDS = (".", "!", "?", ":", ";", "”", '"', "。")


@dataclass(slots=True)
class PdfPiece:
    """A part of a document before parts that belong together are joined."""

    kind: BlockKind
    lines: list[str]
    page: int
    level: int = 0
    marker: str = ""
    """Of a list's item, in Markdown."""

    x0: float = 0.0
    begins_column: bool = False


@dataclass(frozen=True)
class Fonts:
    """Size and style of a document's body text, and the larger sizes, which are headings."""

    size: float
    style: int
    levels: dict[float, int]

    def find_level(self, row: PdfRow) -> int:
        """Return the heading level for a row's size; 0 for none."""
        return self.levels.get(_rounded(row.size), 0)

    def styled_level(self, rows: list[PdfRow]) -> int:
        """Return the heading level for bold or italic letters; 0 for none."""
        extra = _find_common_style(rows) & ~self.style & (BOLD | ITALIC)
        if not extra or rows[0].size < 0.95 * self.size:
            return 0
        return len(self.levels) + (1 if extra & BOLD else 2)


def find_fonts(pages: Iterable[Page]) -> Fonts:
    """Return the fonts of a document."""
    sizes: Counter[float] = Counter()
    styles: Counter[int] = Counter()
    for page in pages:
        for word in page.words:
            sizes[_rounded(word.size)] += len(word.text)
            styles[word.style & (BOLD | ITALIC)] += len(word.text)
    body = max(sizes, key=lambda size: (sizes[size], size), default=0.0)
    larger = sorted((size for size in sizes if size >= LARGER * body), reverse=True)
    levels = {size: min(place + 1, MOST_LEVELS) for place, size in enumerate(larger)}
    return Fonts(body, max(styles, key=lambda style: styles[style], default=0), levels)


def to_pieces(rows: list[PdfRow], fonts: Fonts, *, page: int) -> list[PdfPiece]:
    """Return the pieces of one column."""
    rows = [row for row in rows if not LEADERS.search(row.text)]
    pieces: list[PdfPiece] = []
    for is_ruled, part in groupby(rows, key=lambda row: any(word.table for word in row.words)):
        inside = list(part)
        if is_ruled:
            tables = [word for row in inside for word in row.words]
            pieces += [
                PdfPiece("table" if word.table else "paragraph", [word.table or word.text], page) for word in tables
            ]
        else:
            pieces += _aligned_pieces(inside, fonts, page=page)
    if pieces:
        pieces[0].begins_column = True
    return pieces


def _aligned_pieces(rows: list[PdfRow], fonts: Fonts, *, page: int) -> list[PdfPiece]:
    """Return the pieces of rows that may hold tables without lines."""
    pieces: list[PdfPiece] = []
    place = 0
    for table in find_tables(rows):
        pieces += _text_pieces(rows[place : table.begin], fonts, page=page)
        pieces.append(PdfPiece("table", [table.text], page))
        place = table.end
    return pieces + _text_pieces(rows[place:], fonts, page=page)


def _text_pieces(rows: list[PdfRow], fonts: Fonts, *, page: int) -> list[PdfPiece]:
    """Return the pieces of rows without tables."""
    rows = [part for row in rows for part in _labels(row)]
    groups = _groups(rows)
    pieces = []
    for place, group in enumerate(groups):
        following = groups[place + 1] if place + 1 < len(groups) else None
        pieces.append(_piece(group, following, fonts=fonts, page=page))
    return pieces


def _labels(row: PdfRow) -> list[PdfRow]:
    """Return the row, or its parts if they are far apart and the first is no heading number or list marker."""
    places = segments(row.words, LABEL_GAP * row.size)
    if len(places) == 1 or _is_code(row) or len(row.words[0].text) <= 4:
        return [row]
    parts = [[word for word in row.words if x0 <= word.x0 <= x1] for x0, x1 in places]
    return [row for part in parts if part for row in to_rows(part)]


def _groups(rows: list[PdfRow]) -> list[list[PdfRow]]:
    """Group the rows; a group ends where something new begins."""
    if not rows:
        return []
    steps = [after.middle - row.middle for row, after in pairwise(rows)]
    usual = [step for row, step in zip(rows, steps) if 0.5 * row.size < step < PITCH_LIMIT * row.size]
    pitch = median(usual) if usual else 1.2 * rows[0].size
    left, right = min(row.x0 for row in rows), max(row.x1 for row in rows)
    groups = [[rows[0]]]
    for row in rows[1:]:
        if _begins(row, groups[-1], pitch=pitch, edges=(left, right)):
            groups.append([row])
        else:
            groups[-1].append(row)
    return groups


def _begins(row: PdfRow, group: list[PdfRow], *, pitch: float, edges: tuple[float, float]) -> bool:
    """Whether a row begins something new after the rows of a group."""
    above, first = group[-1], group[0]
    step = row.middle - above.middle
    if _is_code(row) or _is_code(above):
        return not (_is_code(row) and _is_code(above)) or step > 3 * pitch
    if step > max(APART * pitch, APART * row.size) or step < 0.5 * row.size:
        return True
    if _sizes(row).isdisjoint(_sizes(above)) or _find_common_style([row]) != _find_common_style([above]):
        return True
    if split_marker(row.text)[0]:
        return True
    left, right = edges
    if split_marker(first.text)[0]:
        return not _continues_item(row, group, right=right)
    if row.x0 > above.x0 + 0.7 * row.size and above.x0 < left + 0.7 * row.size and row.x0 < left + 5 * row.size:
        return True
    is_short = above.x1 < right - 0.25 * (right - left)
    return is_short and above.text.endswith(ENDS[:4]) and not row.text[0].islower()


def _continues_item(row: PdfRow, group: list[PdfRow], *, right: float) -> bool:
    """Whether a row continues an item: it is below the item's text, or continues a sentence."""
    first, above = group[0], group[-1]
    text_x = first.words[1].x0 if len(first.words) > 1 else first.x0
    is_full = above.x1 > right - 0.15 * (right - first.x0)
    is_under = text_x - 0.6 * row.size <= row.x0 <= text_x + 2 * row.size
    return is_under or (is_full and row.text[0].islower())


def _piece(group: list[PdfRow], following: list[PdfRow] | None, *, fonts: Fonts, page: int) -> PdfPiece:
    """Return the piece of a group of rows."""
    text = " ".join(row.text for row in group)
    if _is_code(group[0]):
        return PdfPiece("code", _code_lines(group), page)
    marker, rest = split_marker(text)
    level = _heading_level(group, following, fonts=fonts, text=text)
    if level:
        return PdfPiece("heading", [row.text for row in group], page, level)
    if marker:
        lines = [row.text for row in group]
        lines[0] = split_marker(lines[0])[1] if split_marker(lines[0])[0] else rest
        return PdfPiece("list", lines, page, marker=marker, x0=group[0].x0)
    return PdfPiece("paragraph", [row.text for row in group], page, x0=group[0].x0)


def _heading_level(group: list[PdfRow], following: list[PdfRow] | None, *, fonts: Fonts, text: str) -> int:
    """Return the level if the group is a heading, else 0."""
    if len(group) > MOST_HEADING_ROWS or len(text) > LONGEST_HEADING or CAPTION.match(text):
        return 0
    if sum(map(str.isalpha, text)) < max(2, 0.4 * len(text)):
        return 0
    by_size = max(fonts.find_level(row) for row in group)
    if by_size:
        return by_size
    begins = text[0].isupper() or text[0].isdigit()
    ends = not text.endswith((*ENDS, ","))
    if len(text) > LONGEST_STYLED or len(group) > 2 or not begins or not ends or following is None:
        return 0
    level = fonts.styled_level(group)
    return level if level and _find_common_style(following) != _find_common_style(group) else 0


def _find_common_style(rows: list[PdfRow]) -> int:
    """Return the style that all words of some rows have."""
    common = BOLD | ITALIC
    for row in rows:
        for word in row.words:
            common &= word.style
    return common


def _sizes(row: PdfRow) -> set[int]:
    return {round(word.size) for word in row.words}


def _is_code(row: PdfRow) -> bool:
    return all(word.style & MONO for word in row.words)


def _code_lines(rows: list[PdfRow]) -> list[str]:
    """Return the rows with their white space: a column is a character of the font."""
    left = min(row.x0 for row in rows)
    wide = [(word.x1 - word.x0) / len(word.text) for row in rows for word in row.words]
    width = max(median(wide), 0.1)
    lines = []
    for row in rows:
        line = ""
        for word in row.words:
            column = round((word.x0 - left) / width)
            line += " " * min(max(column - len(line), 1 if line else 0), 200) + word.text
        lines.append(line)
    return lines


def _rounded(size: float) -> float:
    return round(2 * size) / 2
