"""Files that try to hang, fill or break what reads them, each made on the spot."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
BOMB = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "ha">{LAUGHS}]>'
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
RELS = "http://schemas.openxmlformats.org/package/2006/relationships"
TYPES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
ARABIC = "مرحبا بالعالم\u200f، هذا نص طويل بما يكفي ليبقى محفوظا في الملف"


@dataclass(frozen=True)
class Hostile:
    """A file and what may be said of it."""

    name: str
    make: Callable[[Path], object]
    reasons: tuple[str, ...]
    """Reasons that are allowed; empty where its text is read."""


def zipped(parts: dict[str, bytes]) -> bytes:
    """An archive with these parts."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return content.getvalue()


def word(body: bytes) -> bytes:
    """A Word document with this main part."""
    return zipped({"_rels/.rels": links("officeDocument", "word/document.xml"), "word/document.xml": body})


def links(kind: str, target: str) -> bytes:
    """The part that names the place of another part."""
    link = f'<Relationship Id="r1" Type="{TYPES}/{kind}" Target="{target}"/>'
    return f'<Relationships xmlns="{RELS}">{link}</Relationships>'.encode()


def nested_tables(depth: int) -> bytes:
    """A Word document of tables inside tables."""
    begin = "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>level</w:t></w:r></w:p>" * depth
    end = "<w:p/></w:tc></w:tr></w:tbl>" * depth
    return word(f'<w:document xmlns:w="{WORD}"><w:body>{begin}{end}</w:body></w:document>'.encode())


def huge_sheet() -> bytes:
    """A workbook that claims all rows and columns, and has a cell in the last."""
    sheets = '<sheets><sheet name="s" sheetId="1" r:id="r1"/></sheets>'
    book = f'<workbook xmlns="{SHEET}" xmlns:r="{TYPES}">{sheets}</workbook>'
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    types = (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kind}.worksheet+xml"/></Types>'
    )
    text = "<is><t>a cell with enough words to be kept</t></is>"
    cells = "".join(
        f'<row r="{row}"><c r="{column}{row}" t="inlineStr">{text}</c></row>'
        for row, column in ((1, "A"), (1_048_576, "XFD"))
    )
    sheet = f'<worksheet xmlns="{SHEET}"><dimension ref="A1:XFD1048576"/><sheetData>{cells}</sheetData></worksheet>'
    return zipped(
        {
            "[Content_Types].xml": types.encode(),
            "_rels/.rels": links("officeDocument", "xl/workbook.xml"),
            "xl/workbook.xml": book.encode(),
            "xl/_rels/workbook.xml.rels": links("worksheet", "worksheets/sheet1.xml"),
            "xl/worksheets/sheet1.xml": sheet.encode(),
        }
    )


def looping_pdf() -> bytes:
    """A PDF with a page tree that contains itself, and an older cross-reference table that is itself."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2/Parent 2 0 R>>"]
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj%bendobj\n" % (number, body)
    table = len(content)
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer<</Size 3/Root 1 0 R/Prev %d>>\nstartxref\n%d\n%%%%EOF" % (table, table)
    return content + b"xref\n0 3\n0000000000 65535 f \n" + rows + trailer


def locked_pdf() -> bytes:
    """A PDF that asks for a password nobody has."""
    lock = b"<</Filter/Standard/V 2/R 3/Length 128/P -1/O<%b>/U<%b>>>" % (b"a1" * 32, b"b2" * 32)
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
               b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>", lock]  # fmt: skip
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj%bendobj\n" % (number, body)
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    ids = b"<00112233445566778899aabbccddeeff>"
    trailer = b"trailer<</Size 5/Root 1 0 R/Encrypt 4 0 R/ID[%b%b]>>\nstartxref\n%d\n%%%%EOF" % (ids, ids, len(content))
    return content + b"xref\n0 5\n0000000000 65535 f \n" + rows + trailer


def write_raw(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def gz_bomb(path: Path) -> None:
    """A row of 512 MB, packed into 0.5 MB. A gzip file may consist of several, one behind the other."""
    part = gzip.compress(b"a" * (32 << 20))
    path.write_bytes(gzip.compress(b'{"text": "') + part * 16 + gzip.compress(b'"}\n'))


def zip_bomb(path: Path) -> None:
    """A Word document with a text of 512 MB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("_rels/.rels", links("officeDocument", "word/document.xml"))
        with archive.open("word/document.xml", "w") as stream:
            stream.write(f'<w:document xmlns:w="{WORD}"><w:body><w:p><w:r><w:t>'.encode())
            for _ in range(1 << 9):
                stream.write(b" " * (1 << 20))


