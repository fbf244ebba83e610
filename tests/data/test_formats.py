"""Which rows become chats, and what is said about those that do not."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.data.formats import to_chat
from sftplay.data.records import Chat, Refused, Source
from sftplay.data.sources import content_digest, is_hub_name, read_rows
from sftplay.errors import DataError

HERE = Source("rows.jsonl", 7)
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}


def turns(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER]}, [("user", "Why?"), ("assistant", "Because.")]),
        (
            {"id": 3, "messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER, ANSWER]},
            [("system", "Be brief."), *[("user", "Why?"), ("assistant", "Because.")] * 2],
        ),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2"), ("assistant", "3")]),
        ({"instruction": "Add.", "input": "", "output": "3"}, [("user", "Add."), ("assistant", "3")]),
        ({"instruction": "Add.", "output": "3"}, [("user", "Add."), ("assistant", "3")]),
        ({"instruction": "Add.", "input": None, "response": "3"}, [("user", "Add."), ("assistant", "3")]),
        ({"prompt": "Add.", "completion": " 3"}, [("user", "Add."), ("assistant", " 3")]),
        ({"prompt": [USER], "completion": [ANSWER]}, [("user", "Why?"), ("assistant", "Because.")]),
        ({"messages": json.dumps([USER, ANSWER])}, [("user", "Why?"), ("assistant", "Because.")]),
    ],
)
def test_layouts_are_found_by_their_keys(row: dict[str, Any], expected: list[tuple[str, str]]):
    assert turns(to_chat(row, HERE)) == expected


def test_only_the_completion_is_learned_when_the_prompt_holds_answers_too():
    chat = to_chat({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, HERE)
    assert chat.learned_turns() == [3]
    assert turns(to_chat({"messages": [USER, ANSWER, USER, ANSWER]}, HERE))[1] == ("assistant", "Because.")
    assert to_chat({"messages": [USER, ANSWER, USER, ANSWER]}, HERE).learned_turns() == [1, 3]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no known layout has the keys (none)"),
        ({"question": "Why?", "answer": "So."}, "no known layout has the keys 'question', 'answer'"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": "not json"}, "a text that is not JSON"),
        ({"messages": {"role": "user"}}, "'messages' is an object, not a list"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [ANSWER]}, "from 'assistant' where 'user' is due"),
        ({"messages": [USER, ANSWER, USER]}, "ends with a user turn"),
        ({"messages": [USER, USER, ANSWER]}, "message 2 is from 'user' where 'assistant' is due"),
        ({"messages": [USER, ANSWER, {"role": "system", "content": "x"}, ANSWER]}, "only the first may be one"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "message 2, from 'assistant', is empty"),
        ({"messages": [{"role": "human", "content": "Why?"}, ANSWER]}, "role 'human'; did you mean 'user'?"),
        ({"messages": [{"role": "asistant", "content": "Why?"}]}, "did you mean 'assistant'?"),
        ({"messages": [{"from": "human", "value": "Why?"}]}, "messages[0] has no role: its keys are 'from', 'value'"),
        ({"messages": ["Why?", ANSWER]}, "messages[0] is a text, not an object"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "messages[0].content is null"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]}, "content is a list, not a text"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"id": 1}]}]}, "'tool_calls', which is not rendered yet"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "weight 0"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "'tools', which are not rendered yet"),
        ({"messages": [{"role": "user", "content": "a \ud800"}, ANSWER]}, "character 3 that is not valid Unicode"),
        ({"instruction": "Add.", "output": 3}, "output is a number"),
        ({"instruction": "Add.", "output": None}, "output is null"),
        ({"instruction": "", "output": "3"}, "message 1, from 'user', is empty"),
        ({"instruction": "Add.", "output": "3", "history": [["a", "b"]]}, "'history'"),
        ({"prompt": [USER], "completion": [USER]}, "no assistant turn"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "ends with a user turn"),
    ],
)
def test_refused_row_says_where_what_and_how_to_go_on(row: dict[str, Any], reason: str):
    with pytest.raises(DataError) as refusal:
        to_chat(row, HERE)
    assert str(refusal.value).startswith("rows.jsonl:7: ")
    assert reason in refusal.value.what
    assert "data.on_bad_row: skip" in refusal.value.fix


def test_named_layout_is_used_even_where_the_keys_would_say_another():
    row = {"messages": [USER, ANSWER], "prompt": "Add.", "completion": "3"}
    assert turns(to_chat(row, HERE, "prompt_completion"))[0] == ("user", "Add.")
    with pytest.raises(DataError, match="has no key 'instruction'"):
        to_chat(row, HERE, "alpaca")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "x", "weight"]), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["messages", "prompt", "completion", "instruction", "input", "output", "response", "system", "x"]
)


@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_any_json_object_is_a_chat_or_a_refusal(row: dict[str, Any]):
    try:
        chat = to_chat(row, HERE)
    except DataError:
        return
    assert chat.messages[-1].role == "assistant"
    assert chat.learned_turns()


def read(path: Path) -> list[tuple[int, Any]]:
    return [(source.line, row.reason if isinstance(row, Refused) else row) for source, row in read_rows(str(path))]


ROWS = [{"prompt": f"p{n}", "completion": f"c {n} \u2028 é 🙂"} for n in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", LINES, [1, 2, 3]),
        ("bom.jsonl", "\ufeff" + LINES, [1, 2, 3]),
        ("crlf.jsonl", LINES.replace("\n", "\r\n"), [1, 2, 3]),
        ("blank.jsonl", "\n\n" + LINES.replace("\n", "\n \n") + "\n", [3, 5, 7]),
        ("misnamed.json", LINES, [1, 2, 3]),
        ("a.json", json.dumps(ROWS, indent=1), [1, 2, 3]),
        ("bom.json", "\ufeff" + json.dumps(ROWS), [1, 2, 3]),
        ("misnamed.jsonl", json.dumps(ROWS, indent=1), [1, 2, 3]),
        ("one_line.jsonl", json.dumps(ROWS), [1, 2, 3]),
        ("object.json", json.dumps({"version": 1, "data": ROWS}), [1, 2, 3]),
    ],
)
def test_same_rows_are_read_however_the_json_is_written(tmp_path: Path, name: str, content: str, lines: list[int]):
    (tmp_path / name).write_bytes(content.encode("utf-8"))
    assert read(tmp_path / name) == list(zip(lines, ROWS, strict=True))


def test_csv_and_parquet_give_the_same_rows(tmp_path: Path):
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows([*ROWS, {"prompt": 'two\nlines, "quoted"', "completion": "x" * 200_000}])
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert [row for _, row in read(tmp_path / "a.csv")[:3]] == ROWS
    assert read(tmp_path / "a.csv")[3] == (5, {"prompt": 'two\nlines, "quoted"', "completion": "x" * 200_000})
    assert read(tmp_path / "a.parquet") == list(zip([1, 2, 3], ROWS, strict=True))


def test_one_broken_line_costs_one_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": \n{"a": "\xff"}\n[1]\n7\n' + b"[" * 100_000 + b'\n{"a": 2}\n')
    found = read(tmp_path / "a.jsonl")
    assert [line for line, _ in found] == [1, 2, 3, 4, 5, 6, 7]
    assert (found[0][1], found[-1][1]) == ({"a": 1}, {"a": 2})
    for (_, reason), words in zip(found[1:6], ["not JSON", "not UTF-8", "a list", "a number", "not JSON"], strict=True):
        assert words in reason


def test_ragged_csv_row_is_refused_alone(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(b"prompt,completion\na,b\na,b,c\na\n\xff,d\n")
    found = read(tmp_path / "a.csv")
    assert "has 3 columns where the header has 2" in found[1][1]
    assert "has 1 columns" in found[2][1]
    with pytest.raises(DataError, match="not valid Unicode"):
        to_chat(found[3][1], HERE)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'[{"a": 1}, {"a": ]', "a.json:1: is not JSON"),
        ("b.json", b'[{"a": 1}\n {"a": 2}]', "b.json:2: row 1 is followed by neither"),
        ("c.json", b'[{"a": 1}] x', "text after the end"),
        ("d.json", b'[{"a": "\xff"}]', "not UTF-8"),
        ("e.jsonl", '{"a": 1}\n'.encode("utf-16"), "is UTF-16"),
        ("f.parquet", b"PAR1 not really", "not a parquet file"),
        ("g.txt", b"words", "unknown kind of file '.txt'"),
    ],
)
def test_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, name: str, content: bytes, reason: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refusal:
        list(read_rows(str(tmp_path / name)))
    assert reason in str(refusal.value)


@given(st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet"]), st.binary(max_size=80))
def test_any_bytes_are_rows_or_a_data_error(tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    with suppress(DataError):
        assert all(isinstance(row, dict | Refused) for _, row in read_rows(str(path)))


def test_missing_local_file_is_never_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/x.jsonl", "org/x.parquet", "data/x", "x.jsonl", "a/b/c"):
        assert not is_hub_name(path)
        with pytest.raises(DataError, match="no such file"):
            list(read_rows(path))
    assert is_hub_name("tatsu-lab/alpaca")


def test_folder_is_refused_as_a_folder(tmp_path: Path):
    with pytest.raises(DataError, match="is a folder"):
        list(read_rows(str(tmp_path)))


def test_digest_follows_the_bytes_and_not_the_time_stamp(tmp_path: Path):
    import os

    path = tmp_path / "a.jsonl"
    path.write_text("1234")
    before, stamp = content_digest(str(path)), path.stat().st_mtime_ns
    os.utime(path, ns=(0, 0))
    assert content_digest(str(path)) == before
    path.write_text("1235")
    os.utime(path, ns=(stamp, stamp))
    assert content_digest(str(path)) != before
