"""Finds running headers, footers and page numbers: rows at the edge of a page that return on others, or only count."""

from __future__ import annotations

import re
from collections import Counter

from sftplay.data.ingest.extract.pdf.rows import Row, to_rows
from sftplay.data.ingest.extract.pdf.words import Page, Word

MARGIN = 0.13
"""Share of a page's height at the top and at the bottom in which running rows stand."""

NUMBER_MARGIN = 0.1
MOST_ROWS = 3
"""Rows at each edge that may be running ones."""

LEAST_PAGES, LEAST_SHARE = 3, 0.25
"""On so many pages, or on such a share of a short document's, a row returns before it counts as running. A chapter's
header returns on its pages only, so many pages are enough in a long document."""

HEIGHT_POINTS = 6.0
"""Running rows stand at the same height, within rounding."""

NUMBER_AT_END, NUMBER_AT_BEGIN = re.compile(r"(?<!\d)(\d{1,4})\W*$"), re.compile(r"\W*(\d{1,4})\b")
PAGE_NUMBER = re.compile(
    r"(?:page|p\.|seite|side|página|pagina|стр\.?)?\s*[-–—|(\[]*\s*"
    r"(?:\d{1,4}|[ivxlc]{1,6}|[A-Z]?\d{0,2}[-.]\d{1,3})\s*[-–—|)\]]*(?:\s*(?:/|of|von|de|из)\s*\d{1,4})?",
    re.I,
)


def running_words(pages: list[Page]) -> set[int]:
    """The ids of the Word objects that are furniture."""
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


def _edge_rows(page: Page) -> list[tuple[str, Row]]:
    """The outermost rows of a page that lie in its margins."""
    words: dict[str, list[Word]] = {"top": [], "bottom": []}
    for word in page.words:
        if word.middle < MARGIN * page.height:
            words["top"].append(word)
        elif word.middle > (1 - MARGIN) * page.height:
            words["bottom"].append(word)
    top, bottom = to_rows(words["top"])[:MOST_ROWS], to_rows(words["bottom"])[-MOST_ROWS:]
    return [*(("top", row) for row in top), *(("bottom", row) for row in bottom)]


def _pattern(row: Row) -> str:
    """A row's text with what changes from page to page made equal: numbers."""
    return re.sub(r"\d+", "#", row.text.lower())


def _offsets(page: Page, row: Row) -> set[int]:
    """How far the numbers at a row's ends are from the page's own: the same on all pages for a page number."""
    ends = [NUMBER_AT_END.search(row.text), NUMBER_AT_BEGIN.match(row.text)]
    return {int(found[1]) - page.number for found in ends if found}


def _height(page: Page, row: Row) -> int:
    """Where a row stands, from the nearer edge, in steps."""
    return int(min(row.middle, page.height - row.middle) / HEIGHT_POINTS)


def _is_page_number(page: Page, row: Row) -> bool:
    """Whether a row at the very edge is a page's number alone."""
    at_edge = min(row.middle, page.height - row.middle) < NUMBER_MARGIN * page.height
    return at_edge and PAGE_NUMBER.fullmatch(row.text.strip()) is not None
