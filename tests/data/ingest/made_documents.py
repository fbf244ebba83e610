"""Documents that tests write byte by byte: PDFs with text at stated places, office documents from their XML."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

FONTS = {"plain": "Helvetica", "bold": "Helvetica-Bold", "italic": "Helvetica-Oblique", "mono": "Courier"}

Line = tuple[float, float, str] | tuple[float, float, str, str, float]
"""x and y of the text's begin in points, from the lower left corner; the text; font and size where not plain 10."""


def write_pdf(path: Path, pages: Iterable[Iterable[Line]], *, title: str = "", extra: bytes = b"") -> Path:
    """A PDF with pages of 595 x 842 points; `extra` is painted on each."""
    pages = [list(page) for page in pages]
    n_fonts = len(FONTS)
    names = dict(zip(FONTS, range(n_fonts)))
    bodies = [
        f"<< /Type /Font /Subtype /Type1 /BaseFont /{font} /Encoding /WinAnsiEncoding >>" for font in FONTS.values()
    ]
    fonts = " ".join(f"/F{place} {place + 1} 0 R" for place in range(n_fonts))
    first = n_fonts + 1
    tree = first + 2 * len(pages)
    objects = [body.encode() for body in bodies]
    for place, lines in enumerate(pages):
        content_parts = [extra]
        for x, y, text, *style in lines:
            font, size = style or ("plain", 10)
            escaped = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)").encode("cp1252")
            content_parts.append(b"BT /F%d %g Tf %g %g Td (%s) Tj ET" % (names[str(font)], size, x, y, escaped))
        content = b"\n".join(content_parts)
        objects.append(
            f"<< /Type /Page /Parent {tree} 0 R /MediaBox [0 0 595 842] /Contents {first + 2 * place + 1} 0 R "
            f"/Resources << /Font << {fonts} >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    kids = " ".join(f"{first + 2 * place} 0 R" for place in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(f"<< /Type /Catalog /Pages {tree} 0 R >>".encode())
    objects.append(f"<< /Title ({title}) >>".encode())
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root {size - 2} 0 R /Info {size - 1} 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    path.write_bytes(data + f"xref\n0 {size}\n0000000000 65535 f \n".encode() + table + trailer.encode())
    return path


def write_zip(path: Path, parts: Mapping[str, str | bytes]) -> Path:
    """A zip archive with these parts."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"


def write_docx(path: Path, body: str, *, styles: str = "", numbering: str = "", others: Mapping[str, str] = {}) -> Path:
    """A Word document from the XML inside its body; w: is Word's namespace, m: that of formulas."""

    def part(tag: str, inner: str) -> str:
        return f'<?xml version="1.0"?><w:{tag} xmlns:w="{WORD}" xmlns:m="{MATH}">{inner}</w:{tag}>'

    parts = {
        "word/document.xml": part("document", f"<w:body>{body}</w:body>"),
        "word/styles.xml": part("styles", styles),
    }
    if numbering:
        parts["word/numbering.xml"] = part("numbering", numbering)
    parts |= {name: part(*content.split("|", 1)) for name, content in others.items()}
    return write_zip(path, parts)


def paragraph(text: str, properties: str = "") -> str:
    """A Word paragraph of one run."""
    return f'<w:p><w:pPr>{properties}</w:pPr><w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


ODF = "urn:oasis:names:tc:opendocument:xmlns"


def write_odf(path: Path, body: str, *, kind: str = "text", styles: str = "", title: str = "") -> Path:
    """An OpenDocument from the XML inside its office:text, office:presentation or office:spreadsheet."""
    spaces = " ".join(
        f'xmlns:{short}="{ODF}:{name}:1.0"'
        for short, name in {
            "office": "office",
            "text": "text",
            "table": "table",
            "style": "style",
            "draw": "drawing",
        }.items()
    )
    content = (
        f"<office:document-content {spaces}><office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:body><office:{kind}>{body}</office:{kind}></office:body></office:document-content>"
    )
    meta = f'<m xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></m>'
    return write_zip(path, {"content.xml": content, "meta.xml": meta})


DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
SLIDES = "http://schemas.openxmlformats.org/presentationml/2006/main"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def write_pptx(path: Path, slides: Iterable[str], *, notes: Mapping[int, str] = {}) -> Path:
    """A presentation from the XML inside each slide's shape tree; `notes` by the number of the slide, from 1."""
    spaces = f'xmlns:a="{DRAWING}" xmlns:p="{SLIDES}" xmlns:r="{RELATIONS}"'
    package = 'xmlns="http://schemas.openxmlformats.org/package/2006/relationships"'
    parts: dict[str, str] = {}
    ids, targets = "", ""
    for number, shapes in enumerate(slides, 1):
        tree = f"<p:cSld><p:spTree>{shapes}</p:spTree></p:cSld>"
        parts[f"ppt/slides/slide{number}.xml"] = f"<p:sld {spaces}>{tree}</p:sld>"
        ids += f'<p:sldId id="{255 + number}" r:id="r{number}"/>'
        targets += f'<Relationship Id="r{number}" Target="slides/slide{number}.xml"/>'
        if number in notes:
            target = '<Relationship Id="n" Target="../notesSlides/notesSlide1.xml"/>'
            parts[f"ppt/slides/_rels/slide{number}.xml.rels"] = f"<Relationships {package}>{target}</Relationships>"
            tree = f"<p:cSld><p:spTree>{notes[number]}</p:spTree></p:cSld>"
            parts["ppt/notesSlides/notesSlide1.xml"] = f"<p:notes {spaces}>{tree}</p:notes>"
    parts["ppt/presentation.xml"] = f"<p:presentation {spaces}><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>"
    parts["ppt/_rels/presentation.xml.rels"] = f"<Relationships {package}>{targets}</Relationships>"
    return write_zip(path, parts)


def shape(paragraphs: Iterable[str], place: str = "") -> str:
    """A slide's shape with paragraphs; a leading tab in one is a level of a list."""
    kind = f'<p:nvPr><p:ph type="{place}"/></p:nvPr>' if place else "<p:nvPr/>"
    body = "".join(
        f'<a:p><a:pPr lvl="{len(text) - len(text.lstrip(chr(9)))}"/><a:r><a:t>{text.strip()}</a:t></a:r></a:p>'
        for text in paragraphs
    )
    return f"<p:sp><p:nvSpPr>{kind}</p:nvSpPr><p:txBody>{body}</p:txBody></p:sp>"
