"""xlsx -> blocks: each sheet's cells as one table, with the values that the office program has computed last."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, Extracted, Unreadable, heading, need
from sftplay.data.ingest.extract.markup.tables import as_markdown
from sftplay.data.ingest.extract.office.archive import NO_DTD, Archive
from sftplay.data.ingest.extract.office.word import core_title

MOST_CELLS, MOST_EMPTY_ROWS = 20_000_000, 10_000
"""Of one document, empty ones too; rows without text that end a sheet."""


def read_sheets(path: Path, encoding: str) -> Extracted:
    """An xlsx file's title and blocks; a sheet is a page."""
    need("openpyxl", kind="Excel")
    import openpyxl

    with Archive(path) as archive:
        archive.check_all()
        for name in archive.names:  # openpyxl reads XML by itself
            if name.endswith((".xml", ".rels")) and b"<!DOCTYPE" in archive.read(name):
                raise Unreadable("unsafe", NO_DTD.format(name))
        if "xl/workbook.xml" not in archive.names:
            raise Unreadable("broken", "the archive holds no Excel workbook")
        named = core_title(archive)
    blocks: list[Block] = []
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what openpyxl does not keep when it writes; nothing is written here
        book = openpyxl.load_workbook(path, read_only=True, data_only=True, keep_links=False)
        try:
            left = MOST_CELLS
            for number, sheet in enumerate(book.worksheets, 1):
                if sheet.sheet_state != "visible":
                    notes.append(f"the hidden sheet {sheet.title!r} is left out")
                    continue
                sheet.reset_dimensions()  # what a sheet says of its own size may be wrong, in both directions
                rows, n_cells = _rows_of(sheet.iter_rows(values_only=True))
                left -= n_cells
                if left < 0:
                    raise Unreadable("too_large", f"more than {MOST_CELLS:,} cells: split the workbook")
                text = as_markdown(rows)
                if text:
                    blocks += [heading(sheet.title, 2, page=number), Block(text, "table", page=number)]
        finally:
            book.close()
    return Extracted(named or path.stem, tuple(blocks), tuple(notes))


def _rows_of(rows: Iterable[tuple[Any, ...]]) -> tuple[list[list[str]], int]:
    """The rows with text, and how many cells have been looked at."""
    found: list[list[str]] = []
    n_cells = n_empty = 0
    for row in rows:
        n_cells += len(row)
        cells = ["" if value is None else cell_text(value) for value in row]
        if any(cells):
            found.append(cells)
            n_empty = 0
        else:
            n_empty += 1
        if n_cells > MOST_CELLS or n_empty > MOST_EMPTY_ROWS:
            break
    return found, n_cells


def cell_text(value: Any) -> str:
    """A cell's value as a reader writes it."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, datetime):
        at_midnight = (value.hour, value.minute, value.second) == (0, 0, 0)
        return value.date().isoformat() if at_midnight else value.isoformat(" ", "seconds")
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)
