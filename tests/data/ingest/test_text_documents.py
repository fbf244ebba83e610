"""Plain text, Markdown, web pages, reStructuredText and mails: what is text of the document stays, what is not goes."""

from __future__ import annotations

import json
from email.message import EmailMessage
from importlib.util import find_spec

import pytest

from sftplay.data.ingest import reading
from sftplay.data.ingest.extract.document import cut_licence, extract

needs_docutils = pytest.mark.skipif(find_spec("docutils") is None, reason="needs docutils: make install EXTRAS=ingest")


def read(path, content):
    path.write_text(content, encoding="utf-8")
    found = extract(path)
    return [(block.kind, block.text) for block in found.blocks]


PROSE = """\
It was a long day at the yard, and the riggers who had come in before the sun
was up were glad when the whistle blew at last, for the wind had been cold
and the ropes stiff with ice.
"""
VERSE = """\
The boats go out at four,
they come back home at ten,
and nobody on the shore
counts the boats, or the men.
"""


def test_lines_broken_at_a_width_are_joined_and_verse_keeps_its_lines(tmp_path):
    assert read(tmp_path / "a.txt", f"{PROSE}\n{VERSE}\nCHAPTER II. The Whistle\n\nHeading\n=======\n") == [
        ("paragraph", " ".join(PROSE.split("\n")).strip()),
        ("paragraph", VERSE.strip()),
        ("heading", "## CHAPTER II. The Whistle"),
        ("heading", "# Heading"),
    ]


def test_the_first_part_of_a_long_text_decides_where_its_lines_were_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONG_TEXT_BYTES", 1000)
    monkeypatch.setattr(reading, "PART_CHARS", 1000)
    entries = "\n".join(f"entry {n:04} of a list, whose lines are about fifty long" for n in range(20))
    path = tmp_path / "a.txt"
    path.write_text(f"{PROSE}\n" * 6 + entries)
    answer = reading.read_file(
        path=str(path), stem=str(tmp_path / "out"), size=path.stat().st_size, mtime_ns=path.stat().st_mtime_ns,
        encoding="auto", cleaning=[],
    )  # fmt: skip
    assert answer["documents"] == 3
    parts = [json.loads(line)["blocks"] for line in (tmp_path / "out.0000.jsonl").read_text().splitlines()]
    assert parts[0][0][0] == " ".join(PROSE.split("\n")).strip()
    assert parts[-1][0][0].count("\n") == 5


def test_a_gutenberg_text_loses_its_header_and_licence_and_other_texts_nothing():
    begin, end = (f"*** {word} OF THE PROJECT GUTENBERG EBOOK BOATS ***" for word in ("START", "END"))
    assert cut_licence(f"x\nTitle: Boats\n\n{begin}\nAll.\n{end}\nlicence") == ("Boats", "\nAll.\n")
    assert cut_licence("Title: Boats\nEnd of the story") == ("", "Title: Boats\nEnd of the story")


def test_markdown_stays_as_it_is_without_badges_comments_and_front_matter(tmp_path):
    text = (
        "---\ntitle: The Guide\n---\n[![build](b.svg)](http://ci) ![logo](l.png)\n\n<!-- note -->\n\n# One #\n\n"
        "A *word* and ![pic](p.png) more.\n\n* a\n  * b\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n"
        "```c\nint a[2]; /* ![x](y) */\n```\n\n"
        "<table><tr><td>l</td><td>r</td></tr></table>\n"
    )
    assert read(tmp_path / "a.md", text) == [
        ("heading", "# One"),
        ("paragraph", "A *word* and more."),
        ("list", "* a\n  * b"),
        ("table", "| x | y |\n|---|---|\n| 1 | 2 |"),
        ("code", "```c\nint a[2]; /* ![x](y) */\n```"),
        ("table", "| l | r |\n| --- | --- |"),
    ]
    assert extract(tmp_path / "a.md").title == "The Guide"


PAGE = """<!doctype html><html><head><title>Pump - Shop</title><style>p {}</style></head><body>
<header><a href="/">Shop</a></header><nav><ul><li>Home</li></ul></nav><ul class="breadcrumb"><li>Parts</li></ul>
<main><h1>The pump</h1><p>It moves <b>12</b> m<sup>3</sup> of<br>water, see <a href="/x">the drawing</a>.</p>
<ol start="3"><li>Open<ul><li>the <i>lid</i></li></ul></li><li><p>Close</p><pre><code class="language-sh">pump --off
</code></pre></li></ol>
<table><caption>Sizes</caption><tr><th>Type<th colspan=2>Width</tr><tr><td rowspan=2>A<td>1<td>2<tr><td>3<td>
<table><tr><td>in<td>side</table></table>
<dl><dt>lid</dt><dd>what closes it</dd></dl><blockquote><p>Careful!</p></blockquote>
<script>var x</script><div style="display:none">hidden</div><p>Use <code>on()</code>.</p></main>
<aside>Buy more</aside><footer>Imprint</footer></body></html>"""


