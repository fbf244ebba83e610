"""Convert PDF files to blocks with their pages. Only the text layer is read, without OCR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, Extracted, Reason, Unreadable, find_heading, heading, need
from sftplay.data.ingest.extract.markup.page import without_empty_contents
from sftplay.data.ingest.extract.pdf.rules import read_rules, with_tables
from sftplay.data.ingest.extract.pdf.structure import (
    CAPTION,
    ENDS,
    PdfPiece,
    Vocabulary,
    find_fonts,
    find_headers_footers,
    to_pieces,
)
from sftplay.data.ingest.extract.pdf.words import Page, read_words, to_columns

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
        return [Block("```\n" + "\n".join(first.lines) + "\n```", "code", page=first.page)]
    if first.kind == "table":
        return [Block(first.lines[0], "table", page=first.page)]
    text = vocabulary.join(first.lines)
    if not any(map(str.isalnum, text)):
        return []
    if first.kind == "heading":
        return [heading(text, first.level, page=first.page)]
    return [Block(text, page=first.page)]
