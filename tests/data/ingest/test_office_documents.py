"""Office documents keep headings, nested lists, merged and nested tables, formulas and notes, and know their pages."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec

import pytest
from made_documents import paragraph, shape, write_docx, write_odf, write_pptx, write_zip

from sftplay.data.ingest.extract.document import extract

pytestmark = pytest.mark.skipif(find_spec("anydoc") is None, reason="needs anydoc: make install EXTRAS=ingest")
needs_openpyxl = pytest.mark.skipif(find_spec("openpyxl") is None, reason="needs openpyxl: make install EXTRAS=ingest")

STYLES = (
    '<w:style w:type="paragraph" w:styleId="Titre"><w:name w:val="Title"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Titre1"><w:name w:val="heading 1"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Eigen"><w:name w:val="Mein Stil"/><w:basedOn w:val="Titre1"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="TM1"><w:name w:val="toc 1"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Code"><w:name w:val="HTML Preformatted"/></w:style>'
)
NUMBERING = (
    '<w:abstractNum w:abstractNumId="1"><w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/>'
    '<w:lvlText w:val="%1"/></w:lvl><w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/>'
    '<w:lvlText w:val="%1.%2"/></w:lvl></w:abstractNum>'
    '<w:abstractNum w:abstractNumId="2"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/></w:lvl></w:abstractNum>'
    '<w:num w:numId="1"><w:abstractNumId w:val="1"/></w:num><w:num w:numId="2"><w:abstractNumId w:val="2"/></w:num>'
)


WORD = b"http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHAPES = "urn:schemas-microsoft-com:vml"
STRICT = b"http://purl.oclc.org/ooxml/wordprocessingml/main"


def read_parts(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def styled(text, style, number=None, level=0):
    place = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>' if number else ""
    return paragraph(text, f'<w:pStyle w:val="{style}"/>{place}')


def run(inner, properties=""):
    return f"<w:r><w:rPr>{properties}</w:rPr>{inner}</w:r>"


def cell(inner, properties=""):
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{inner}</w:tc>"


def by_kind(found):
    return [(block.kind, block.text) for block in found.blocks]


def test_word_headings_are_known_by_style_in_any_language_and_carry_their_numbers(tmp_path):
    body = (
        styled("Das Handbuch", "Titre")
        + styled("Inhalt 3", "TM1")
        + styled("Einleitung", "Titre1", 1)
        + styled("Teil", "Titre1", 1, 1)
        + styled("Eigenes", "Eigen")
        + paragraph("Umriss", '<w:outlineLvl w:val="2"/>')
    )
    found = extract(write_docx(tmp_path / "a.docx", body, styles=STYLES, numbering=NUMBERING))
    assert found.title == "Das Handbuch"
    assert [block.text for block in found.blocks] == [
        "# Das Handbuch",
        "## 1 Einleitung",
        "## 1.a Teil",
        "## Eigenes",
        "#### Umriss",
    ]


def test_word_lists_are_nested_and_a_list_that_goes_on_after_a_paragraph_counts_on(tmp_path):
    body = (
        styled("one", "", 1)
        + styled("one a", "", 1, 1)
        + styled("one b", "", 1, 1)
        + styled("two", "", 1)
        + paragraph("Between.")
        + styled("three", "", 1)
        + styled("sign", "", 2)
    )
    found = extract(write_docx(tmp_path / "a.docx", body, numbering=NUMBERING))
    assert by_kind(found) == [
        ("list", "1. one\n   1. one a\n   2. one b\n2. two"),
        ("paragraph", "Between."),
        ("list", "3. three"),
        ("list", "- sign"),
    ]


def test_word_tables_keep_merged_and_nested_cells_without_loss_of_text(tmp_path):
    merged, below = '<w:vMerge w:val="restart"/>', "<w:vMerge/>"
    inner = "<w:tbl><w:tr>" + cell(paragraph("in 1")) + cell(paragraph("in 2")) + "</w:tr></w:tbl>"
    body = (
        "<w:tbl><w:tr>" + cell(paragraph("wide"), '<w:gridSpan w:val="2"/>') + cell(paragraph("c")) + "</w:tr>"
        "<w:tr>" + cell(paragraph("tall"), merged) + cell(paragraph("x | y")) + cell(inner + paragraph("z")) + "</w:tr>"
        "<w:tr>"
        + cell(paragraph(""), below)
        + cell(paragraph("p") + paragraph("q"))
        + cell(paragraph("r"))
        + "</w:tr></w:tbl>"
    )
    found = extract(write_docx(tmp_path / "a.docx", body))
    assert by_kind(found) == [
        ("table", "| wide |  | c |\n| --- | --- | --- |\n| tall | x \\| y | in 1, in 2 z |\n| tall | p q | r |")
    ]


def test_word_leaves_out_what_is_deleted_or_hidden_and_keeps_formulas_boxes_notes_and_code(tmp_path):
    fraction = "<m:f><m:num><m:r><m:t>a</m:t></m:r></m:num><m:den><m:r><m:t>b</m:t></m:r></m:den></m:f>"
    body = (
        '<w:p><w:r><w:rPr><w:vanish w:val="0"/></w:rPr><w:t xml:space="preserve">Kept </w:t></w:r>'
        "<w:ins><w:r><w:t>added</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:r><w:rPr><w:vanish/></w:rPr><w:t>hidden</w:t></w:r>"
        '<w:r><w:footnoteReference w:id="7"/></w:r></w:p>'
        f'<w:p><w:r><w:t xml:space="preserve">It is </w:t></w:r><m:oMath>{fraction}</m:oMath></w:p>'
        f'<w:p><w:r><w:pict><v:shape xmlns:v="{SHAPES}"><v:textbox><w:txbxContent>{paragraph("in a box")}'
        "</w:txbxContent></v:textbox></v:shape></w:pict></w:r></w:p>"
        + styled("if x:", "Code")
        + styled("    y()", "Code")
    )
    notes = {"word/footnotes.xml": f'footnotes|<w:footnote w:id="7">{paragraph(" the note")}</w:footnote>'}
    found = extract(write_docx(tmp_path / "a.docx", body, styles=STYLES, others=notes))
    assert by_kind(found) == [
        ("paragraph", "Kept added[^1]"),
        ("paragraph", r"It is $\frac{a}{b}$"),
        ("paragraph", "in a box"),
        ("code", "```\nif x:\n    y()\n```"),
        ("paragraph", "[^1]: the note"),
    ]


READ = f"<w:rt>{run('<w:t>かん</w:t>')}</w:rt><w:rubyBase>{run('<w:t>漢字</w:t>')}</w:rubyBase>"
RUBY = run(f"<w:t>a </w:t><w:ruby>{READ}</w:ruby><w:t> b</w:t>")
HYPHEN = run("<w:t>well</w:t><w:noBreakHyphen/><w:t>known</w:t>")
POWER = run("<w:t>10</w:t>") + run("<w:noBreakHyphen/><w:t>3</w:t>", '<w:vertAlign w:val="superscript"/>')


def test_word_keeps_words_with_a_reading_above_and_hyphens_that_do_not_break_in_notes_too(tmp_path):
    line = f"<w:p>{RUBY}{HYPHEN}{run('<w:t>hidden</w:t>', '<w:vanish/>')}{POWER}</w:p>"
    cited = run('<w:footnoteReference w:id="7"/><w:endnoteReference w:id="3"/>')
    notes = {
        "word/footnotes.xml": f'footnotes|<w:footnote w:id="7">{line}</w:footnote>',
        "word/endnotes.xml": f'endnotes|<w:endnote w:id="3"><w:ins>{line}</w:ins></w:endnote>',
    }
    found = extract(write_docx(tmp_path / "a.docx", f"{line}<w:p>{cited}</w:p>", others=notes))
    text = "a 漢字 bwell-known10^-3"
    assert [block.text for block in found.blocks] == [text, "[^1][^2]", f"[^1]: {text}", f"[^2]: {text}"]


def test_word_keeps_paragraphs_and_rows_inside_content_controls_and_tracked_changes(tmp_path):
    def control(inner):
        return f"<w:sdt><w:sdtPr/><w:sdtContent>{inner}</w:sdtContent></w:sdt>"

    def row(first, second):
        return f"<w:tr>{cell(first)}{cell(second)}</w:tr>"

    def one(text):
        return row(paragraph(text), paragraph("x"))

    body = (
        f"<w:ins>{paragraph('added')}{control(paragraph('both'))}</w:ins><w:moveTo>{paragraph('moved')}</w:moveTo>"
        f"<w:del>{paragraph('deleted')}</w:del><w:moveFrom>{paragraph('gone')}</w:moveFrom>"
        f"<w:tbl>{one('head')}{control(control(one('r1')) + one('r2'))}<w:ins>{one('r3')}</w:ins>"
        f"<w:customXml><w:customXmlPr/>{one('r4')}</w:customXml>"
        f"{row('<w:ins>' + paragraph('r5') + '</w:ins>', paragraph('y'))}</w:tbl>"
        f"{control('<w:ins>' + '<w:tbl>' + one('a') + one('b') + '</w:tbl>' + '</w:ins>')}"
    )
    found = extract(write_docx(tmp_path / "a.docx", body))
    assert [block.text for block in found.blocks] == [
        *("added", "both", "moved"),
        "| head | x |\n| --- | --- |\n| r1 | x |\n| r2 | x |\n| r3 | x |\n| r4 | x |\n| r5 | y |",
        "| a | x |\n| --- | --- |\n| b | x |",
    ]


def numbered_style(name, number="", level="", based_on=""):
    place = (f'<w:ilvl w:val="{level}"/>' if level else "") + (f'<w:numId w:val="{number}"/>' if number else "")
    above = f'<w:basedOn w:val="{based_on}"/>' if based_on else ""
    inner = f"{above}<w:pPr><w:numPr>{place}</w:numPr></w:pPr>" if place else above
    return f'<w:style w:type="paragraph" w:styleId="{name}"><w:name w:val="{name}"/>{inner}</w:style>'


def test_word_headings_and_items_are_numbered_at_the_depth_that_their_style_says(tmp_path):
    styles = (
        numbered_style("heading 1", "1")
        + numbered_style("heading 2", level="1", based_on="heading 1")
        + numbered_style("item", "3")
        + numbered_style("item 2", "3", "1")
        + numbered_style("own", based_on="item 2")
        + numbered_style("none", "0", based_on="item")
    )
    shape = NUMBERING.partition('<w:abstractNum w:abstractNumId="2"')[0].replace('NumId="1"', 'NumId="3"')
    numbering = shape + NUMBERING + '<w:num w:numId="3"><w:abstractNumId w:val="3"/></w:num>'
    body = (
        *(styled("One", "heading 1"), styled("Part", "heading 2"), styled("Part", "heading 2")),
        *(styled("Two", "heading 1"), styled("Part", "heading 2"), styled("Free", "heading 2", "0")),
        *(styled("a", "item", "3"), styled("b", "item 2"), styled("c", "own"), styled("d", "item")),
        paragraph("e", '<w:pStyle w:val="item"/><w:numPr><w:ilvl w:val="1"/></w:numPr>'),
        styled("no item", "none"),
    )
    found = extract(write_docx(tmp_path / "a.docx", "".join(body), styles=styles, numbering=numbering))
    assert [block.text for block in found.blocks] == [
        *("# 1 One", "## 1.a Part", "## 1.b Part", "# 2 Two", "## 2.a Part", "## Free"),
        "1. a\n   1. b\n   2. c\n2. d\n   1. e",
        "no item",
    ]


def test_a_word_document_saved_as_strict_open_xml_is_the_same(tmp_path):
    path = write_docx(tmp_path / "a.docx", styled("Title", "Titre") + paragraph("Text."), styles=STYLES)
    strict = {name: data.replace(WORD, STRICT) for name, data in read_parts(path).items()}
    assert extract(write_zip(tmp_path / "b.docx", strict)).blocks == extract(path).blocks


def test_opendocument_texts_keep_headings_nested_lists_tables_and_spaces(tmp_path):
    styles = (
        '<text:list-style style:name="L1"><text:list-level-style-number text:level="1" style:num-format="1"/>'
        '<text:list-level-style-bullet text:level="2"/></text:list-style>'
        '<style:style style:name="P1" style:parent-style-name="Title"/>'
    )
    body = (
        "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>"
        '<text:p text:style-name="P1">Report</text:p>'
        '<text:h text:outline-level="2">Part</text:h><text:p>a<text:s text:c="2"/>b<text:line-break/>c'
        "<office:annotation><text:p>remark</text:p></office:annotation></text:p>"
        '<text:list text:style-name="L1"><text:list-item><text:p>one</text:p><text:list><text:list-item>'
        "<text:p>deep</text:p></text:list-item></text:list></text:list-item></text:list>"
        '<table:table><table:table-row><table:table-cell table:number-columns-spanned="2"><text:p>wide</text:p>'
        "</table:table-cell><table:covered-table-cell/></table:table-row><table:table-row><table:table-cell>"
        "<text:p>l</text:p></table:table-cell><table:table-cell><text:p>r</text:p></table:table-cell></table:table-row>"
        "</table:table>"
    )
    found = extract(write_odf(tmp_path / "a.odt", body, styles=styles))
    assert found.title == "Report"
    assert by_kind(found) == [
        ("heading", "# Report"),
        ("heading", "## Part"),
        ("paragraph", "a  b\nc"),
        ("list", "1. one\n   - deep"),
        ("table", "| wide |  |\n| --- | --- |\n| l | r |"),
    ]


def test_opendocument_keeps_numbered_paragraphs_and_frames_and_leaves_out_readings_and_page_numbers(tmp_path):
    frame = "<draw:frame><draw:text-box><text:p>framed</text:p></draw:text-box></draw:frame>"
    row = f"<table:table-row><table:table-cell>{frame}</table:table-cell><table:table-cell><text:p>x</text:p>"
    row = f"<table:table>{row}</table:table-cell></table:table-row></table:table>"
    body = (
        "<text:p>x<text:ruby><text:ruby-base>漢字</text:ruby-base><text:ruby-text>かん</text:ruby-text></text:ruby> y, "
        "page<text:page-number>4</text:page-number> of 9<text:bookmark-ref>here</text:bookmark-ref>.</text:p>"
        '<text:numbered-paragraph><text:number>1.</text:number><text:h text:outline-level="2">Part</text:h>'
        "</text:numbered-paragraph><text:numbered-paragraph><text:p>item</text:p></text:numbered-paragraph>"
        f"{frame}<draw:custom-shape><text:p>shape</text:p></draw:custom-shape>{row}"
    )
    found = extract(write_odf(tmp_path / "a.odt", body))
    assert [block.text for block in found.blocks] == [
        *("x漢字 y, page of 9.", "## Part", "item", "framed", "shape"),
        "| framed | x |\n| --- | --- |",
    ]


def test_opendocument_slides_and_sheets_are_pages(tmp_path):
    slides = "".join(
        f'<draw:page draw:name="s{n}"><draw:frame><draw:text-box><text:p>slide {n}</text:p>'
        "</draw:text-box></draw:frame></draw:page>"
        for n in (1, 2)
    )
    found = extract(write_odf(tmp_path / "a.odp", slides, kind="presentation", title="Show"))
    assert (found.title, [(block.text, block.page) for block in found.blocks]) == (
        "Show",
        [("slide 1", 1), ("slide 2", 2)],
    )
    rows = (
        '<table:table-row table:number-rows-repeated="2"><table:table-cell table:number-columns-repeated="2">'
        '<text:p>7</text:p></table:table-cell><table:table-cell table:number-columns-repeated="16000"/>'
        "</table:table-row>"
        '<table:table-row table:number-rows-repeated="1000000">'
        '<table:table-cell table:number-columns-repeated="16000"/></table:table-row>'
    )
    sheets = f'<table:table table:name="none"/><table:table table:name="data">{rows}</table:table>'
    found = extract(write_odf(tmp_path / "a.ods", sheets, kind="spreadsheet"))
    assert [(block.text, block.page) for block in found.blocks] == [
        ("## data", 2),
        ("| 7 | 7 |\n| --- | --- |\n| 7 | 7 |", 2),
    ]


def test_slides_give_title_list_table_and_notes_with_their_number_and_no_footer(tmp_path):
    table = (
        "<p:graphicFrame><a:graphic><a:graphicData><a:tbl>"
        '<a:tr><a:tc gridSpan="2"><a:txBody><a:p><a:r><a:t>wide</a:t></a:r></a:p></a:txBody></a:tc>'
        '<a:tc hMerge="1"/></a:tr>'
        "<a:tr><a:tc><a:txBody><a:p><a:r><a:t>l</a:t></a:r></a:p></a:txBody></a:tc>"
        "<a:tc><a:txBody><a:p><a:r><a:t>r</a:t></a:r></a:p></a:txBody></a:tc></a:tr>"
        "</a:tbl></a:graphicData></a:graphic></p:graphicFrame>"
    )
    first = (
        shape(["footer text"], "ftr")
        + shape(["12"], "sldNum")
        + shape(["one", "\tdeep", "two"], "body")
        + shape(["Plan"], "title")
    )
    found = extract(write_pptx(tmp_path / "a.pptx", [first, table], notes={2: shape(["Say this."], "body")}))
    assert found.title == "Plan"
    assert [(block.text, block.page) for block in found.blocks] == [
        ("## Plan", 1),
        ("- one\n  - deep\n- two", 1),
        ("| wide |  |\n| --- | --- |\n| l | r |", 2),
        ("Say this.", 2),
    ]


def test_a_slide_whose_notes_are_gone_is_read_without_them(tmp_path):
    path = write_pptx(tmp_path / "a.pptx", [shape(["Plan"], "title")], notes={1: ""})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist() if "notesSlide1" not in name}
    assert [block.text for block in extract(write_zip(path, parts)).blocks] == ["## Plan"]


@needs_openpyxl
def test_sheets_are_tables_with_dates_and_the_last_computed_values(tmp_path):
    import datetime

    import openpyxl

    book = openpyxl.Workbook()
    book.active.title = "Flights"
    book.active.append(["Date", "Hours", "Sum"])
    book.active.append([datetime.date(2024, 5, 17), 1.5, None])
    book.active.append([])
    book.active.append(["total", 0.1 + 0.2, True])
    book.active.append(["mass", 12345678901.25, 1234567.8912])
    book.active.merge_cells("A6:B6")
    book.active["A6"] = "merged | cell"
    hidden = book.create_sheet("Secret")
    hidden.append(["x"])
    hidden.sheet_state = "hidden"
    book.create_sheet("Last").append(["end"])
    book.save(tmp_path / "a.xlsx")
    found = extract(tmp_path / "a.xlsx")
    assert [(block.text, block.page) for block in found.blocks] == [
        ("## Flights", 1),
        (
            "| Date | Hours | Sum |\n| --- | --- | --- |\n| 2024-05-17 | 1.5 |  |\n| total | 0.3 | TRUE |\n"
            "| mass | 12345678901.25 | 1234567.8912 |\n| merged \\| cell |  |  |",
            1,
        ),
        ("## Last", 3),
        ("| end |\n| --- |", 3),
    ]
    assert found.notes == ("the hidden sheet 'Secret' is left out",)


def test_an_office_document_by_another_name_is_read_by_its_content_and_noted(tmp_path):
    path = write_docx(tmp_path / "report.pdf", paragraph("It is Word."))
    found = extract(path)
    assert by_kind(found) == [("paragraph", "It is Word.")]
    assert found.notes == ("read as docx by its content, the name ends in '.pdf'",)
    write_zip(tmp_path / "a.docx", {"readme": "none"})
