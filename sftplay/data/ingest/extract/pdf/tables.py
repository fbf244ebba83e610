"""Find tables among rows by the alignment of their cells, without the rules on the page."""

from __future__ import annotations

from sftplay.data.ingest.extract.markup.blocks import as_markdown
from sftplay.data.ingest.extract.pdf.lists import MARKER
from sftplay.data.ingest.extract.pdf.words import PdfRow, segments

LEAST_ROWS, MOST_COLUMNS = 3, 40
FAR = 2.6
"""Heights of a row by which the rows of a table may be apart."""


def find_tables(rows: list[PdfRow]) -> list[tuple[int, int, str]]:
    """Return the tables among a column's rows: the first row, the end, and the Markdown."""
    found, place = [], 0
    while place < len(rows):
        end = _find_end(rows, place)
        text = _format_rows(rows[place:end]) if end - place >= LEAST_ROWS else None
        if text is not None:
            found.append((place, end, text))
        place = end if text is not None else place + 1
    return found


def find_cells(row: PdfRow) -> list[tuple[float, float]]:
    """Return the begin and end of each cell of a row; a list's sign belongs to its item."""
    found = segments(row.words, 1.15 * row.size)  # the least space between cells in sizes of the font
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
    columns: list[tuple[float, float]] = []  # cells that overlap share a column; wider cells are left out
    for x0, x1 in sorted(cell for line in cells if len(line) >= max(2, most - 1) for cell in line):
        if columns and x0 < columns[-1][1]:
            columns[-1] = columns[-1][0], max(columns[-1][1], x1)
        else:
            columns.append((x0, x1))
    if not 2 <= len(columns) <= MOST_COLUMNS or len(cells) < LEAST_ROWS:
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
