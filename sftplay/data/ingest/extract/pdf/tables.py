"""Find tables among rows by the alignment of their cells, without the rules on the page."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.data.ingest.extract.markup.blocks import as_markdown
from sftplay.data.ingest.extract.pdf.lists import MARKER
from sftplay.data.ingest.extract.pdf.words import MONO, PdfRow, segments

CELL_GAP = 1.15
"""Least space between cells in sizes of the font."""

LEAST_ROWS, MOST_COLUMNS = 3, 40
FAR = 2.6
"""Heights of a row by which the rows of a table may be apart."""


@dataclass(frozen=True)
class PdfTable:
    """The place of a table among the rows, and its Markdown."""

    begin: int
    end: int
    text: str


def find_tables(rows: list[PdfRow]) -> list[PdfTable]:
    """Return the tables among a column's rows."""
    found, place = [], 0
    while place < len(rows):
        end = _find_end(rows, place)
        table = _build(rows, place, end=end) if end - place >= LEAST_ROWS else None
        if table is not None:
            found.append(table)
            place = table.end
        else:
            place += 1
    return found


def find_cells(row: PdfRow) -> list[tuple[float, float]]:
    """Return the begin and end of each cell of a row; a list's sign belongs to its item."""
    found = segments(row.words, CELL_GAP * row.size)
    if len(found) > 1 and MARKER.fullmatch(f"{row.words[0].text} ") and found[0][1] <= row.words[0].x1 + 0.1:
        found[:2] = [(found[0][0], found[1][1])]
    return found


def _find_end(rows: list[PdfRow], begin: int) -> int:
    """Return the place after the last row of several cells that follows without a gap or a full row of text."""
    if len(find_cells(rows[begin])) < 2 or _is_code(rows[begin]):
        return begin
    last, single = begin, 0
    for place in range(begin + 1, len(rows)):
        row = rows[place]
        if row.top - rows[place - 1].bottom > FAR * row.size or _is_code(row):
            break
        if len(find_cells(row)) >= 2:
            last, single = place, 0
        else:
            single += 1
            if single > 2:
                break
    return last + 1


def _is_code(row: PdfRow) -> bool:
    return all(word.style & MONO for word in row.words)


def _build(rows: list[PdfRow], begin: int, *, end: int) -> PdfTable | None:
    """Return the table of some rows; None where their cells are not aligned."""
    body = rows[begin:end]
    columns = _columns([find_cells(row) for row in body if len(find_cells(row)) >= 2])
    several = [row for row in body if len(find_cells(row)) >= 2]
    if not 2 <= len(columns) <= MOST_COLUMNS or len(several) < LEAST_ROWS:
        return None
    filled = sum(len(find_cells(row)) for row in several)
    if filled < 0.6 * len(columns) * len(several):
        return None
    grid: list[list[str]] = []
    for row in body:
        line = [""] * len(columns)
        for word in row.words:
            column = min(range(len(columns)), key=lambda c: _distance(columns[c], (word.x0 + word.x1) / 2))
            line[column] = f"{line[column]} {word.text}".strip()
        if grid and not line[0] and any(grid[-1]):  # a cell's further lines
            grid[-1] = [f"{above} {below}".strip() for above, below in zip(grid[-1], line)]
        else:
            grid.append(line)
    return PdfTable(begin, end, as_markdown(grid))


def _columns(cells: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the begin and end of each column: cells that overlap share a column; wider cells are left out."""
    most = max(map(len, cells), default=0)
    columns: list[tuple[float, float]] = []
    for x0, x1 in sorted(cell for line in cells if len(line) >= max(2, most - 1) for cell in line):
        if columns and x0 < columns[-1][1]:
            columns[-1] = columns[-1][0], max(columns[-1][1], x1)
        else:
            columns.append((x0, x1))
    return columns


def _distance(column: tuple[float, float], x: float) -> float:
    return max(column[0] - x, x - column[1], 0.0)
