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
from sftplay.data.ingest.extract.pdf.words import BOLD, ITALIC, SOFT_HYPHEN, Page, PdfRow, segments, to_rows

MARGIN = 0.13
"""Share of a page's height, at the top and at the bottom, that may hold headers and footers."""

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
    edges: list[tuple[PdfRow, bool, set[tuple[str, str, int]], set[tuple[str, int, int]]]] = []
    for page in pages:
        top = [word for word in page.words if word.middle < MARGIN * page.height]
        bottom = [word for word in page.words if word.middle > (1 - MARGIN) * page.height]
        rows = [("top", row) for row in to_rows(top)[:MOST_ROWS]]
        for edge, row in [*rows, *(("bottom", row) for row in to_rows(bottom)[-MOST_ROWS:])]:
            distance = min(row.middle, page.height - row.middle)
            heights = [int(distance / HEIGHT_POINTS) + near for near in (0, 1)]
            pattern = re.sub(r"\d+", "#", row.text.lower())  # numbers change from page to page
            # The numbers at a row's ends less the page's number: a page number has the same step on all pages.
            ends = [NUMBER_AT_END.search(row.text), NUMBER_AT_BEGIN.match(row.text)]
            steps = [int(found[1]) - page.number for found in ends if found]
            is_number = distance < 0.1 * page.height and PAGE_NUMBER.fullmatch(row.text.strip()) is not None
            texts = {(edge, pattern, height) for height in heights}
            edges.append((row, is_number, texts, {(edge, height, step) for height in heights for step in steps}))
    seen = Counter(key for _, _, texts, _ in edges for key in texts)
    counted = Counter(key for _, _, _, numbers in edges for key in numbers)
    most = max(2, min(LEAST_PAGES, round(LEAST_SHARE * len(pages)) or 2))
    found: set[int] = set()
    for row, is_number, texts, numbers in edges:
        returns = max([*(seen[key] for key in texts), *(counted[key] for key in numbers)])
        if returns >= most or is_number:
            found.update(map(id, row.words))
    return found


