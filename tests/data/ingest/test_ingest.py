"""`make ingest`: rows with their provenance, the accounting, duplicates, what is stopped and given again."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from made_documents import write_pdf
from processes import HANG_S, is_alive, wait_until

from sftplay.cli import main
from sftplay.data.ingest import ingest
from sftplay.data.ingest.children import NO_ROOM_CODE, ChildEnd

ROOT = Path(__file__).resolve().parents[3]
PLAIN = [] if find_spec("ftfy") else ["--without", "encoding"]
"""A kit without the extra `ingest` cannot do that step."""

WORDS = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").split()


def prose(number: int, n_words: int = 200) -> str:
    """Text that shares no run of five words with that of another number."""
    return " ".join(f"{word}{number}" if place % 4 == 0 else word for place, word in enumerate(WORDS[:n_words]))


class Folder:
    """A folder of documents and what ingesting it gives."""

    def __init__(self, home: Path) -> None:
        self.home, self.docs, self.out = home, home / "docs", home / "out.jsonl"
        self.docs.mkdir()

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def ingest(self, *flags: str, code: int = 0) -> list[dict[str, Any]]:
        plain = [] if any(flag.startswith("--without") for flag in flags) else PLAIN
        assert main(["ingest", "--in", str(self.docs), "--out", str(self.out), *plain, *flags]) == code
        return self.rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out.with_suffix(".report.json").read_text())

    def status(self, name: str) -> dict[str, Any]:
        return next(file for file in self.report["files"] if file["path"] == name)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.contract
def test_a_row_tells_where_its_text_is_from(folder):
    path = folder.write("a/manual.md", f"# Pumps\n\n{prose(1)}\n\n## Seals\n\n- one\n- two\n")
    (row,) = folder.ingest()
    assert row["text"] == f"# Pumps\n\n{prose(1)}\n\n## Seals\n\n- one\n- two"
    assert (row["source"], row["title"], row["section"], row["row"]) == ("a/manual.md", "Pumps", "", None)
    assert row["n_chars"] == len(row["text"])
    assert row["sha256"] == hashlib.sha256(row["text"].encode()).hexdigest()
    assert row["file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_each_page_of_a_pdf_is_the_stretch_of_text_that_its_row_names(folder):
    pytest.importorskip("pypdfium2")
    lines = [[(72, 700, f"Sentence {n} of page {n} tells of pumps number {n}.")] for n in (1, 2, 3)]
    write_pdf(folder.docs / "manual.pdf", lines)
    (row,) = folder.ingest()
    shown = {page: row["text"][begin:end].strip() for page, begin, end in row["pages"]}
    assert shown == {n: f"Sentence {n} of page {n} tells of pumps number {n}." for n in (1, 2, 3)}
    assert [begin for _, begin, _ in row["pages"]][1:] == [end for _, _, end in row["pages"]][:-1]
    assert row["pages"][-1][2] == row["n_chars"]


@pytest.mark.contract
def test_by_section_each_row_has_its_path_of_headings(folder):
    folder.write("m.md", f"# Pumps\n\n{prose(1)}\n\n## Seals\n\n### Old\n\n{prose(2)}\n\n## New\n\n{prose(3)}\n")
    rows = folder.ingest("--by", "section")
    assert [row["section"] for row in rows] == ["Pumps", "Pumps > Seals > Old", "Pumps > New"]
    assert rows[1]["text"].startswith("## Seals\n\n### Old\n\n")


@pytest.mark.contract
def test_documents_are_kept_dropped_or_unreadable_and_each_is_counted_once(folder):
    folder.write("1.txt", prose(1))
    folder.write("2.txt", prose(2))
    folder.write("copy.txt", prose(2))
    folder.write("near.txt", prose(1) + " and some more words")
    folder.write("short.txt", "too short")
    folder.write("empty.txt", "")
    folder.write("binary.txt", bytes(range(256)) * 20)
    folder.write("picture.png", b"\x89PNG")
    folder.write(".hidden.txt", prose(3))
    table = [{"text": prose(4), "title": "a row"}, {"text": prose(4)}, {"other": 1}, "no object"]
    folder.write("rows.jsonl", "\n".join(map(json.dumps, table)))
    rows, report = folder.ingest(), folder.report
    assert [row["source"] for row in rows] == ["1.txt", "2.txt", "rows.jsonl"]
    assert (rows[2]["row"], rows[2]["title"]) == (1, "a row")
    assert report["dropped"] == {"broken_row": 1, "duplicate": 2, "near_duplicate": 1, "no_text": 1, "short": 1}
    assert report["unreadable"] == {"empty": 1, "wrong_format": 1}
    assert report["skipped"] == {"hidden": 1, "other_kind": 1}
    assert report["documents"] == 3 + 6 + 2 == 11
    assert report["characters"] == sum(row["n_chars"] for row in rows)
    assert {example["reason"] for example in report["examples"]["dropped"]} == set(report["dropped"])
    by_file = sum((Counter(file.get("dropped", {})) for file in report["files"]), Counter())
    assert by_file == Counter(report["dropped"])
    assert len(report["files"]) == 10


@pytest.mark.contract
def test_a_pair_is_listed_with_the_share_of_runs_of_five_words_that_it_has_in_common(folder):
    one, other = prose(1), prose(1) + " and some more words"
    folder.write("a.txt", one)
    folder.write("b.txt", other)
    folder.ingest()
    (pair,) = folder.report["near_duplicate_pairs"]
    a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in map(list_words, (one, other)))
    assert pair["similarity"] == pytest.approx(len(a & b) / len(a | b), abs=1e-4)
    assert (pair["kept"]["source"], pair["dropped"]["source"]) == ("a.txt", "b.txt")


def list_words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


@pytest.mark.contract
def test_steps_and_filters_can_be_switched(folder):
    folder.write("1.txt", prose(1))
    folder.write("2.txt", prose(1))
    folder.write("3.txt", "short")
    assert len(folder.ingest("--without", "encoding,duplicates,near_duplicates", "--min-chars", "1")) == 3
    folder.out.unlink()
    assert (
        len(folder.ingest("--without", "encoding,duplicates")) == 1
    )  # the second is a near-duplicate, of similarity 1
    folder.out.unlink()
    assert folder.ingest("--max-chars", "60", code=4) == []
    assert folder.report["dropped"] == {"long": 2, "short": 1}


@pytest.mark.skipif(find_spec("py3langid") is None, reason="needs py3langid, of the extra `ingest`")
def test_only_the_languages_that_are_named_are_kept(folder):
    german = "Vor dem Öffnen der Abdeckung muss die Pumpe ausgeschaltet und vom Netz getrennt werden."
    folder.write("de.txt", german)
    folder.write("code.txt", "x = {}\nfor i in range(3):\n    x[i] = y(i) ** 2 - z[i]\nprint(x, y, z)\n")
    folder.write("en.txt", "Switch the pump off and take its plug out of the wall before the cover is opened.")
    assert [row["source"] for row in folder.ingest("--language", "en,fr")] == ["code.txt", "en.txt"]
    assert folder.report["dropped"] == {"language": 1}
    (example,) = folder.report["examples"]["dropped"]
    assert "looks like de" in example["detail"]
    assert (example["source"], example["text"]) == ("de.txt", german)


def test_tokens_are_those_of_the_tokenizer_that_is_named(folder, monkeypatch):
    for number in range(3):
        folder.write(f"{number}.txt", prose(number))

    def load_tokenizer(model: Any) -> Any:
        assert model.name == "some/model"
        return lambda texts, **_: {"input_ids": [text.split() for text in texts]}

    monkeypatch.setattr("sftplay.model.tokenizer.load_tokenizer", load_tokenizer)
    rows = folder.ingest("--tokenizer", "some/model")
    assert folder.report["tokens"] == sum(len(row["text"].split()) for row in rows) == 600
    assert "Tokens by some/model" in folder.out.with_suffix(".report.html").read_text()


@pytest.mark.contract
def test_lines_of_many_documents_go_and_are_named(folder):
    for number in range(6):
        folder.write(f"{number}.txt", f"{prose(number)}\n\nAll rights reserved by the maker.\n\n{prose(number + 50)}")
    rows = folder.ingest()
    assert not any("rights reserved" in row["text"] for row in rows)
    assert folder.report["boilerplate"] == {"All rights reserved by the maker.": 6}
    folder.ingest("--replace", "--without", "encoding,boilerplate")
    assert all("rights reserved" in row["text"] for row in folder.rows)


@pytest.mark.contract
def test_rows_of_tables_are_taken_as_they_are(folder):
    texts = [f"{prose(number)}  \u00a0 x\r\ny" for number in range(5)]
    lines = "\n".join(json.dumps({"text": text, "id": "a", "metadata": {"url": "b"}}) for text in texts[:2])
    folder.write("a.jsonl", lines)
    folder.write("b.jsonl.gz", gzip.compress(json.dumps({"text": texts[2]}).encode()))
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"id": [1, 2], "text": texts[3:]}), folder.docs / "c.parquet")
    rows = folder.ingest()
    assert [row["text"] for row in rows] == texts
    assert [row["row"] for row in rows] == [1, 2, 1, 1, 2]


@pytest.mark.contract
def test_the_page_shows_names_and_texts_as_text_only(folder):
    folder.write("<script>alert(1)<|script>.txt", f"<img src=x onerror=alert(2)> {prose(1)}")
    folder.ingest()
    page = folder.out.with_suffix(".report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(2)&gt;" in page
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page)


def test_nothing_kept_is_an_error_and_leaves_no_rows(folder, capsys):
    folder.write("a.txt", "")
    assert folder.ingest(code=4) == []
    assert "no document was kept" in capsys.readouterr().err
    assert not folder.out.exists()
    assert folder.report["unreadable"] == {"empty": 1}


def test_an_ending_with_a_colon_is_no_language(folder, monkeypatch):
    warmed, real = [], ingest.ChildPool
    monkeypatch.setattr(
        ingest, "ChildPool", lambda *given, **named: (warmed.extend(named["warmed"]), real(*given, **named))[1]
    )
    path = folder.write("notes v1.2 at 10:30", prose(1))
    assert main(["ingest", "--in", str(path), "--out", str(folder.out), *PLAIN]) == 4
    assert warmed == ["sftplay.data.ingest.reading"]


def test_a_full_disk_is_no_fault_of_the_files(folder, capsys, monkeypatch):
    folder.write("a.txt", prose(1))

    def run(pool: Any, tasks: Any) -> Any:
        yield from (ChildEnd(task, NO_ROOM_CODE, "", 0.1, 0) for task in tasks)

    with monkeypatch.context() as patch:
        patch.setattr("sftplay.data.ingest.children.ChildPool.run", run)
        folder.ingest(code=5)
    assert "the disk is full" in capsys.readouterr().err
    assert len(folder.ingest()) == 1


@pytest.mark.contract
def test_a_bad_file_ends_the_command_with_4_where_that_is_asked_for(folder, capsys):
    folder.write("a.txt", prose(1))
    folder.write("b.txt", "")
    assert len(folder.ingest("--on-bad-file", "error", code=4)) == 1
    assert "'b.txt': empty" in capsys.readouterr().err


@pytest.mark.contract
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--without", "dupplicates"], "duplicates"),
        (["--near", "2"], "share"),
        (["--memory", "much"], "size"),
        (["data.train_path=x"], "no setting of ingest"),
        (["--max-chars", "10"], "below --min-chars"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_read(folder, capsys, flags, said):
    folder.write("a.txt", prose(1))
    assert main(["ingest", "--in", str(folder.docs), "--out", str(folder.out), *flags]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in folder.home.iterdir()) == ["docs"]


@pytest.mark.contract
def test_a_file_that_is_there_is_not_written_over(folder, capsys):
    folder.write("a.txt", prose(1))
    folder.out.write_text("mine\n")
    assert main(["ingest", "--in", str(folder.docs), "--out", str(folder.out), *PLAIN]) == 2
    assert folder.out.read_text() == "mine\n"
    folder.ingest("--replace")
    before = folder.out.stat().st_mtime_ns
    folder.ingest()
    assert "up to date" in capsys.readouterr().out
    assert folder.out.stat().st_mtime_ns == before
    folder.write("b.txt", prose(2))
    folder.ingest(code=2)


@pytest.mark.contract
def test_an_out_inside_the_folder_is_never_its_own_input(folder):
    folder.write("a.txt", prose(1))
    folder.out = folder.docs / "out.jsonl"
    assert len(folder.ingest()) == 1
    assert len(folder.ingest("--replace")) == 1


@pytest.mark.contract
def test_one_process_and_several_give_the_same_bytes(folder):
    for number in range(8):
        folder.write(f"{number}.txt", prose(number % 5, n_words=100 + number))
    folder.ingest("--workers", "1")
    one = folder.out.read_bytes()
    folder.ingest("--workers", "4", "--replace")
    assert folder.out.read_bytes() == one


KILLED_AFTER = """
import os, signal, sys
from pathlib import Path
from sftplay import cli, log
real, wanted = log.progress, int(sys.argv.pop(1))
def progress(done, *facts, **named):
    real(done, *facts, **named)
    if done == wanted:
        print("started", *Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
log.progress = progress
sys.exit(cli.main(sys.argv[1:]))
"""
"""The kit's command, which names its own processes and is killed when so many files are read."""


@pytest.mark.contract
def test_a_killed_command_goes_on_and_gives_the_same_bytes(folder):
    for number in range(12):
        folder.write(f"{number:02}.txt", prose(number))
    folder.ingest()
    whole = folder.out.read_bytes()
    folder.out.unlink()
    argv = ["ingest", f"--in={folder.docs}", f"--out={folder.out}", "--workers=1", *PLAIN]
    for wanted in ("2", "6"):
        killed = subprocess.run([sys.executable, "-c", KILLED_AFTER, wanted, *argv], cwd=ROOT, timeout=HANG_S)
        assert killed.returncode == -signal.SIGKILL
        assert not folder.out.exists()
    done = subprocess.run(
        [sys.executable, "-m", "sftplay", *argv], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    found = re.findall(r"(\d+) of 12 files were read before", done.stdout)
    assert [int(number) >= 6 for number in found] == [True]  # a killed command's child may have finished one more
    assert folder.out.read_bytes() == whole
    assert not folder.out.with_name(f".{folder.out.name}.ingest").exists()


def test_what_was_finished_before_a_kill_is_not_done_again(folder, monkeypatch):
    for number in range(3):
        folder.write(f"{number}.txt", prose(number))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sftplay.data.ingest.ingest.compare", killed)
        folder.ingest(code=130)
    work = folder.out.with_name(f".{folder.out.name}.ingest")
    answers = {path.name: path.stat().st_mtime_ns for path in work.glob("*.json")}
    assert len(answers) == 4  # three files and a chunk
    with monkeypatch.context() as patch:
        patch.setattr("sftplay.data.ingest.ingest._write", killed)
        folder.ingest(code=130)
    assert {path.name: path.stat().st_mtime_ns for path in work.glob("*.json")} == answers
    assert not folder.out.exists()
    (folder.docs / "1.txt").write_text(prose(7))
    assert [row["text"] for row in folder.ingest()] == [prose(0), prose(7), prose(2)]


@pytest.mark.contract
def test_a_killed_command_leaves_no_process(folder):
    for number in range(3):
        folder.write(f"{number}.txt", prose(number))
    argv = [sys.executable, "-c", KILLED_AFTER, "1", "ingest", f"--in={folder.docs}", f"--out={folder.out}", *PLAIN]
    killed = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=HANG_S)
    assert killed.returncode == -signal.SIGKILL
    started = [int(pid) for pid in re.findall(r"^started (.+)$", killed.stdout, re.M)[0].split()]
    assert started
    wait_until(lambda: not any(map(is_alive, started)))


GERMAN = (
    "Die Pumpe fördert Öl aus dem Behälter. Vor dem Öffnen der Tür muss der Schlüssel gezogen und die Welle geprüft "
    "werden; müde Lager hört man früh. Größere Mängel gehören in das Buch über die jährliche Prüfung. "
)


@pytest.mark.parametrize(
    ("name", "text", "encoding"),
    [
        ("a.txt", GERMAN * 12, "latin-1"),  # 2.7 KB
        ("short.txt", "Größe: 3 m, Länge: 4 m, Höhe für Türen und Mühlen, alles nach Prüfung der Brücke.", "cp1252"),
        ("a.md", f"# Prüfung\n\n{GERMAN}", "latin-1"),
        ("a.rst", f"Prüfung\n=======\n\n{GERMAN}", "latin-1"),
        ("a.html", f"<h1>Prüfung</h1><p>{GERMAN}</p>", "cp1252"),
    ],
)
def test_a_text_that_is_not_utf8_is_read_in_the_likeliest_encoding_which_is_said_and_counted(
    folder, name, text, encoding
):
    if name.endswith(".rst"):
        pytest.importorskip("docutils")
    folder.write(name, text.encode(encoding))
    (row,) = folder.ingest()
    assert "Größ" in row["text"]
    assert "Ã" not in row["text"]
    assert "\ufffd" not in row["text"]
    assert folder.report["guessed_encodings"] == {"cp1252": 1}
    assert folder.status(name)["notes"] == ["not UTF-8 and names no encoding: read as cp1252, the likeliest"]


def test_what_a_reader_died_of_is_kept_with_its_traceback_and_said(folder, monkeypatch, capsys):
    folder.write("good.md", f"# Pumps\n\n{prose(1)}\n")
    folder.write("bad.docx", b"PK\x03\x04")
    path = folder.docs / "bad.docx"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<w:document xmlns:w='x'><w:body/></w:document>")
    broken = folder.home / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sftplay.data.ingest.extract.office as office\n"
        "def of_a_bug(path, encoding):\n"
        "    return {}['a bug of the kit']\n"
        "office.read_word = of_a_bug\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{broken}:{ROOT}")
    folder.ingest()
    log_file = folder.out.with_suffix(".errors.log")
    kept = log_file.read_text()
    assert kept.startswith("bad.docx\nTraceback (most recent call last):\n")
    assert "in of_a_bug\n" in kept
    assert "KeyError: 'a bug of the kit'" in kept
    assert folder.report["tracebacks"] == str(log_file)
    assert f"tracebacks  of readers that failed: {log_file}" in capsys.readouterr().out
    assert folder.status("bad.docx")["reason"] == "broken"
    path.unlink()
    folder.ingest("--replace")
    assert folder.report["tracebacks"] is None
    assert not log_file.exists()
