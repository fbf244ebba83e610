"""Generated documents of each format that `make ingest` reads, for its speed: words of real text in a drawn order."""

from __future__ import annotations

import gzip
import html
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
RELS = "http://schemas.openxmlformats.org/package/2006/relationships"
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"

PARAGRAPH_WORDS, LINE_CHARS, PAGE_LINES = 80, 90, 50


class Prose:
    """Paragraphs of drawn words: no two documents are near-duplicates."""

    def __init__(self) -> None:
        pages = sorted((ROOT / "docs").glob("*.md"))
        text = " ".join(path.read_text(encoding="utf-8") for path in pages)
        self._words = np.array(sorted({word.strip(".,:;()`*|#") for word in text.split() if word.isascii()} - {""}))
        self._draw = np.random.default_rng(7)

    def paragraphs(self, n_chars: int) -> list[str]:
        """Paragraphs of so many characters in all."""
        found, length = [], 0
        while length < n_chars:
            words = self._words[self._draw.integers(0, len(self._words), PARAGRAPH_WORDS)]
            found.append(" ".join(words.tolist()) + ".")
            length += len(found[-1]) + 2
        return found


def zipped(parts: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return content.getvalue()


def links(kind: str, target: str) -> str:
    link = f'<Relationship Id="r1" Type="{OFFICE}/{kind}" Target="{target}"/>'
    return f'<Relationships xmlns="{RELS}">{link}</Relationships>'


def as_text(paragraphs: list[str]) -> bytes:
    return "\n\n".join(paragraphs).encode()


def as_page(paragraphs: list[str]) -> bytes:
    body = "".join(f"<h2>Part {n}</h2><p>{html.escape(each)}</p>" for n, each in enumerate(paragraphs))
    return f"<!doctype html><html><head><title>t</title></head><body>{body}</body></html>".encode()


def as_restructured(paragraphs: list[str]) -> bytes:
    return "\n\n".join(["Title\n=====", *(each.replace("_", "-") for each in paragraphs)]).encode()


def as_word(paragraphs: list[str]) -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{html.escape(each)}</w:t></w:r></w:p>" for each in paragraphs)
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return zipped({"_rels/.rels": links("officeDocument", "word/document.xml"), "word/document.xml": document})


def as_sheet(paragraphs: list[str]) -> bytes:
    rows = "".join(
        f'<row r="{row}">'
        + "".join(f'<c t="inlineStr"><is><t>{html.escape(word)}</t></is></c>' for word in each.split()[:20])
        + "</row>"
        for row, each in enumerate(paragraphs, 1)
    )
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    overrides = "".join(
        f'<Override PartName="/xl/{name}.xml" ContentType="{kind}.{part}+xml"/>'
        for name, part in (("workbook", "sheet.main"), ("worksheets/sheet1", "worksheet"))
    )
    sheets = '<sheets><sheet name="s" sheetId="1" r:id="r1"/></sheets>'
    book = f'<workbook xmlns="{SHEET}" xmlns:r="{OFFICE}">{sheets}</workbook>'
    return zipped(
        {
            "[Content_Types].xml": f'<Types xmlns="{TYPES}">{overrides}</Types>',
            "_rels/.rels": links("officeDocument", "xl/workbook.xml"),
            "xl/workbook.xml": book,
            "xl/_rels/workbook.xml.rels": links("worksheet", "worksheets/sheet1.xml"),
            "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{SHEET}"><sheetData>{rows}</sheetData></worksheet>',
        }
    )


def as_pdf(paragraphs: list[str]) -> bytes:
    """Pages of lines in Helvetica, with a page number at the foot."""
    lines = [line for each in paragraphs for line in [*_broken(each), ""]]
    pages = [lines[begin : begin + PAGE_LINES] for begin in range(0, len(lines), PAGE_LINES)]
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = ["<</Type/Catalog/Pages 2 0 R>>", f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
               "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]  # fmt: skip
    for number, page in enumerate(pages, 1):
        shown = "".join(f"({_escaped(line)})Tj T*\n" for line in page)
        content = f"BT /F1 9 Tf 50 780 Td 14 TL\n{shown}ET BT /F1 9 Tf 300 30 Td ({number})Tj ET"
        font = "/MediaBox[0 0 595 842]/Resources<</Font<</F1 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R{font}/Contents {len(objects) + 2} 0 R>>")
        objects.append(f"<</Length {len(content)}>>stream\n{content}\nendstream")
    out, places = b"%PDF-1.4\n", []
    parts = [out]
    length = len(out)
    for number, body in enumerate(objects, 1):
        places.append(length)
        parts.append(f"{number} 0 obj{body}endobj\n".encode())
        length += len(parts[-1])
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    parts.append(f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}".encode())
    parts.append(f"trailer<</Size {len(objects) + 1}/Root 1 0 R>>\nstartxref\n{length}\n%%EOF".encode())
    return b"".join(parts)


def _escaped(line: str) -> str:
    return line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


def _broken(paragraph: str) -> list[str]:
    lines, line = [], ""
    for word in paragraph.split():
        if len(line) + len(word) >= LINE_CHARS:
            lines.append(line)
            line = ""
        line = f"{line} {word}".lstrip()
    return [*lines, line]


def as_rows(paragraphs: list[str]) -> bytes:
    return "".join(json.dumps({"text": each, "id": n}) + "\n" for n, each in enumerate(paragraphs)).encode()


def as_packed_rows(paragraphs: list[str]) -> bytes:
    return gzip.compress(as_rows(paragraphs), compresslevel=1)


def as_parquet(paragraphs: list[str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(paragraphs))), "text": paragraphs}), content)
    return content.getvalue()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": as_text,
    ".md": as_text,
    ".html": as_page,
    ".rst": as_restructured,
    ".docx": as_word,
    ".xlsx": as_sheet,
    ".pdf": as_pdf,
    ".jsonl": as_rows,
    ".jsonl.gz": as_packed_rows,
    ".parquet": as_parquet,
}


def make_files(folder: Path, suffix: str, *, n_chars: int, file_chars: int) -> int:
    """Fill a folder with documents of one format, of so many characters of text in all; the bytes of the files."""
    folder.mkdir(parents=True)
    prose, n_bytes = Prose(), 0
    for number in range(max(1, n_chars // file_chars)):
        content = FORMATS[suffix](prose.paragraphs(file_chars))
        (folder / f"{number:05}{suffix}").write_bytes(content)
        n_bytes += len(content)
    return n_bytes


def pieces(n_chars: int) -> Iterator[list[str]]:
    """Paragraphs of so many characters in all, a million at a time."""
    prose = Prose()
    for _ in range(n_chars // 10**6):
        yield prose.paragraphs(10**6)
