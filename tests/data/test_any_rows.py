"""Rows of any structure, generated around the keys of each layout: a record that obeys every rule, or a refusal."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from sftplay.config.data import Column
from sftplay.data.layouts import SHAPES, LayoutOptions, to_record
from sftplay.data.prompts import read_prompt
from sftplay.data.records import Source
from sftplay.data.row_outcomes import unused_columns
from sftplay.errors import DataError
from tests.data.awkward import broken_rule

HERE = Source("rows.jsonl", 7)

TEXTS = st.sampled_from(["a", "Why?", "", " ", "{}", "[]", "null", "\ud800", '{"name": "f"}', '[["a", "b"]]'])
ROLES = st.sampled_from(
    ["system", "user", "assistant", "tool", "function", "human", "gpt", "observation", "function_call", "x", None]
)
KEYS = ["role", "content", "from", "value", "text", "type", "name", "id", "arguments", "function", "tool_calls"]
KEYS += ["function_call", "tool_call_id", "weight", "train", "reasoning_content"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.just(float("inf")) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": st.just("{}") | JSON})},
    optional={"id": st.sampled_from(["a", "b", ""]) | JSON, "type": st.just("function")},
)
TURN = st.fixed_dictionaries(
    {"role": ROLES, "content": TEXTS | JSON},
    optional={"tool_calls": st.lists(CALL, max_size=2) | JSON, "tool_call_id": st.sampled_from(["a", "b"]), "x": JSON},
)
OTHER_TURN = st.fixed_dictionaries({"from": ROLES, "value": TEXTS}, optional={"weight": JSON, "name": JSON})
LETTERS = {
    "s": {"role": "system", "content": "S"},
    "u": {"role": "user", "content": "U"},
    "a": {"role": "assistant", "content": "A"},
    "c": {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
    "t": {"role": "tool", "content": "T"},
}
TURNS = (
    st.lists(TURN, max_size=5)
    | st.lists(OTHER_TURN, max_size=5)
    | st.lists(st.sampled_from("suact"), max_size=8).map(lambda word: [LETTERS[letter] for letter in word])
    | JSON
)
SOUND = [
    {"messages": [LETTERS[letter] for letter in "suctctaua"], "tools": [{"name": "f"}], "id": 1},
    {"messages": [LETTERS["u"], LETTERS["a"] | {"content": [{"type": "text", "text": "A"}], "weight": 1}]},
    {"prompt": [LETTERS["u"]], "completion": [LETTERS[letter] for letter in "cta"], "system": "S"},
    {
        "conversations": [
            {"from": "human", "value": "U"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "T"},
            {"from": "gpt", "value": "A"},
        ],
        "system": "S",
        "tools": '[{"name": "f"}]',
    },
    {"instruction": "U", "input": "U", "output": "A", "history": [["U", "A"]]},
    {"question": "U", "answer": "A", "system": None},
    {"user": "U", "assistant": "A", "x": 1},
    {"text": "T"},
]
NAMES = sorted({name for shape in SHAPES.values() for group in (*shape.needs, *shape.may) for name in group})
ROW = st.dictionaries(st.sampled_from([*NAMES, "x"]), TURNS | TEXTS, max_size=6)
READINGS = st.builds(
    LayoutOptions,
    st.just("auto") | st.sampled_from(sorted(SHAPES)),
    st.just(())
    | st.lists(st.tuples(st.sampled_from(get_args(Column)), st.sampled_from([*NAMES, "x"])), max_size=2).map(tuple),
    st.sampled_from([None, "S", ""]),
)


@st.composite
def changed_rows(draw: Any) -> dict[str, Any]:
    """A sound row in which up to three things, at any depth, are replaced, taken out or doubled."""
    row = copy.deepcopy(draw(st.sampled_from(SOUND)))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = row
        keys = list(place)
        while keys:
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or not draw(st.integers(0, 2)):
                break
            place, keys = inner, list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not keys:
            break
        change = draw(st.sampled_from(["replace", "take out", "double"]))
        if change == "replace":
            place[key] = draw(JSON | TEXTS | ROLES)
        elif change == "take out":
            del place[key]
        elif isinstance(place, list):
            place.insert(key, copy.deepcopy(place[key]))
        else:
            place[draw(st.sampled_from([*KEYS, *NAMES]))] = place[key]
    return row


@given(ROW | changed_rows(), st.just(LayoutOptions()) | READINGS)
def test_any_row_is_a_record_that_obeys_the_rules_or_a_refusal(row: dict[str, Any], reading: LayoutOptions):
    unused_columns(row, reading)
    with suppress(DataError):
        assert read_prompt(row, HERE, reading=reading)[0][-1].role in ("user", "tool")
    try:
        record = to_record(row, HERE, reading=reading)
    except DataError as error:
        refusal = error
    else:
        assert not broken_rule(record)
        return
    assert str(refusal).startswith("rows.jsonl:7: ")
    str(refusal).encode("utf-8")


@given(st.lists(st.sampled_from("suact"), max_size=9))
def test_exactly_the_orders_of_the_rules_are_chats(word: list[str]):
    row = {"messages": [LETTERS[letter] for letter in word]}
    # Each call here is one call, so one result belongs to it.
    is_chat = re.fullmatch("s?(u(ct)*a)*u(ct)*[ac]", "".join(word)) is not None
    try:
        to_record(row, HERE)
    except DataError:
        assert not is_chat
    else:
        assert is_chat