def test_a_web_page_gives_its_content_as_markdown_without_navigation(tmp_path):
    assert read(tmp_path / "a.html", PAGE) == [
        ("heading", "# The pump"),
        ("paragraph", "It moves 12 m^3 of\nwater, see the drawing."),
        ("list", "3. Open\n   - the lid\n4. Close\n\n   ```sh\n   pump --off\n   ```"),
        ("paragraph", "Sizes"),
        ("table", "| Type | Width |  |\n| --- | --- | --- |\n| A | 1 | 2 |\n| A | 3 | in, side |"),
        ("list", "- lid: what closes it"),
        ("paragraph", "> Careful!"),
        ("paragraph", "Use `on()`."),
    ]
    assert extract(tmp_path / "a.html").title == "The pump"


def test_a_manual_made_by_sphinx_keeps_its_links_notes_and_sections_of_any_name(tmp_path):
    page = (
        '<html><body><div class="sphinxsidebar">Search</div><div role="main"><section id="navigation">'
        '<h1>Navigation<a class="headerlink" href="#navigation">¶</a></h1>'
        '<p>See <a class="reference internal" href="#x">the menu</a>.</p>'
        '<div class="section" id="comments"><h2>Comments</h2><p>Write <code>x</code>.</p></div>'
        '<div id="menu"><h2>Menu</h2><p>It opens.</p></div><aside class="footnote">1 A note.</aside>'
        "</section></div></body></html>"
    )
    assert [text for _, text in read(tmp_path / "a.html", page)] == [
        "# Navigation",
        "See the menu.",
        "## Comments",
        "Write `x`.",
        "## Menu",
        "It opens.",
        "1 A note.",
    ]


def test_a_contents_list_of_the_page_itself_goes_and_notes_with_a_way_back_stay(tmp_path):
    entries = "".join(f'<li><a href="#s{n}">Part {n}</a></li>' for n in range(4))
    notes = "".join(f'<li>Note {n}, which says more about it. <a href="#n{n}">↩</a></li>' for n in range(4))
    blocks = read(
        tmp_path / "a.html", f"<h1>Book</h1><h2>Contents</h2><ul>{entries}</ul><h2>Notes</h2><ol>{notes}</ol>"
    )
    assert [text.split("\n")[0] for _, text in blocks] == [
        "# Book",
        "## Notes",
        "1. Note 0, which says more about it. ↩",
    ]


def test_a_page_in_the_encoding_that_it_names_is_read_and_a_wrong_name_is_noted(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes('<meta charset="iso-8859-1"><p>Größe “x”</p>'.encode("cp1252"))
    assert extract(path).blocks[0].text == "Größe “x”"
    path.write_bytes('<meta charset="UTF-16"><p>Größe of a page.</p>'.encode())
    assert extract(path).blocks[0].text == "Größe of a page."
    path.write_bytes(b'<meta charset="utf-8"><p>Gr\xf6sse is enough</p>')
    assert extract(path).notes == ("characters that are not utf-8, which the page names: 1",)


@needs_docutils
def test_restructured_text_keeps_what_sphinx_adds_and_its_literal_blocks(tmp_path):
    text = (
        "The Title\n=========\n\nSee :ref:`the part <x>`, :py:func:`~a.b` and ``c``.\n\n"
        ".. versionadded:: 3.1\n   Now with oil.\n\n.. toctree::\n\n   other\n\n"
        ".. function:: pump(x)\n\n   Pumps *x*.\n\nCode::\n\n    a = 1\n      b\n\n- one\n\n  - two\n\n"
        "==  ==\nl   r\n==  ==\n1   2\n==  ==\n"
    )
    assert read(tmp_path / "a.rst", text) == [
        ("heading", "# The Title"),
        ("paragraph", "See the part, `a.b` and `c`."),
        ("paragraph", "3.1 Now with oil."),
        ("paragraph", "pump(x)"),
        ("paragraph", "Pumps x."),
        ("paragraph", "Code:"),
        ("code", "```\na = 1\n  b\n```"),
        ("list", "- one\n  - two"),
        ("table", "| l | r |\n| --- | --- |\n| 1 | 2 |"),
    ]


def test_a_mail_gives_subject_and_text_and_counts_its_attachments(tmp_path):
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = "Überholung der Pumpe", "a@example.org", "b@example.org"
    mail.set_content("Guten Tag,\n\ndie Pumpe läuft.\n")
    mail.add_alternative("<p>not this</p>", subtype="html")
    mail.add_attachment(b"%PDF-1.4", maintype="application", subtype="pdf", filename="plan.pdf")
    (tmp_path / "a.eml").write_bytes(bytes(mail))
    found = extract(tmp_path / "a.eml")
    assert found.title == "Überholung der Pumpe"
    assert [block.text for block in found.blocks] == ["# Überholung der Pumpe", "Guten Tag,", "die Pumpe läuft."]
    assert found.notes == ("attachments that are not read: 1",)
    page = EmailMessage()
    page["Subject"] = "Page"
    page.set_content("<ul><li>only <b>HTML</b></li></ul>", subtype="html")
    (tmp_path / "b.eml").write_bytes(bytes(page))
    assert [block.text for block in extract(tmp_path / "b.eml").blocks] == ["# Page", "- only HTML"]
