"""Files as they are found: broken, misnamed, oddly encoded. Each with what must come out of it, counted by hand."""

from __future__ import annotations

import gzip
import io
import json
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sftplay.data.records import Record, Text, chat_from_json


@dataclass(frozen=True)
class Awkward:
    """A file's name and bytes, and either how many rows are records and how many refused, or words of its error."""

    name: str
    content: bytes
    good: int = 0
    refused: int = 0
    error: str = ""
    reason: str = ""
    """Words in the reason of every refused row."""

    encoding: str = "auto"
    delimiter: str = "auto"


def row(number: int, more: str = "") -> dict[str, Any]:
    return {"prompt": f"Which hill is number {number}?{more}", "completion": f"The quiet one, {number}.{more}"}


def lines(*rows: Any, end: str = "\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def column(values: list[bytes]) -> pa.Array:
    """A column of texts made of any bytes: what other writers leave behind."""
    ends = pa.array([sum(map(len, values[:k])) for k in range(len(values) + 1)], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(values), [None, ends, pa.py_buffer(b"".join(values))])


def broken_rule(record: Record) -> str:
    """Which rule of its kind a record breaks; empty when none. One regular expression checks the order of turns."""
    if isinstance(record, Text):
        return "" if record.text.strip() else "silent"
    turns = record.messages
    letters = "".join("c" if turn.calls else turn.role[0] for turn in turns)
    if not re.fullmatch("s?(u(ct+)*a)*u(ct+)*[ac]", letters):
        return f"order {letters}"
    if not all(turn.content.strip() or turn.calls for turn in turns):
        return "silent"
    calls = [call for turn in turns for call in turn.calls]
    if not all(call.id and call.name and isinstance(json.loads(call.arguments), dict) for call in calls):
        return "a call without id, name or arguments"
    if not all(turn.call_id and turn.name for turn in turns if turn.role == "tool"):
        return "a result of no call"
    if not record.learned_turns():
        return "nothing to learn"
    return "" if chat_from_json(json.loads(json.dumps(record.as_json()))) == record else "is another as json"


ROWS = [row(n) for n in range(3)]
THREE = lines(*ROWS)
CJK = lines(*[row(n, " 一二三，一山一水。" * 20) for n in range(3)])
UMLAUTS = lines(row(0), row(1, " Große Tür, schöne Grüße"), row(2))
UMLAUT_FIRST = "Übung,prompt,completion\n" + "".join(f"{n},Which {n}?,The old one\n" for n in range(3))
TABLE = "prompt,completion\n" + "".join(f"Which {n}?,The old one\n" for n in range(3))
ASKED = {"role": "user", "content": "Which?"}
SAID = {"role": "assistant", "content": "That."}
SALTED = lines(row(0), row(1), row(2)).replace("number 1", "number \0 1")
PACKED = gzip.compress(THREE.encode() * 50, mtime=0)
COLUMNS = {"prompt": [b"Which?", b"Why?"], "completion": [b"That.", b"So."]}
STORED = parquet(pa.table({name: column(values) for name, values in COLUMNS.items()}))

LINES = [
    Awkward("plain.jsonl", THREE.encode(), 3),
    Awkward("other_suffix.NDJSON", THREE.encode(), 3),
    Awkward("crlf.jsonl", THREE.replace("\n", "\r\n").encode(), 3),
    Awkward("old_mac.jsonl", THREE.replace("\n", "\r").encode(), 0, 1, reason="Extra data"),
    Awkward("no_last_line_feed.jsonl", THREE.rstrip().encode(), 3),
    Awkward("blank_lines.jsonl", f"\n \t\n{THREE}\n\n{THREE}\r\n".encode(), 6),
    Awkward("only_blank.jsonl", b"\n\n  \n\t\r\n"),
    Awkward("empty.jsonl", b""),
    Awkward("only_a_mark.jsonl", b"\xef\xbb\xbf\n"),
    Awkward("cut_off.jsonl", THREE.encode()[:-30], 2, 1, reason="not JSON"),
    Awkward("not_objects.jsonl", b'1\nnull\n"text"\n[]\n[{}]\ntrue\n' + THREE.encode(), 3, 6, reason="not an object"),
    Awkward("python.jsonl", b"{'prompt': 'a', 'completion': 'b'}\n" + THREE.encode(), 3, 1, reason="not JSON"),
    Awkward("line_separators.jsonl", lines(row(0, " a\u2028b\u2029c\x85d\x0be"), row(1)).encode(), 2),
    Awkward("nul_escaped.jsonl", lines(row(0, "a\0b")).encode(), 1),
    Awkward("nul_raw.jsonl", SALTED.encode(), 2, 1, reason="Invalid control character"),
    Awkward("nul_padding.jsonl", THREE.encode() + b"\0" * 5000, 3, 1, reason="not JSON"),
    Awkward("emoji.jsonl", (json.dumps(row(0, " 🙂 👩‍🚀")) + "\n" + lines(row(1, " 🙂 👩‍🚀"))).encode(), 2),
    Awkward("half_emoji.jsonl", b'{"prompt": "a \\ud83d b", "completion": "c"}\n', 0, 1, reason="not valid Unicode"),
    Awkward("half_emoji_raw.jsonl", b'{"prompt": "a \xed\xa0\xbd", "completion": "c"}\n', 0, 1, reason="not UTF-8"),
    Awkward("long_row.jsonl", lines(row(0, " salt" * 200_000), row(1)).encode(), 2),
    Awkward(
        "deep.jsonl", b'{"x": ' + b"[" * 100_000 + b"\n" + THREE.encode(), 3, 1, reason="cannot be read|can be read"
    ),
    Awkward(
        "same_key_twice.jsonl", b'{"prompt": "a", "completion": "b", "prompt": "c"}', 0, 1, reason="'prompt' twice"
    ),
    Awkward(
        "same_key_inside.jsonl",
        b'{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}',
        *(0, 1),
        reason="'role' twice",
    ),
    Awkward("ends_early.jsonl", b'{"prompt": "a",\r\n' + THREE.encode(), 3, 1, reason="in double quotes at column 16$"),
    Awkward("unused_numbers.jsonl", lines(row(0) | {"x": float("inf"), "y": float("nan")}, row(1)).encode(), 2),
    Awkward("huge_number.jsonl", b'{"text": "a", "x": ' + b"9" * 5000 + b"}\n", 0, 1, reason="can be read"),
    Awkward("marks_inside.jsonl", (f"\ufeff{THREE}" * 2 + lines(row(7, " \ufeff"))).encode(), 7),
    Awkward("of_parquet.jsonl", STORED, error="is a parquet file by its first bytes"),
    Awkward("of_office.jsonl", b"PK\x03\x04\x14\0\x06\0" + bytes(200), error="zip archive or an office document"),
    Awkward("notes.txt", THREE.encode(), error="unknown kind of file '.txt'"),
    Awkward("no_suffix", THREE.encode(), error="unknown kind of file ''"),
]

ENCODINGS = [
    Awkward("marked_8.jsonl", THREE.encode("utf-8-sig"), 3),
    Awkward("marked_16.jsonl", THREE.encode("utf-16"), 3),
    Awkward("marked_16_be.jsonl", b"\xfe\xff" + CJK.encode("utf-16-be"), 3),
    Awkward("marked_32.jsonl", THREE.encode("utf-32"), 3),
    Awkward("plain_16_le.jsonl", UMLAUTS.encode("utf-16-le"), 3),
    Awkward("plain_16_be.jsonl", THREE.encode("utf-16-be"), 3),
    Awkward("plain_16_chinese.jsonl", CJK.encode("utf-16-le"), 3),
    Awkward("plain_32_be.jsonl", CJK.encode("utf-32-be"), 3),
    Awkward("umlaut_first_16_le.csv", UMLAUT_FIRST.encode("utf-16-le"), 3),
    Awkward("umlaut_first_16_be.csv", UMLAUT_FIRST.encode("utf-16-be"), 3),
    Awkward("cut_16.jsonl", THREE.encode("utf-16")[:-1], 2, 1, reason="not UTF-16"),
    Awkward("half_emoji_16.jsonl", f"{THREE}#\n".encode("utf-16-le").replace(b"#", b"\x3d\xd8"), 3, 1),
    Awkward("western.jsonl", UMLAUTS.encode("cp1252"), 2, 1, reason="set data.encoding: cp1252"),
    Awkward("western_named.jsonl", UMLAUTS.encode("cp1252"), 3, encoding="cp1252"),
    Awkward("japanese.jsonl", lines(row(0, " これはテストです。")).encode("shift_jis"), 0, 1, reason="shift_jis"),
    Awkward("japanese_named.jsonl", lines(row(0, " これはテストです。")).encode("shift_jis"), 1, encoding="shift_jis"),
    Awkward("mainframe_named.jsonl", THREE.encode("cp037"), 3, encoding="cp037"),
    Awkward("wrongly_named.jsonl", UMLAUTS.encode("cp1252"), 2, 1, encoding="utf-8", reason="not UTF-8"),
    Awkward("wrongly_ascii.jsonl", UMLAUTS.encode(), 2, 1, encoding="ascii", reason="not ASCII"),
    Awkward("mark_beats_name.jsonl", UMLAUTS.encode("utf-16"), 3, encoding="cp1252"),
    Awkward("unknown_name.jsonl", THREE.encode(), error="no encoding of text called 'utf-9'", encoding="utf-9"),
    Awkward("no_text_name.jsonl", THREE.encode(), error="no encoding of text called 'base64'", encoding="base64"),
]

DOCUMENTS = [
    Awkward("array.json", json.dumps(ROWS, indent=1).encode(), 3),
    Awkward("array_on_one_line.json", json.dumps(ROWS).encode("utf-8-sig"), 3),
    Awkward("array.jsonl", json.dumps(ROWS, indent=1).encode(), 3),
    Awkward("long_array.json", json.dumps([row(n, " salt" * 3000) for n in range(30)]).encode(), 30),
    Awkward("empty_array.json", b" [\n] "),
    Awkward("empty.json", b""),
    Awkward("lines.json", THREE.encode(), 3),
    Awkward("one_row.json", json.dumps(ROWS[0], indent=2).encode(), 1),
    Awkward("inside.json", json.dumps({"version": 1, "data": ROWS}).encode(), 3),
    Awkward("nothing_inside.json", b"{}", 0, 1, reason="no known layout"),
    Awkward(
        "two_lists.json",
        json.dumps({"train": ROWS, "test": ROWS}).encode(),
        error="two_lists.json:1: is one object with",
    ),
    Awkward("number.json", b"7", 0, 1, reason="not an object"),
    Awkward("mixed.json", b'[7, "a", null, {"text": "Salt and stones."}, 12345]', 1, 4, reason="not an object"),
    Awkward("cut_off.json", json.dumps(ROWS, indent=1).encode()[:-20], error="cut_off.json:12: is not JSON"),
    Awkward("comma_at_the_end.json", b'[{"text": "a"},\n]', error="comma_at_the_end.json:2: is not JSON"),
    Awkward("no_comma.json", b'[{"text": "a"}\n{"text": "b"}]', error="no_comma.json:2: row 1 is followed by neither"),
    Awkward("more.json", json.dumps(ROWS).encode() + b"\nx", error="more.json:2: has text after the end"),
    Awkward("deep.json", b"[" * 100_000, error="can be read"),
    Awkward("western.json", json.dumps([row(0), row(1, " Tür")], ensure_ascii=False).encode("cp1252"), 1, 1),
    Awkward("wide.json", json.dumps(ROWS, indent=1).encode("utf-16"), 3),
    Awkward("twice.json", b'[{"text": "a", "text": "b"}, {"text": "c"}]', 1, 1, reason="'text' twice"),
]

TABLES = [
    Awkward("commas.csv", TABLE.encode(), 3),
    Awkward("semicolons.csv", TABLE.replace(",", ";").encode(), 3),
    Awkward("pipes.csv", TABLE.replace(",", "|").encode("utf-8-sig"), 3),
    Awkward("tabs.tsv", TABLE.replace(",", "\t").encode(), 3),
    Awkward("commas.tsv", TABLE.encode(), 3),
    Awkward("carets.csv", TABLE.replace(",", "^").encode(), 3, delimiter="^"),
    Awkward("no_delimiter.csv", TABLE.encode(), error="cannot be a delimiter", delimiter="||"),
    Awkward("office.csv", TABLE.replace(",", "\t").replace("\n", "\r\n").encode("utf-16"), 3),
    Awkward("comma_in_a_header.csv", b'prompt;"completion, in short";completion\na;b;c\n', 1),
    Awkward("two_lines.csv", f'{TABLE}"one\ntwo ""quoted""",x\n'.encode(), 4),
    Awkward("long_cell.csv", f"{TABLE}a,{'salt ' * 40_000}\n".encode(), 4),
    Awkward(
        "ragged.csv", f"{TABLE}a,b,c\na\n{TABLE.splitlines()[1]}\n".encode(), 4, 2, reason="where the header has 2"
    ),
    Awkward("open_quote.csv", f'{TABLE}a,"b\nc,d\ne,f\n'.encode(), 5, 1, reason="is not CSV"),
    Awkward("quote_inside.csv", f'{TABLE}a,"b" and c\nd,e\n'.encode(), 4, 1, reason="is not CSV"),
    Awkward("nul.csv", f"{TABLE}a\0b,c\n".encode(), 4),
    Awkward("empty_cells.csv", f"{TABLE},\n,x\n".encode(), 3, 2, reason="is empty"),
    Awkward("mark_inside.csv", f"\ufeff{TABLE}\ufeff{TABLE}".encode(), 6, 1, reason="byte order mark"),
    Awkward("western.csv", f"{TABLE}Tür,schön\n".encode("cp1252"), 3, 1, reason="not UTF-8"),
    Awkward("western_header.csv", "prömpt,completion\na,b\n".encode("cp1252"), error="the header holds bytes"),
    Awkward("same_column_twice.csv", b"prompt,completion,prompt\na,b,c\n", error="names 'prompt' twice"),
    Awkward("nameless_columns.csv", b"prompt, completion ,,\na,b,c,d\n", 1),
    Awkward("header_alone.csv", b"prompt,completion\n"),
    Awkward("blank_lines.csv", f"\n\n{TABLE}\n\n".encode(), 3),
    Awkward("empty.csv", b""),
    Awkward("no_header.csv", b"Which?,That.\nWhy?,So.\n", 0, 1, reason="no known layout has the keys"),
    Awkward("json_cells.csv", b'messages\n"' + json.dumps([ASKED, SAID]).replace('"', '""').encode() + b'"\n', 1),
]

PARQUET = [
    Awkward("two.parquet", STORED, 2),
    Awkward("cut_off.parquet", STORED[:-40], error="not a parquet file that can be read"),
    Awkward("empty.parquet", b"", error="not a parquet file that can be read"),
    Awkward("not_utf8.parquet", STORED.replace(b"Why?", b"Wh\xff?"), 1, 1, reason="cannot be read"),
    Awkward("no_rows.parquet", parquet(pa.table({"text": pa.array([], pa.string())}))),
    Awkward("other_types.parquet", parquet(pa.table({"text": pa.array([1, 2])})), 0, 2, reason="is a number"),
    Awkward(
        "mixed.parquet",
        parquet(
            pa.Table.from_pylist([{"messages": [ASKED | {"weight": None}, SAID], "text": None}, {"text": "Salt."}])
        ),
        2,
    ),
]

ARCHIVES = [
    Awkward("packed.jsonl.gz", PACKED, 150),
    Awkward("packed.csv.gz", gzip.compress(TABLE.encode()), 3),
    Awkward("packed.tsv.gz", gzip.compress(TABLE.replace(",", "\t").encode("utf-16")), 3),
    Awkward("packed.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode()), 3),
    Awkward("packed_twice.jsonl.gz", PACKED + PACKED, 300),
    Awkward("empty.jsonl.gz", b""),
    Awkward("cut_off.jsonl.gz", PACKED[:-20], error="the gzip file is cut off"),
    Awkward("flipped.jsonl.gz", PACKED[:40] + bytes([PACKED[40] ^ 255]) + PACKED[41:], error="flipped.jsonl.gz"),
    Awkward("not_packed.jsonl.gz", THREE.encode(), error="is a damaged gzip file"),
    Awkward("packed_by_stealth.jsonl", PACKED, error="is a gzip file by its first bytes"),
    Awkward("packed.parquet.gz", gzip.compress(STORED), error="unknown kind of file"),
]

CHATS = [
    Awkward(
        "layouts.jsonl",
        lines(
            {"messages": [ASKED, SAID]},
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"instruction": "a", "input": "b", "output": "c"},
            {"system": "a", "user": "b", "assistant": "c"},
            {"question": "a", "answer": "b"},
            {"text": "Salt and seven stones."},
            ROWS[0],
        ).encode(),
        7,
    ),
    Awkward(
        "turns.jsonl",
        lines(
            {"messages": [ASKED, ASKED, SAID]},
            {"messages": [SAID]},
            {"messages": [ASKED]},
            {"messages": [ASKED, SAID | {"content": "  "}]},
            {"messages": [ASKED | {"role": "owner"}, SAID]},
            {"messages": [ASKED, SAID | {"weight": 0}]},
            {"messages": [ASKED | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAID]},
            {"messages": [ASKED | {"content": [{"type": "text", "text": "Which?"}]}, SAID]},
        ).encode(),
        *(1, 7),
    ),
]

AWKWARD = [*LINES, *ENCODINGS, *DOCUMENTS, *TABLES, *PARQUET, *ARCHIVES, *CHATS]
"""Each name stands once, so that all can lie in one folder."""
