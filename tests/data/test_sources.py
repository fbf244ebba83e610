"""Which rows come out of which bytes, at which line; and that nothing but a DataError ever does instead."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.data import files, json_document
from sftplay.data.files import list_files, other_files
from sftplay.data.layouts import to_record
from sftplay.data.read import Dialect, is_hub_name, read_raw, read_rows
from sftplay.data.records import Refused
from sftplay.errors import DataError
from tests.data.awkward import AWKWARD, ROWS, STORED, THREE, Awkward, broken_rule, row

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")


def read(path: Path | str, **dialect: str) -> list[tuple[int, Any]]:
    """Line and row, or line and reason."""
    rows = read_rows(str(path), Dialect(**dialect))
    return [(source.line, row.reason if isinstance(row, Refused) else row) for source, row in rows]


def fates(path: Path, dialect: Dialect) -> tuple[int, list[str]]:
    """How many rows become records, and why the others do not."""
    reasons, good = [], 0
    for source, found in read_rows(str(path), dialect):
        if isinstance(found, Refused):
            reasons.append(found.reason)
            continue
        try:
            assert not broken_rule(to_record(found, source))
            good += 1
        except DataError as error:
            reasons.append(error.what)
    return good, reasons


@pytest.mark.parametrize("file", AWKWARD, ids=lambda file: file.name)
def test_awkward_file_gives_the_rows_counted_by_hand_or_one_readable_error(tmp_path: Path, file: Awkward):
    path = tmp_path / file.name
    path.write_bytes(file.content)
    dialect = Dialect(file.encoding, file.delimiter)
    if file.error:
        with pytest.raises(DataError) as refusal:
            fates(path, dialect)
        assert file.error in str(refusal.value)
        assert refusal.value.fix
        assert refusal.value.where
        return
    good, reasons = fates(path, dialect)
    assert (good, len(reasons)) == (file.good, file.refused), reasons
    assert all(re.search(file.reason, reason) for reason in reasons), reasons


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", f"\n\n{THREE}".encode(), [3, 4, 5]),
        ("crlf.jsonl", THREE.replace("\n", "\r\n\r\n").encode(), [1, 3, 5]),
        ("wide.jsonl", f"\n\n{THREE}".encode("utf-16"), [3, 4, 5]),
        ("a.json", json.dumps(ROWS, indent=1).encode(), [2, 6, 10]),
        ("a.json.gz", gzip.compress(THREE.encode()), [1, 2, 3]),
    ],
)
def test_rows_are_placed_at_their_line_in_every_encoding(
    tmp_path: Path, name: str, content: bytes, expected: list[int]
):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == list(zip(expected, ROWS, strict=True))


@pytest.mark.parametrize("head", ["", '{"version": 1,\n "rows": '])
def test_a_row_of_an_array_is_placed_by_its_record_and_its_line(tmp_path: Path, head: str):
    rows = [{"text": "x" * 3000, "n": n} for n in range(200)]
    (tmp_path / "a.json").write_text(head + json.dumps(rows, indent=1) + ("}" if head else ""))
    first = 2 + bool(head)
    places = [str(source) for source, _ in read_rows(str(tmp_path / "a.json"))]
    assert places == [f"{tmp_path}/a.json:{first + 4 * n} (record {n + 1})" for n in range(200)]


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_an_object_of_several_lists_of_rows_is_refused_with_a_command_that_splits_it(tmp_path: Path, suffix: str):
    path, lists = tmp_path / f"it's.{suffix}", {"version": 1, "train": ROWS, "test": ROWS[:1]}
    content = json.dumps(lists).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError, match="one object with several lists of rows: 'train', 'test'") as caught:
        read(path)
    assert (caught.value.where, "data.train_path" in caught.value.fix) == (f"{path}:1", True)
    subprocess.run(caught.value.fix.partition(": ")[2], shell=True, check=True, cwd=tmp_path)
    assert [json.loads(Path(f"{path}.{name}.json").read_text()) for name in ("train", "test")] == [ROWS, ROWS[:1]]


def test_an_object_with_several_lists_that_hold_no_rows_is_a_row(tmp_path: Path):
    chat = {"id": 1, "talk": [{"role": "user", "content": "a"}], "abilities": [{"name": "f"}]}
    (tmp_path / "a.json").write_text(json.dumps(chat))
    assert read(tmp_path / "a.json") == [(1, chat)]


def test_csv_rows_are_placed_at_their_first_line(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b'\r\nprompt,completion\r\na,"1\r\n2"\r\n\r\nb,"c\r\nd,e\r\nf,g,h\r\ni,j\r\n')
    found = read(tmp_path / "a.csv")
    assert [line for line, _ in found] == [3, 6, 7, 8, 9]
    assert found[0][1] == {"prompt": "a", "completion": "1\r\n2"}
    assert "is not CSV" in found[1][1]
    assert found[2][1] == {"prompt": "d", "completion": "e"}
    assert "3 columns where the header has 2" in found[3][1]
    assert found[4][1] == {"prompt": "i", "completion": "j"}


def test_header_of_a_known_layout_says_the_delimiter_even_where_another_gives_more_columns(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question;answer;a,b,c,d\nWhy?;So, so;x\n")
    assert read(tmp_path / "a.csv") == [(2, {"question": "Why?", "answer": "So, so", "a,b,c,d": "x"})]
    (tmp_path / "b.csv").write_text("frage;antwort\nWhy?;So, so\n")
    assert read(tmp_path / "b.csv") == [(2, {"frage": "Why?", "antwort": "So, so"})]
    assert read(tmp_path / "b.csv", delimiter=",")[0][1] == "has 2 columns where the header has 1"


def test_row_longer_than_the_limit_is_refused_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (files, json_document):
        monkeypatch.setattr(module, "LONGEST", 1000)
    content = json.dumps(row(1, "x" * 5000)) + "\n" + THREE
    for name in ("utf-8", "utf-16"):
        (tmp_path / "a.jsonl").write_bytes(content.encode(name))
        assert read(tmp_path / "a.jsonl") == [(1, "is longer than 1,000 characters"), *enumerate(ROWS, 2)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str):
    # 12 MB of rows are read with less than 4 MB held at any time; long rows, as tracemalloc counts every object.
    texts = [row(n, " salt" * 1000) for n in range(1_100)]
    content = "".join(json.dumps(row) + "\n" for row in texts)
    if name == "a.json":
        content = json.dumps(texts)
    elif name == "a.csv":
        content = "prompt,completion\n" + "".join(f'"{row["prompt"]}","{row["completion"]}"\n' for row in texts)
    data = content.encode()
    assert len(data) > 10 << 20
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    del content, data, texts
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_raw(str(tmp_path / name))) == 1_100
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_folder_is_read_whole_in_the_order_of_names_but_for_hidden_and_foreign_files(tmp_path: Path):
    for name in ("b.jsonl", "a/2.csv.gz", "a/1.tsv", ".hidden.jsonl", ".git/x.jsonl", "README.md", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"text\nx\n") if name.endswith("gz") else b"text\ny\n")
    assert [str(file.relative_to(tmp_path)) for file in list_files(str(tmp_path))] == [
        "a/1.tsv",
        "a/2.csv.gz",
        "b.jsonl",
    ]
    assert other_files(str(tmp_path)) == ["README.md", "a/notes.txt"]
    (tmp_path / "b.jsonl").write_text(THREE)
    found = [(os.path.relpath(source.path, tmp_path), source.line) for source, _ in read_rows(str(tmp_path))]
    assert found == [("a/1.tsv", 2), ("a/2.csv.gz", 2), ("b.jsonl", 1), ("b.jsonl", 2), ("b.jsonl", 3)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a folder without a file of rows"):
        list_files(str(tmp_path / "empty"))


def test_missing_local_file_is_never_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/x.jsonl", "org/x.parquet", "org/x.csv.gz", "data/x", "x.jsonl", "a/b/c"):
        assert not is_hub_name(path)
        with pytest.raises(DataError, match="no such file"):
            list(read_rows(path))
    assert is_hub_name("tatsu-lab/alpaca")


def test_null_fields_that_parquet_adds_to_calls_are_taken_out_again(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {"b": 2}}]
    table = pa.Table.from_pylist([{"calls": [call], "note": None} for call in calls])
    pq.write_table(table, tmp_path / "a.parquet")
    assert table.to_pylist()[0]["calls"][0]["arguments"] == {"a": 1, "b": None}  # the nulls are there
    assert [found for _, found in read(tmp_path / "a.parquet")] == [{"calls": [call], "note": None} for call in calls]


MUTATIONS = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3)), max_size=4)
SEEDS = [file.content for file in AWKWARD if len(file.content) < 2000]


def survives(path: Path) -> None:
    """Reads the file to its end; only a DataError may end it earlier."""
    rows = read_rows(str(path))
    while True:
        with suppress(DataError):
            source, found = next(rows, (None, None))
            if found is None:
                return
            assert found.reason if isinstance(found, Refused) else not broken_rule(to_record(found, source))


@given(st.sampled_from(SUFFIXES), st.sampled_from(SEEDS), MUTATIONS)
def test_any_change_to_a_file_gives_rows_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes, changes: list[tuple[int, bytes, int]]
):
    for place, new, n_removed in changes:
        content = content[:place] + new + content[place + n_removed :]
    path = tmp_path_factory.getbasetemp() / f"changed{suffix}"
    path.write_bytes(gzip.compress(content, 1) if suffix.endswith(".gz") and len(changes) % 2 else content)
    survives(path)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_to_a_parquet_file_gives_rows_or_a_data_error(tmp_path: Path, seed: int):
    generator = random.Random(seed)
    for _ in range(100):
        damaged = bytearray(STORED)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(4, len(damaged) - 4)] = generator.randrange(256)
        (tmp_path / "a.parquet").write_bytes(damaged)
        survives(tmp_path / "a.parquet")


@pytest.mark.parametrize("path", ["x.jsonl", "a/b/c", "x\0.jsonl", "x" * 5000, "", "x" * 300 + "/y"])
def test_what_no_file_can_be_is_no_file(path: str):
    with pytest.raises(DataError):
        list(read_rows(path))


def test_array_with_a_string_that_never_ends_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_document, "LONGEST", 100_000)
    (tmp_path / "a.json").write_bytes(b'[{"text": "' + b"x\\n" * 2_000_000)
    with pytest.raises(DataError, match="more than 100,000 characters"):
        read(tmp_path / "a.json")
