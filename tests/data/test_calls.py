"""Function calls, their results and the tools: one form out of the several in which they are written down."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sftplay.data.calls import encode_json
from sftplay.data.layouts import to_record
from sftplay.data.records import Call, Chat, Message, Source, chat_from_json
from sftplay.errors import DataError

HERE = Source("rows.jsonl", 7)
USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
ADD_TEXT = '{"a": 2, "b": 3, "note": "é"}'
ADD_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ADD_TEXT}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [ADD_CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
HUMAN, GPT = {"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}
CALLS = {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 2}})}
SEES = {"from": "observation", "value": "5"}


def chat(row: dict[str, Any]) -> Chat:
    record = to_record(row, HERE)
    assert isinstance(record, Chat)
    assert chat_from_json(json.loads(json.dumps(record.as_json()))) == record
    return record


def reason(row: dict[str, Any]) -> str:
    with pytest.raises(DataError) as refusal:
        to_record(row, HERE)
    return refusal.value.what


@pytest.mark.parametrize(
    "asks",
    [
        ASKS,
        ASKS | {"content": ""},
        {key: ASKS[key] for key in ("role", "tool_calls")},
        ASKS | {"tool_calls": json.dumps([ADD_CALL])},
        ASKS | {"tool_calls": [ADD_CALL | {"function": {"name": "add", "arguments": json.loads(ADD_TEXT)}}]},
        ASKS | {"tool_calls": [{"id": "c1", "name": "add", "arguments": json.loads(ADD_TEXT)}]},
        ASKS | {"tool_calls": [ADD_CALL | {"index": 0}], "function_call": None},
        ASKS | {"tool_calls": [{"id": "c1", "type": None, "function": {"name": "add", "arguments": f" {ADD_TEXT}\n"}}]},
    ],
)
def test_call_is_the_same_however_it_is_written(asks: dict[str, Any]):
    assert chat({"messages": [USER, asks, RESULT, ANSWER]}).messages[1].calls == (Call("add", ADD_TEXT, "c1"),)


def test_missing_ids_are_made_of_nine_letters_and_digits_and_results_take_them_in_order():
    calls = [{"name": name, "arguments": {}} for name in ("one", "two")]
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    asks = {"role": "assistant", "tool_calls": calls}
    taken = {"role": "assistant", "tool_calls": [{"id": "call00002", "name": "three"}]}
    messages = chat({"messages": [USER, asks, *results, taken, results[0], asks, results[0], ANSWER]}).messages
    ids = [call.id for turn in messages for call in turn.calls]
    assert ids == ["call00001", "call00003", "call00002", "call00004", "call00005"]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)
    tools = [(turn.call_id, turn.name) for turn in messages if turn.role == "tool"]
    assert tools == [("call00001", "one"), ("call00003", "two"), ("call00002", "three"), ("call00004", "one")]


def test_function_call_of_openais_history_is_a_call():
    asks = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": ADD_TEXT}}
    result = {"role": "function", "name": "add", "content": "5"}
    row = {"messages": [USER, asks, result, ANSWER], "functions": [ADD]}
    assert chat(row).messages[1:3] == (
        Message("assistant", "", (Call("add", ADD_TEXT, "call00001"),)),
        Message("tool", "5", name="add", call_id="call00001"),
    )
    assert json.loads(chat(row).tools) == [{"type": "function", "function": ADD}]


def test_sharegpt_call_may_be_a_list_with_arguments_as_text_and_several_rounds():
    several = {"from": "function_call", "value": json.dumps([{"name": n, "arguments": '{"x": 1}'} for n in "ab"])}
    messages = chat({"conversations": [HUMAN, several, SEES, SEES, CALLS, SEES, GPT]}).messages
    assert [turn.role for turn in messages] == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert messages[1].calls == (Call("a", '{"x": 1}', "call00001"), Call("b", '{"x": 1}', "call00002"))
    assert [turn.name for turn in messages if turn.role == "tool"] == ["a", "b", "add"]


@pytest.mark.parametrize(
    "tools",
    [
        [ADD],
        json.dumps([ADD]),
        [{"type": "function", "function": ADD}],
        [{"function": ADD}],
        [{"type": "function", **ADD}],
        json.dumps([{"function": ADD, "type": "function"}]),
    ],
)
def test_tools_come_in_openai_form_however_they_are_written(tools: Any):
    for row in ({"messages": [USER, ANSWER]}, {"conversations": [HUMAN, GPT]}, {"prompt": "a", "completion": "b"}):
        assert json.loads(chat(row | {"tools": tools}).tools) == [{"type": "function", "function": ADD}]


def asking(**changes: Any) -> dict[str, Any]:
    """A chat with one changed call."""
    return {"messages": [USER, ASKS | {"tool_calls": [ADD_CALL | changes]}, RESULT, ANSWER]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [USER, ASKS, ANSWER]}, "message 3 is from 'assistant' where 'tool' is due"),
        ({"messages": [USER, ASKS, USER, ANSWER]}, "message 3 is from 'user' where 'tool' is due"),
        ({"messages": [USER, ASKS, RESULT]}, "ends with a tool's result that has no answer"),
        ({"messages": [USER, ASKS, RESULT, USER, ANSWER]}, "message 4 is from 'user' where 'assistant' is due"),
        ({"messages": [USER, RESULT, ANSWER]}, "message 2 is from 'tool', but no call before it waits"),
        ({"messages": [USER, ANSWER, RESULT, ANSWER]}, "message 3 is from 'tool', but no call"),
        ({"messages": [USER, ASKS, RESULT, RESULT, ANSWER]}, "message 4 is from 'tool', but no call before it waits"),
        ({"messages": [USER, ASKS, RESULT | {"tool_call_id": "c9"}, ANSWER]}, "answers the call 'c9'; those that wait"),
        ({"messages": [USER, ASKS, RESULT | {"content": ""}, ANSWER]}, "message 3, from 'tool', is empty"),
        ({"messages": [USER, ASKS, RESULT | {"content": {"sum": 5}}, ANSWER]}, "messages[2].content is an object"),
        ({"messages": [USER | {"tool_calls": [ADD_CALL]}, ANSWER]}, "only the assistant calls functions"),
        ({"messages": [USER, ASKS | {"function_call": {"name": "x"}}]}, "both 'tool_calls' and 'function_call'"),
        ({"messages": [USER, ASKS | {"tool_calls": [ADD_CALL, ADD_CALL]}]}, "message 2 has two calls with one id"),
        ({"messages": [USER, ASKS | {"tool_calls": {"name": "x"}}]}, "tool_calls is an object, not a list"),
        ({"messages": [USER, ASKS | {"tool_calls": ["add"]}]}, "tool_calls[0] is a text, not a call"),
        (asking(type="custom"), "is a call of the type 'custom'"),
        (asking(id=7), "tool_calls[0].id is a number, not a text"),
        (asking(function={"arguments": "{}"}), "names no function: its keys are 'arguments'"),
        (asking(function={"name": " "}), "tool_calls[0].name is empty"),
        (asking(function={"name": "x", "arguments": "{a: 1}"}), "is a text that is not JSON, where an object is due"),
        (asking(function={"name": "x", "arguments": "[1]"}), "arguments is a list, not an object"),
        (asking(function={"name": "x", "arguments": {"a": float("inf")}}), "Out of range float"),
        (asking(function={"name": "x", "arguments": '{"a": 1e999}'}), "Out of range float"),
        (asking(function={"name": "x", "arguments": '{"a": 1, "a": 2}'}), "has the key 'a' twice"),
        (asking(function={"name": "x", "arguments": {"a\ud800": 1}}), "not valid Unicode"),
        (asking(function={"name": "x", "arguments": '{"a": ' + "[" * 150 + "]" * 150 + "}"}), "more than 100 levels"),
        (
            {"conversations": [HUMAN, CALLS | {"value": "add(2)"}, SEES, GPT]},
            "conversations[1].value is a text that is",
        ),
        ({"conversations": [HUMAN, CALLS | {"value": "[]"}, SEES, GPT]}, "has no call in it"),
        ({"conversations": [HUMAN, CALLS | {"value": None}, SEES, GPT]}, "is null, not a call"),
        ({"conversations": [HUMAN, GPT, CALLS, SEES, GPT]}, "message 3 is from 'assistant' where 'user' is due"),
        ({"messages": [USER, ANSWER], "tools": "add"}, "'tools' is a text that is not JSON"),
        ({"messages": [USER, ANSWER], "tools": ["add"]}, "tools[0] is a text, not the description of a function"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "web_search"}]}, "tool of the type 'web_search'"),
        ({"messages": [USER, ANSWER], "tools": [{"description": "x"}]}, "names no function"),
        ({"messages": [USER, ANSWER], "tools": [{"function": "add"}]}, "tools[0].function is a text"),
        ({"messages": [USER, ANSWER], "tools": {"name": "x"}}, "'tools' is an object, not a list"),
    ],
)
def test_calls_that_cannot_be_followed_refuse_the_row(row: dict[str, Any], words: str):
    assert words in reason(row)


def test_a_hundred_levels_can_be_written_and_one_more_cannot():
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert json.loads(encode_json(deep)) == deep
    with pytest.raises(ValueError, match="more than 100 levels"):
        encode_json({"a": deep})


def test_results_may_come_in_another_order_than_their_calls():
    calls = [{"id": name, "name": name} for name in ("one", "two")]
    results = [{"role": "tool", "content": "x", "tool_call_id": name} for name in ("two", "one")]
    messages = chat({"messages": [USER, ASKS | {"tool_calls": calls}, *results, ANSWER]}).messages
    assert [(turn.call_id, turn.name) for turn in messages[2:4]] == [("two", "two"), ("one", "one")]


@pytest.mark.parametrize("value", [None, "", {}, "{}"])
def test_call_without_arguments_has_an_empty_object(value: Any):
    calls = [{"id": "c1", "function": {"name": "now", "arguments": value}}]
    assert chat({"messages": [USER, ASKS | {"tool_calls": calls}]}).messages[1].calls == (Call("now", "{}", "c1"),)
