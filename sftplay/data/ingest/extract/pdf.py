"""A PDF becomes blocks: headings, paragraphs, tables, headers and footers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from sftplay.data.ingest.extract.document import (
    Block,
    BlockKind,
    Extracted,
    Reason,
    Unreadable,
    as_markdown,
    find_heading,
    heading,
    need,
    to_fence,
    without_empty_contents,
)
from sftplay.data.ingest.extract.pdf_words import (
    BOLD,
    ITALIC,
    SOFT_HYPHEN,
    Page,
    PdfRow,
    Rule,
    Rules,
    Word,
    find_tables,
    read_words,
    segments,
    split_marker,
    to_columns,
    to_rows,
)

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
    apart: list[PdfRow] = []
    for row in rows:  # one is divided if its parts are far apart and the first is no heading number or list marker
        places = segments(((word.x0, word.x1) for word in row.words), 2.0 * row.size)
        if len(places) == 1 or row.is_code or len(row.words[0].text) <= 4:
            apart.append(row)
        else:
            parts = [[word for word in row.words if x0 <= word.x0 <= x1] for x0, x1 in places]
            apart += [inner for part in parts if part for inner in to_rows(part)]
    rows = apart
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


NEAR = 2.5
"""Points by which lines may miss each other and still count as meeting."""

STRAIGHT, SHORTEST = 1.0, 6.0
MOST_PARTS, MOST_LINES = 20_000, 1_500
"""A page with more is a picture; its lines are ignored."""


def read_rules(page: Any) -> Rules:
    """Return the straight lines of a page; none if the page is turned or is a picture."""
    import pypdfium2.raw as raw

    rules = Rules()
    if page.get_rotation():
        return rules
    left, _, _, top = page.get_cropbox()
    n_parts = 0
    for path in page.get_objects(filter=(raw.FPDF_PAGEOBJ_PATH,), max_depth=1):
        n_parts += raw.FPDFPath_CountSegments(path)
        if n_parts > MOST_PARTS or len(rules.across) + len(rules.down) > MOST_LINES:
            return Rules()
        for (x0, y0), (x1, y1) in _read_lines(path, raw):
            if abs(x1 - x0) < STRAIGHT and abs(y1 - y0) >= SHORTEST:
                rules.down.append((x0 - left, top - max(y0, y1), top - min(y0, y1)))
            elif abs(y1 - y0) < STRAIGHT and abs(x1 - x0) >= SHORTEST:
                rules.across.append((top - y0, min(x0, x1) - left, max(x0, x1) - left))
    return rules


def _read_lines(path: Any, raw: Any) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yield the straight parts of one path, in page coordinates."""
    import ctypes

    matrix, x, y = path.get_matrix(), ctypes.c_float(), ctypes.c_float()
    begin = here = None
    for place in range(raw.FPDFPath_CountSegments(path)):
        segment = raw.FPDFPath_GetPathSegment(path, place)
        raw.FPDFPathSegment_GetPoint(segment, x, y)
        point = matrix.on_point(x.value, y.value)
        kind = raw.FPDFPathSegment_GetType(segment)
        if kind == raw.FPDF_SEGMENT_MOVETO:
            begin = point
        elif kind == raw.FPDF_SEGMENT_LINETO and here is not None:
            yield here, point
        here = point
        if raw.FPDFPathSegment_GetClose(segment) and begin is not None and kind == raw.FPDF_SEGMENT_LINETO:
            yield here, begin