DIVIDED = re.compile(rf"([^\W\d_]+)[-‐{SOFT_HYPHEN}]$")
LONGEST_WORD = 80
FRACTION = re.compile(r"(?<=\d) ?⁄ ?(?=\d)")
BEGINS = re.compile(r"[^\W\d_]+")
COMPOUND = (
    *("self", "non", "well", "cross", "half", "all", "ex", "anti", "multi", "semi", "high", "low", "long", "short"),
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
                text = (text.rstrip(SOFT_HYPHEN) if self._keeps_hyphen(divided, begins[0]) else text[:-1]) + line
            elif text.endswith(("-", "‐")) and begins and text[-2:-1].isalnum():
                text += line  # Anglo-Saxon, COVID-19
            else:
                text = f"{text.rstrip(SOFT_HYPHEN)} {line}"
        return FRACTION.sub("/", text.replace(SOFT_HYPHEN, ""))

    def _keeps_hyphen(self, divided: re.Match[str], rest: str) -> bool:
        if divided[0].endswith(SOFT_HYPHEN):
            return False
        first = divided[1].lower()
        if f"{first}-{rest}".lower() in self.compounds:
            return True
        return f"{first}{rest}".lower() not in self.words and first in COMPOUND


LARGER = 1.12
"""A line is a heading from this multiple of the body text's size."""

LONGEST_HEADING, MOST_HEADING_ROWS = 200, 3

APART, PITCH_LIMIT = 1.3, 2.5
"""A paragraph ends at this multiple of the usual distance of rows; the usual distance is below so many font sizes."""

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
    """Size -> level of the heading."""


def find_fonts(pages: Iterable[Page]) -> Fonts:
    sizes: Counter[float] = Counter()
    styles: Counter[int] = Counter()
    for page in pages:
        for word in page.words:
            sizes[_round_size(word.size)] += len(word.text)
            styles[word.style & (BOLD | ITALIC)] += len(word.text)
    body = max(sizes, key=lambda size: (sizes[size], size), default=0.0)
    larger = sorted((size for size in sizes if size >= LARGER * body), reverse=True)
    levels = {size: min(place + 1, 4) for place, size in enumerate(larger)}
    return Fonts(body, max(styles, key=lambda style: styles[style], default=0), levels)


def to_pieces(rows: list[PdfRow], fonts: Fonts, *, page: int) -> list[PdfPiece]:
    """Return the pieces of one column."""
    rows = [row for row in rows if not LEADERS.search(row.text)]
    pieces: list[PdfPiece] = []
    for is_ruled, part in groupby(rows, key=lambda row: any(word.table for word in row.words)):
        inside, place = list(part), 0
        if is_ruled:
            for word in [word for row in inside for word in row.words]:
                pieces.append(PdfPiece("table" if word.table else "paragraph", [word.table or word.text], page))
            continue
        for begin, end, text in find_tables(inside):  # those without lines
            pieces += _text_pieces(inside[place:begin], fonts, page=page)
            pieces.append(PdfPiece("table", [text], page))
            place = end
        pieces += _text_pieces(inside[place:], fonts, page=page)
    if pieces:
        pieces[0].begins_column = True
    return pieces


def _text_pieces(rows: list[PdfRow], fonts: Fonts, *, page: int) -> list[PdfPiece]:
    """Return the pieces of rows without tables; one ends where something new begins."""
    rows = [part for row in rows for part in _labels(row)]
    if not rows:
        return []
    steps = [after.middle - row.middle for row, after in pairwise(rows)]
    usual = [step for row, step in zip(rows, steps) if 0.5 * row.size < step < PITCH_LIMIT * row.size]
    pitch = median(usual) if usual else 1.2 * rows[0].size
    edges = (min(row.x0 for row in rows), max(row.x1 for row in rows))
    groups = [[rows[0]]]
    for row in rows[1:]:
        if _begins(row, groups[-1], pitch=pitch, edges=edges):
            groups.append([row])
        else:
            groups[-1].append(row)
    return [_to_piece(group, after, fonts=fonts, page=page) for group, after in zip(groups, [*groups[1:], None])]


def _labels(row: PdfRow) -> list[PdfRow]:
    """Return the row, or its parts if they are far apart and the first is no heading number or list marker."""
    places = segments(row.words, 2.0 * row.size)
    if len(places) == 1 or row.is_code or len(row.words[0].text) <= 4:
        return [row]
    parts = [[word for word in row.words if x0 <= word.x0 <= x1] for x0, x1 in places]
    return [row for part in parts if part for row in to_rows(part)]


def _begins(row: PdfRow, group: list[PdfRow], *, pitch: float, edges: tuple[float, float]) -> bool:
    above, first = group[-1], group[0]
    step = row.middle - above.middle
    if row.is_code or above.is_code:
        return not (row.is_code and above.is_code) or step > 3 * pitch
    if step > max(APART * pitch, APART * row.size) or step < 0.5 * row.size:
        return True
    if {round(word.size) for word in row.words}.isdisjoint(round(word.size) for word in above.words):
        return True
    if split_marker(row.text)[0] or _find_common_style([row]) != _find_common_style([above]):
        return True
    left, right = edges
    if split_marker(first.text)[0]:  # a row continues an item below the item's text, or where it continues a sentence
        text_x = first.words[1].x0 if len(first.words) > 1 else first.x0
        is_full = above.x1 > right - 0.15 * (right - first.x0)
        is_under = text_x - 0.6 * row.size <= row.x0 <= text_x + 2 * row.size
        return not (is_under or (is_full and row.text[0].islower()))
    if row.x0 > above.x0 + 0.7 * row.size and above.x0 < left + 0.7 * row.size and row.x0 < left + 5 * row.size:
        return True
    is_short = above.x1 < right - 0.25 * (right - left)
    return is_short and above.text.endswith(ENDS[:4]) and not row.text[0].islower()


def _to_piece(group: list[PdfRow], after: list[PdfRow] | None, *, fonts: Fonts, page: int) -> PdfPiece:
    """Return the piece of a group of rows; `after` is the next group."""
    lines = [row.text for row in group]
    text = " ".join(lines)
    if group[0].is_code:
        return PdfPiece("code", _code_lines(group), page)
    level = _heading_level(group, after, fonts=fonts, text=text)
    if level:
        return PdfPiece("heading", lines, page, level)
    marker, rest = split_marker(text)
    if marker:
        lines[0] = split_marker(lines[0])[1] if split_marker(lines[0])[0] else rest
        return PdfPiece("list", lines, page, marker=marker, x0=group[0].x0)
    return PdfPiece("paragraph", lines, page, x0=group[0].x0)


def _heading_level(group: list[PdfRow], after: list[PdfRow] | None, *, fonts: Fonts, text: str) -> int:
    if len(group) > MOST_HEADING_ROWS or len(text) > LONGEST_HEADING or CAPTION.match(text):
        return 0
    if sum(map(str.isalpha, text)) < max(2, 0.4 * len(text)):
        return 0
    by_size = max(fonts.levels.get(_round_size(row.size), 0) for row in group)
    if by_size:
        return by_size
    begins = text[0].isupper() or text[0].isdigit()
    ends = not text.endswith((*ENDS, ","))
    if len(text) > 100 or len(group) > 2 or not begins or not ends or after is None:  # only its style marks it
        return 0
    style = _find_common_style(group)
    extra = style & ~fonts.style & (BOLD | ITALIC)
    if not extra or group[0].size < 0.95 * fonts.size or _find_common_style(after) == style:
        return 0
    return len(fonts.levels) + (1 if extra & BOLD else 2)


def _find_common_style(rows: list[PdfRow]) -> int:
    common = BOLD | ITALIC
    for row in rows:
        for word in row.words:
            common &= word.style
    return common


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


def _round_size(size: float) -> float:
    return round(2 * size) / 2
