"""Find grids in the ruled lines of a PDF page, and convert the words within a grid to a table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sftplay.data.ingest.extract.markup.blocks import as_markdown
from sftplay.data.ingest.extract.pdf.structure import Vocabulary
from sftplay.data.ingest.extract.pdf.words import Rule, Rules, Word, to_rows

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