def with_tables(words: list[Word], rules: Rules, *, vocabulary: Vocabulary) -> list[Word]:
    """Return the words, with those of each ruled table replaced by one that holds the table."""
    for xs, ys in _find_grids(rules):
        inside = [w for w in words if xs[0] < (w.x0 + w.x1) / 2 < xs[-1] and ys[0] < w.middle < ys[-1]]
        text = _format_grid(inside, xs, ys=ys, rules=rules, vocabulary=vocabulary) if inside else ""
        if text:
            size = sorted(word.size for word in inside)[len(inside) // 2]
            table = Word("", xs[0], ys[0], xs[-1], ys[-1], size, 0, (ys[0] + ys[-1]) / 2 + 0.25 * size, text)
            taken = set(map(id, inside))
            words = [*(word for word in words if id(word) not in taken), table]
    return words


def _find_grids(rules: Rules) -> list[tuple[list[float], list[float]]]:
    """Return the places of columns and rows of each group of lines that meet: two of each at least."""
    groups: list[tuple[list[Rule], list[Rule]]] = []
    for line in rules.down:
        met = [group for group in groups if any(_meet(rule, line) for rule in group[0])]
        across = [rule for rule in rules.across if _meet(rule, line)]
        down = [line]
        for group in met:
            groups.remove(group)
            across, down = across + group[0], down + group[1]
        groups.append((across, down))
    grids = [(_places(rule[0] for rule in down), _places(rule[0] for rule in across)) for across, down in groups]
    return [(xs, ys) for xs, ys in grids if len(xs) > 2 and len(ys) > 2]


def _meet(across: Rule, down: Rule) -> bool:
    return across[1] - NEAR <= down[0] <= across[2] + NEAR and down[1] - NEAR <= across[0] <= down[2] + NEAR


def _places(values: Any) -> list[float]:
    """Return the distinct places in order; places nearer than two lines can be are one."""
    found: list[float] = []
    for value in sorted(values):
        if not found or value - found[-1] > 2 * NEAR:
            found.append(value)
    return found


def _format_grid(words: list[Word], xs: list[float], *, ys: list[float], rules: Rules, vocabulary: Vocabulary) -> str:
    """Return the Markdown of a grid; cells without a line between them are one, with the text in the first."""

    @cache
    def find_first_cell(row: int, column: int) -> tuple[int, int]:
        while column > 0 and not _has(rules.down, xs[column], between=(ys[row], ys[row + 1])):
            column -= 1
        while row > 0 and not _has(rules.across, ys[row], between=(xs[column], xs[column + 1])):
            row -= 1
        return row, column

    cells: dict[tuple[int, int], list[Word]] = {}
    for word in words:
        row, column = sum(y <= word.middle for y in ys) - 1, sum(x <= (word.x0 + word.x1) / 2 for x in xs) - 1
        cells.setdefault(find_first_cell(row, column), []).append(word)
    if len({column for _, column in cells}) < 2:
        return ""
    grid = [["" for _ in xs[1:]] for _ in ys[1:]]
    for (row, column), inside in cells.items():
        grid[row][column] = vocabulary.join([line.text for line in to_rows(inside)])
    return as_markdown(grid)


def _has(lines: list[Rule], place: float, *, between: tuple[float, float]) -> bool:
    """Whether a line at a place crosses the middle of an interval."""
    middle = (between[0] + between[1]) / 2
    return any(abs(line[0] - place) <= 2 * NEAR and line[1] <= middle <= line[2] for line in lines)


MOST_PAGES = 3_000
MOST_UNKNOWN = 0.3
"""Largest share of unmapped characters in a page of text."""

FAR_BACK, LEAST_OPEN = 14, 40
"""Most pieces between the halves of a paragraph, such as a figure's labels; fewest characters of its first half."""

NO_TITLES = ("microsoft word", "untitled", "powerpoint", "(anonymous)", "slide 1")
FILE_NAMES = (".doc", ".docx", ".indd", ".tex", ".dvi", ".pdf", ".ppt", ".qxd", ".xls")
"""Beginnings and ends of titles that a program, not a person, has written."""

PASSWORD, SECURITY = 4, 5
"""Errors of pdfium; public/fpdfview.h."""


def read_pdf(path: Path, encoding: str) -> Extracted:
    need("pypdfium2", kind="PDF")
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if error.err_code in (PASSWORD, SECURITY):
            raise Unreadable("encrypted", "the PDF is locked by a password") from None
        raise Unreadable("broken", f"pdfium: {error}") from None
    try:
        pages, notes = _read_pages(document, pypdfium2.PdfiumError)
        title = document.get_metadata_value("Title").strip()
    finally:
        document.close()
    blocks = _to_blocks(pages)
    if not title or title.lower().endswith(FILE_NAMES) or title.lower().startswith(NO_TITLES):
        early = [block for block in blocks[:40] if block.level]
        title = find_heading(sorted(early, key=lambda block: block.level)) or path.stem
    return Extracted(title, tuple(blocks), notes)


def _read_pages(document: Any, error_type: type[Exception]) -> tuple[list[Page], tuple[str, ...]]:
    """Return the pages that have text, and notes on the others. Raise Unreadable where no page has text."""
    n_pages = len(document)
    if n_pages > MOST_PAGES:
        raise Unreadable("too_large", f"{n_pages:,} pages; {MOST_PAGES:,} are read: split the file")
    pages, broken = [], 0
    for place in range(n_pages):
        try:
            page = document[place]
            pages.append(read_words(page, place + 1, rules=read_rules(page)))
            page.close()
        except error_type:
            broken += 1
    empty = [page for page in pages if not page.words]
    written = [page for page in pages if page.words]
    good = [page for page in written if page.n_unknown <= MOST_UNKNOWN * sum(len(w.text) for w in page.words)]
    n_strange = len(written) - len(good)
    counts = (
        (sum(page.has_pictures for page in empty), "are pictures without text"),
        (sum(not page.has_pictures for page in empty), "are empty"),
        (n_strange, "have fonts that do not say which letters they show"),
        (broken, "are damaged"),
    )
    notes = tuple(f"{count} of {n_pages} pages {what}" for count, what in counts if count)
    if not good:
        reason: Reason = "broken" if broken else "empty"
        if n_strange or any(page.has_pictures for page in empty):
            reason = "encoding" if n_strange else "scanned"
        raise Unreadable(reason, "; ".join(notes) or "the PDF has no pages")
    return good, notes


def _to_blocks(pages: list[Page]) -> list[Block]:
    headers_footers = find_headers_footers(pages)
    for page in pages:
        page.words[:] = [word for word in page.words if id(word) not in headers_footers]
    fonts = find_fonts(pages)
    vocabulary = Vocabulary(word.text for page in pages for word in page.words)
    pieces: list[PdfPiece] = []
    for page in pages:
        for rows in to_columns(with_tables(page.words, page.rules, vocabulary=vocabulary)):
            for piece in to_pieces(rows, fonts, page=page.number):
                half = _open_half(pieces, piece) if piece.begins_column else None
                if half is None:
                    pieces.append(piece)
                else:
                    half.lines += piece.lines
    groups: list[list[PdfPiece]] = []  # the items of a list are in one group
    for piece in pieces:
        if groups and piece.marker and groups[-1][-1].marker:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return without_empty_contents([block for group in groups for block in _make_blocks(group, vocabulary)])


def _open_half(pieces: list[PdfPiece], piece: PdfPiece) -> PdfPiece | None:
    """Return the paragraph that a column's first piece continues: it has no end, and the piece begins in lower case."""
    if piece.kind != "paragraph" or not piece.lines[0][:1].islower():
        return None
    for before in reversed(pieces[-FAR_BACK:]):
        if before.page < piece.page - 1 or before.kind == "heading":
            return None
        text = " ".join(before.lines)
        is_label = before.kind in ("table", "code") or len(text) < LEAST_OPEN or CAPTION.match(text)
        if not is_label:
            return None if text.endswith(ENDS) else before
    return None


def _make_blocks(group: list[PdfPiece], vocabulary: Vocabulary) -> list[Block]:
    """Return the block of a piece, or of a list's items, which are nested by their indentation."""
    first = group[0]
    if first.marker:
        depths: list[float] = []
        lines = []
        for item in group:
            while depths and item.x0 < depths[-1] - 3:
                depths.pop()
            if not depths or item.x0 > depths[-1] + 3:
                depths.append(item.x0)
            lines.append("   " * (len(depths) - 1) + item.marker + vocabulary.join(item.lines))
        return [Block("\n".join(lines), "list", page=first.page)]
    if first.kind == "code":
        return [to_fence("\n".join(first.lines), page=first.page)]
    if first.kind == "table":
        return [Block(first.lines[0], "table", page=first.page)]
    text = vocabulary.join(first.lines)
    if not any(map(str.isalnum, text)):
        return []
    if first.kind == "heading":
        return [heading(text, first.level, page=first.page)]
    return [Block(text, page=first.page)]
