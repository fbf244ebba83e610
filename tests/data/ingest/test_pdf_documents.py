"""PDFs are read column by column, without running rows, with words whole, and every block knows its page."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from made_documents import write_pdf

from sftplay.data.ingest.extract.document import Unreadable, extract

pytestmark = pytest.mark.skipif(find_spec("pypdfium2") is None, reason="needs pypdfium2: make install EXTRAS=ingest")

LEFT = [
    "Lightweight structures have changed the way in",
    "which aircraft are built. Engineers prefer a com-",
    "posite material wherever the loads are known, for",
    "these structures weigh less and do not corrode at",
    "all. A self-sealing tank is built from them too.",
    "The inner skin of such a self-",
    "sealing tank swells where fuel touches it, and so",
    "it closes small holes without any help. What the",
]
RIGHT = [
    "mechanic sees from outside is only a small stain",
    "which must be wiped away before the flight, since",
    "nobody can tell a new stain from an old one later",
    "in the day. Every stain is written down with date",
    "and place. The log book is kept for twelve years.",
    "After that it may be destroyed, but most airlines",
    "keep it as long as the aircraft is in their fleet",
    "and hand it over to the next owner without delay.",
]


def column(x, y, lines, **_):
    return [(x, y - 12 * number, line) for number, line in enumerate(lines)]


def texts(blocks, kind="paragraph"):
    return [block.text for block in blocks if block.kind == kind]


def test_two_columns_below_a_wide_title_are_read_one_after_the_other(tmp_path):
    page = [
        (60, 780, "The care of self-sealing tanks in aircraft of the present day and how they are kept", "bold", 12),
        *column(60, 740, LEFT),
        *column(320, 740, RIGHT),
    ]
    found = extract(write_pdf(tmp_path / "two.pdf", [page]))
    whole = texts(found.blocks)
    assert len(whole) == 1
    assert whole[0].startswith("Lightweight structures have changed the way in which aircraft are built.")
    assert "What the mechanic sees from outside is only" in whole[0]
    assert whole[0].endswith("to the next owner without delay.")
    assert found.blocks[0].kind == "heading"
    assert found.title.startswith("The care of self-sealing tanks")


def test_a_word_divided_at_the_end_of_a_line_is_whole_and_a_compound_keeps_its_hyphen(tmp_path):
    found = extract(write_pdf(tmp_path / "a.pdf", [column(60, 740, LEFT)]))
    text = " ".join(texts(found.blocks))
    assert "prefer a composite material" in text
    assert "The inner skin of such a self-sealing tank swells" in text


def test_running_headers_footers_and_page_numbers_go_and_blocks_know_their_page(tmp_path):
    pages = [
        [
            (60, 815, "Handbook of Materials"),
            (480, 815, f"Chapter {1 + number // 2}"),
            (60, 700, f"Page {number} tells of {word} alone and of nothing else."),
            (290, 30, f"7-{number + 40}"),
        ]
        for number, word in enumerate(["aluminium", "titanium", "carbon", "steel"])
    ]
    found = extract(write_pdf(tmp_path / "book.pdf", pages))
    assert [(block.text, block.page) for block in found.blocks] == [
        ("Page 0 tells of aluminium alone and of nothing else.", 1),
        ("Page 1 tells of titanium alone and of nothing else.", 2),
        ("Page 2 tells of carbon alone and of nothing else.", 3),
        ("Page 3 tells of steel alone and of nothing else.", 4),
    ]


def test_a_paragraph_that_goes_over_to_the_next_page_is_one_and_belongs_to_the_page_where_it_begins(tmp_path):
    pages = [[*column(60, 740, LEFT[:4])], [*column(60, 780, RIGHT[1:4])]]
    found = extract(write_pdf(tmp_path / "a.pdf", pages))
    assert [(block.page, block.text[:11], block.text[-7:]) for block in found.blocks] == [(1, "Lightweight", "th date")]


def test_headings_lists_code_and_tables_are_told_by_size_sign_font_and_alignment(tmp_path):
    page = [
        (60, 780, "Materials", "bold", 18),
        (60, 750, "Their use is growing from year to year, as the table below shows for three of them."),
        (60, 720, "Measured values", "bold", 14),
        *((60, 700 - 14 * n, cell) for n, cell in enumerate(["Material", "Aluminium", "Carbon fibre", "Titanium"])),
        *((200, 700 - 14 * n, cell) for n, cell in enumerate(["Density", "2.78", "1.60", "4.43"])),
        *((300, 700 - 14 * n, cell) for n, cell in enumerate(["Strength", "483 MPa", "1500 MPa", "950 MPa"])),
        (60, 620, "What has to be done is always this, in the order that is given here and in no other:"),
        (60, 600, "\x95 check the surface"),
        (75, 588, "for scratches"),
        (60, 576, "\x95 measure the sheet"),
        (80, 564, "\x96 at three places"),
        (60, 530, "def density(m, v):", "mono", 10),
        (84, 518, "return m / v", "mono", 10),
        (84, 506, "# or so: ```", "mono", 10),
        (60, 480, "That is all there is to say about the density of the materials that are in use at present."),
    ]
    page = [(x, y, text.replace("\x95", "•").replace("\x96", "–"), *style) for x, y, text, *style in page]
    blocks = extract(write_pdf(tmp_path / "a.pdf", [page])).blocks
    assert [(block.level, block.text) for block in blocks if block.kind == "heading"] == [
        (1, "# Materials"),
        (2, "## Measured values"),
    ]
    assert texts(blocks, "table") == [
        "| Material | Density | Strength |\n| --- | --- | --- |\n| Aluminium | 2.78 | 483 MPa |\n"
        "| Carbon fibre | 1.60 | 1500 MPa |\n| Titanium | 4.43 | 950 MPa |"
    ]
    assert texts(blocks, "list") == ["- check the surface for scratches\n- measure the sheet\n   - at three places"]
    assert texts(blocks, "code") == ["````\ndef density(m, v):\n    return m / v\n    # or so: ```\n````"]


def test_a_table_with_drawn_lines_keeps_cells_of_several_lines_and_merged_ones(tmp_path):
    #  x: 60 | 200 | 300 | 500;  y: 700, 660, 630, 600. The last row's first two cells are one.
    lines = "".join(f"60 {y} m 500 {y} l S " for y in (700, 660, 630, 600))
    lines += "60 700 m 60 600 l S 500 700 m 500 600 l S 300 700 m 300 600 l S 200 700 m 200 630 l S"
    page = [
        (60, 760, "The schedule is below."),
        (65, 685, "Inspect the landing gear"),
        (65, 670, "and its doors"),
        (205, 685, "100 hours"),
        (305, 685, "Use a lamp and a mir-"),
        (305, 670, "ror for the far side."),
        (65, 645, "Hinges"),
        (305, 645, "Grease"),
        (65, 615, "Only by the manufacturer itself"),
        (305, 615, "Never here"),
        (60, 560, "It ends here."),
    ]
    blocks = extract(write_pdf(tmp_path / "a.pdf", [page], extra=lines.encode())).blocks
    assert [block.text for block in blocks] == [
        "The schedule is below.",
        "| Inspect the landing gear and its doors | 100 hours | Use a lamp and a mirror for the far side. |\n"
        "| --- | --- | --- |\n| Hinges |  | Grease |\n| Only by the manufacturer itself |  | Never here |",
        "It ends here.",
    ]


def test_lines_of_a_table_of_contents_are_left_out(tmp_path):
    page = [
        (60, 780, "1 Introduction ........................................ 3"),
        (60, 768, "2 Materials . . . . . . . . . . . . . . . . . . . . . 17"),
        (60, 740, "The book begins here."),
    ]
    assert texts(extract(write_pdf(tmp_path / "a.pdf", [page])).blocks) == ["The book begins here."]


def test_a_page_turned_by_a_quarter_is_read_as_it_is_shown(tmp_path):
    # 90 0 0 90 turned clockwise by the page's own entry: what is written upwards on the left is shown upright.
    content = b"BT /F0 10 Tf 0 1 -1 0 100 100 Tm (A turned page is read too.) Tj 0 -14 Td (It has two lines.) Tj ET"
    path = write_pdf(tmp_path / "a.pdf", [[]], extra=content)
    path.write_bytes(path.read_bytes().replace(b"/Type /Page ", b"/Type/Page/Rotate 90 ", 1))
    assert texts(extract(path).blocks) == ["A turned page is read too. It has two lines."]


IMAGE = b"q 500 0 0 700 40 60 cm BI /W 1 /H 1 /CS /G /BPC 8 ID \xff\nEI Q"


def test_pages_that_are_pictures_are_noted_and_a_pdf_of_them_alone_is_scanned(tmp_path):
    with pytest.raises(Unreadable) as caught:
        extract(write_pdf(tmp_path / "a.pdf", [[], []], extra=IMAGE))
    assert (caught.value.reason, caught.value.detail) == ("scanned", "2 of 2 pages are pictures without text")
    found = extract(write_pdf(tmp_path / "a.pdf", [[], [(60, 700, "One page has text.")], []], extra=IMAGE))
    assert found.notes == ("2 of 3 pages are pictures without text",)
    assert [(block.text, block.page) for block in found.blocks] == [("One page has text.", 2)]


def test_a_damaged_pdf_and_an_empty_one_are_named_so(tmp_path):
    whole = write_pdf(tmp_path / "a.pdf", [column(60, 740, LEFT)]).read_bytes()
    (tmp_path / "cut.pdf").write_bytes(whole[:200])
    (tmp_path / "locked.pdf").write_bytes(
        whole.replace(
            b"/Root",
            b"/Encrypt << /Filter /Standard /V 1 /R 2 /O ("
            + b"x" * 32
            + b") /U ("
            + b"y" * 32
            + b") /P -4 >> /ID [(a) (a)] /Root",
        )
    )
    for name, reason in {"cut.pdf": "broken", "locked.pdf": "encrypted"}.items():
        with pytest.raises(Unreadable) as caught:
            extract(tmp_path / name)
        assert caught.value.reason == reason
    with pytest.raises(Unreadable) as caught:
        extract(write_pdf(tmp_path / "none.pdf", [[]]))
    assert caught.value.reason == "empty"
