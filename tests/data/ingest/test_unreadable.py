"""A file without text is reported with the reason: empty, locked, damaged, too large, unsafe, of another kind."""

from __future__ import annotations

import resource
import struct
import time
import zipfile

import pytest
from made_documents import WORD, paragraph, write_docx, write_odf, write_zip

from sftplay.data.ingest.extract import document
from sftplay.data.ingest.extract.document import Unreadable, extract
from sftplay.errors import MachineError

MIB = 2**20


def find_reason(path):
    with pytest.raises(Unreadable) as caught:
        extract(path)
    return caught.value.reason, caught.value.detail


def memory_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    ("name", "content", "reason", "detail"),
    [
        ("a.txt", b"", "empty", "the file is empty"),
        ("a.md", b" \n\t\n", "empty", "nothing but white space"),
        ("a.html", b"<html><body><nav>Home</nav></body></html>", "empty", "holds no text"),
        ("a.txt", b"\x89PNG\r\n\x1a\n123", "wrong_format", "a PNG image"),
        ("a.docx", b"plain words", "wrong_format", "something else than '.docx' says"),
        ("a.pdf", b"plain words", "wrong_format", "something else than '.pdf' says"),
        ("a.xyz", b"plain words", "wrong_format", "of an unknown kind"),
        ("a.txt", b"abc\0def\0\0\xff\xfe\xfa", "wrong_format", "binary"),
        ("a.txt", b"\xff\xd0\x01\x02 \xdc\x05" * 9, "encoding", "control characters that no text has"),
        ("a.html", b"<p>\xff\x03\xdc</p>", "encoding", "control characters that no text has"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "wrong_format", "an old Office document"),
        (
            "a.docx",
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le"),
            "encrypted",
            "locked by a password",
        ),
        ("a.pptx", b"PK\x03\x04 cut", "broken", "the archive cannot be opened"),
        ("a.rtf", b"{\\rtf1 a}", "wrong_format", "save it as docx"),
    ],
)
def test_each_reason_is_named_with_its_detail(tmp_path, name, content, reason, detail):
    (tmp_path / name).write_bytes(content)
    found = find_reason(tmp_path / name)
    assert found[0] == reason
    assert detail in found[1]


def test_a_mail_that_is_too_large_is_said_with_the_size_that_is_read(tmp_path):
    path = tmp_path / "a.eml"
    with path.open("wb") as stream:
        stream.truncate(68 << 20)
    assert find_reason(path) == ("too_large", "68 MiB; such files are read up to 64 MiB")


def test_archives_that_are_no_documents_or_locked_or_damaged_are_told_apart(tmp_path):
    assert find_reason(write_zip(tmp_path / "a.docx", {"x": "y"})) == (
        "wrong_format",
        "the content is a zip archive without a document",
    )
    path = write_odf(tmp_path / "a.odt", "<text:p>a</text:p>")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("META-INF/manifest.xml", "<m><encryption-data/></m>")
    assert find_reason(path)[0] == "encrypted"
    path = write_docx(tmp_path / "b.docx", paragraph("text " * 999))
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)
    path.write_bytes(data)
    assert find_reason(path)[0] == "broken"
    locked = bytearray(write_docx(tmp_path / "c.docx", paragraph("x")).read_bytes())
    place = locked.index(b"PK\x01\x02") + 8
    locked[place : place + 2] = struct.pack("<H", 1)
    (tmp_path / "c.docx").write_bytes(locked)
    assert find_reason(tmp_path / "c.docx")[0] == "encrypted"


@pytest.mark.parametrize(
    ("name", "part"), [("a.docx", "word/document.xml"), ("a.xlsx", "xl/workbook.xml"), ("a.odt", "content.xml")]
)
def test_a_zip_bomb_is_refused_from_the_directory_before_it_takes_memory(tmp_path, name, part):
    if name == "a.xlsx":
        pytest.importorskip("openpyxl", reason="needs openpyxl: make install EXTRAS=ingest")
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(part, "w", force_zip64=True) as stream:
            for _ in range(150):
                stream.write(bytes(MIB))
    assert (tmp_path / name).stat().st_size < MIB
    before, began = memory_mib(), time.process_time()
    reason, detail = find_reason(tmp_path / name)
    assert reason == "unsafe"
    assert "150 MiB" in detail
    assert memory_mib() - before < 50
    assert time.process_time() - began < 5


def test_a_directory_that_lies_about_a_size_does_not_make_more_be_unpacked(tmp_path):
    path = write_docx(tmp_path / "a.docx", paragraph("x" * MIB))
    data = path.read_bytes()
    real = struct.pack("<L", zipfile.ZipFile(path).getinfo("word/document.xml").file_size)
    path.write_bytes(data.replace(real, struct.pack("<L", 500)))
    assert find_reason(path)[0] == "broken"


LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))


def test_entities_are_refused_or_stay_unread_and_no_file_is_fetched(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden words")
    body = f'<w:document xmlns:w="{WORD}"><w:body><w:p><w:r><w:t>&x;</w:t></w:r></w:p></w:body></w:document>'
    for inner in (f'<!ENTITY a0 "ha">{LAUGHS}<!ENTITY x "&a9;">', f'<!ENTITY x SYSTEM "file://{secret}">'):
        write_zip(tmp_path / "a.docx", {"word/document.xml": f"<!DOCTYPE d [{inner}]>{body}"})
        reason, detail = find_reason(tmp_path / "a.docx")
        assert (reason, "declares a document type" in detail) == ("unsafe", True)
    page = f'<!DOCTYPE html [<!ENTITY x SYSTEM "file://{secret}">]><html><body><p>seen &x;</p></body></html>'
    (tmp_path / "a.html").write_text(page)
    assert "hidden" not in " ".join(block.text for block in extract(tmp_path / "a.html").blocks)
    pytest.importorskip("docutils", reason="needs docutils: make install EXTRAS=ingest")
    (tmp_path / "a.rst").write_text(f"seen\n\n.. include:: {secret}\n\n.. raw:: html\n   :file: {secret}\n")
    assert [block.text for block in extract(tmp_path / "a.rst").blocks] == ["seen"]


def test_a_missing_library_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "find_spec", lambda name: None)
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4\n")
    with pytest.raises(MachineError) as caught:
        extract(tmp_path / "a.pdf")
    assert (caught.value.what, caught.value.fix) == ("PDF documents need pypdfium2", "make install EXTRAS=ingest")
    (tmp_path / "a.txt").write_text("Words need nothing.")
    assert extract(tmp_path / "a.txt").blocks[0].text == "Words need nothing."