def long_line(path: Path) -> None:
    """200 MB of random words in one line."""
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 5, 200_000_000, np.uint8)
    path.write_bytes(np.where(letters > ord("z"), ord(" "), letters).astype(np.uint8).tobytes())


UNSAFE = ("unsafe", "too_large", "memory", "timeout", "broken", "crashed")
OR_READ = (*UNSAFE, "", "short", "empty")
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 4096
DEEP = b"<div>" * 200_000 + b"the text of the page, deep below all else, which is long enough to be kept"
LAUGHING = f"{BOMB}<w:document xmlns:w='{WORD}'><w:body><w:p><w:r><w:t>&a11;</w:t></w:r></w:p></w:body></w:document>"
STRANGE = b"A text in a file with a strange name, which is long enough."
HOSTILE = (
    Hostile("empty.txt", write_raw(b""), ("empty",)),
    Hostile("locked.pdf", write_raw(locked_pdf()), ("encrypted",)),
    Hostile("locked.docx", write_raw(OLE), ("encrypted", "wrong_format", "broken")),
    Hostile("truncated.docx", write_raw(nested_tables(3)[:-40]), ("broken",)),
    Hostile("truncated.pdf", write_raw(looping_pdf()[:60]), ("broken", "empty")),
    Hostile("picture.pdf", write_raw(b"\x89PNG\r\n\x1a\n" + bytes(range(256))), ("wrong_format",)),
    Hostile("binary.txt", write_raw(bytes(range(256)) * 50), ("wrong_format", "encoding")),
    Hostile("latin.txt", write_raw(("Die Größe der Türen. " * 20).encode("cp1252")), ()),
    Hostile("arabic.txt", write_raw(ARABIC.encode()), ()),
    Hostile("nested.docx", write_raw(nested_tables(40)), OR_READ),
    Hostile("nested.html", write_raw(b"<table><tr><td>inside" * 200 + b"</td></tr></table>" * 200), OR_READ),
    Hostile("deep.html", write_raw(DEEP), OR_READ),
    Hostile("laughs.html", write_raw(f"{BOMB}<html><body><p>&a11;</p></body></html>".encode()), OR_READ),
    Hostile("laughs.docx", write_raw(word(LAUGHING.encode())), (*UNSAFE, "empty")),
    Hostile("pipe.txt", os.mkfifo, ("special_file",)),
    Hostile("loop.txt", lambda path: path.symlink_to(path), ("link_loop",)),
    Hostile("gone.txt", lambda path: path.symlink_to("nowhere"), ("broken_link",)),
    Hostile("a\nname\x1b[2J.txt", write_raw(STRANGE), ()),
    Hostile(os.fsdecode(b"caf\xe9.txt"), write_raw(STRANGE + b" It is not UTF-8."), ()),
    Hostile("none.jsonl", write_raw(b"\n\n"), ("empty",)),
    Hostile("looping.pdf", write_raw(looping_pdf()), ("broken", "empty", "scanned", "timeout", "memory", "crashed")),
    Hostile("sheet.xlsx", write_raw(huge_sheet()), OR_READ),
    Hostile("cut.jsonl.gz", write_raw(gzip.compress(b'{"text": "a"}\n' * 1000)[:-12]), ("broken",)),
    Hostile("table.parquet", write_raw(b"PAR1" + b"\0" * 100 + b"PAR1"), ("broken",)),
)  # fmt: skip
"""Those that are small. A reason `""` means that its text may be read as well."""

LARGE = (
    Hostile("bomb.docx", zip_bomb, UNSAFE),
    Hostile("bomb.jsonl.gz", gz_bomb, ("broken_row", "timeout", "unsafe", "memory")),
    Hostile("line.txt", long_line, ()),
)
"""Those that take seconds."""
