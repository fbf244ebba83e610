"""Rows of cells -> a Markdown table; HTML tables with merged cells and tables within cells too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

MOST_COLUMNS, MOST_ROWS_SPANNED, MOST_CELLS = 200, 1_000, 200_000
"""A span is a number that anybody can write; what it may cost is bounded here."""

LONGEST_REPEATED = 80
"""Characters of a cell over several rows that is repeated in each of them, so that every row can be read alone."""

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


def as_markdown(rows: Iterable[Sequence[str]]) -> str:
    """The rows as a Markdown table whose first row is the head; empty rows and columns are left out."""
    kept = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    kept = [row for row in kept if any(row)]
    width = max(map(len, kept), default=0)
    used = [place for place in range(width) if any(place < len(row) and row[place] for row in kept)]
    if not used:
        return ""
    lines = ["| " + " | ".join(row[place] if place < len(row) else "" for place in used) + " |" for row in kept]
    return "\n".join([lines[0], "|" + " --- |" * len(used), *lines[1:]])


def own_rows(table: Any) -> list[Any]:
    """The rows of a table without those of tables in its cells."""
    rows = []
    for child in table:
        if child.tag == "tr":
            rows.append(child)
        elif child.tag in ("thead", "tbody", "tfoot"):
            rows += [row for row in child if row.tag == "tr"]
    return rows


def cells_of(row: Any) -> list[Any]:
    """The cells of one row."""
    return [cell for cell in row if cell.tag in ("td", "th")]


def is_layout(table: Any) -> bool:
    """Whether a table only places things on a page: it has one column, is marked so, or holds headings."""
    widths = [sum(_span(cell, "colspan", most=MOST_COLUMNS) for cell in cells_of(row)) for row in own_rows(table)]
    if max(widths, default=0) <= 1 or table.get("role") in ("presentation", "none"):
        return True
    return any(element.tag in HEADINGS for element in table.iter())


def grid_of(table: Any, text_of: Callable[[Any], str]) -> list[list[str]]:
    """The table's texts by row and column, with merged cells spread over their places."""
    grid: list[list[str]] = []
    hanging: dict[int, tuple[int, str]] = {}  # column -> rows still to fill, text
    n_cells = 0
    for row in own_rows(table):
        line: list[str] = []
        for cell in cells_of(row):
            _fill(line, hanging)
            text = text_of(cell)
            rows, columns = _span(cell, "rowspan", most=MOST_ROWS_SPANNED), _span(cell, "colspan", most=MOST_COLUMNS)
            for place in range(columns):
                shown = "" if place else text
                if rows > 1:
                    hanging[len(line)] = (rows - 1, shown if len(shown) <= LONGEST_REPEATED else "")
                line.append(shown)
            if len(line) > MOST_COLUMNS:
                break
        _fill(line, hanging)
        n_cells += len(line)
        if n_cells > MOST_CELLS:
            break
        grid.append(line)
    return grid


def _fill(line: list[str], hanging: dict[int, tuple[int, str]]) -> None:
    """Put what hangs down from rows above at the end of a row."""
    while len(line) in hanging:
        left, text = hanging.pop(len(line))
        if left > 1:
            hanging[len(line)] = (left - 1, text)
        line.append(text)


def _span(cell: Any, name: str, *, most: int) -> int:
    digits = (cell.get(name) or "1").strip()
    return min(max(int(digits), 1), most) if digits.isdecimal() and len(digits) < 6 else 1
