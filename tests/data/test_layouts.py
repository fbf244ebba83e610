"""Which rows become records, and what is said about those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sftplay.data.layouts import LayoutOptions, to_record
from sftplay.data.prompts import read_prompt
from sftplay.data.records import Chat, Source, Text
from sftplay.data.row_outcomes import unused_columns
from sftplay.errors import DataError

HERE = Source("rows.jsonl", 7)
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}
ONE = [("user", "Why?"), ("assistant", "Because.")]
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
ADD_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, "é"]}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def chat(row: dict[str, Any], **reading: Any) -> Chat:
    record = to_record(row, HERE, reading=LayoutOptions(**reading))
    assert isinstance(record, Chat)
    return record


def turns(row: dict[str, Any], **reading: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat(row, **reading).messages]


def reason(row: dict[str, Any], **reading: Any) -> str:
    with pytest.raises(DataError) as refusal:
        to_record(row, HERE, reading=LayoutOptions(**reading))
    assert str(refusal.value).startswith("rows.jsonl:7: ")
    assert refusal.value.fix
    return refusal.value.what


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER]}, ONE),
        (
            {"id": 3, "messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER, ANSWER]},
            [("system", "Be brief."), *ONE * 2],
        ),
        ({"messages": json.dumps([USER, ANSWER])}, ONE),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
                    ANSWER,
                ]
            },
            ONE,
        ),
        ({"messages": [{"role": "user", "content": ["Wh", "y?"]}, ANSWER]}, ONE),
        ({"messages": [USER, ANSWER | {"weight": 1, "train": True, "id": 7, "reasoning_content": None}]}, ONE),
        ({"messages": [USER | {"weight": 0, "train": False}, ANSWER]}, ONE),
        ({"messages": [USER, ANSWER], "prompt": "x", "completion": "y", "text": "z"}, ONE),
        ({"messages": None, "question": "Why?", "answer": "Because.", "text": None}, ONE),
        ({"messages": [USER, ANSWER], "system": "Be brief."}, [("system", "Be brief."), *ONE]),
        ({"conversations": [HUMAN, GPT]}, ONE),
        ({"conversation": [{"role": "Human", "content": "Why?"}, {"role": "bing", "content": "Because."}]}, ONE),
        ({"dialogue": [{"from": "user", "text": "Why?"}, {"from": "chatgpt", "text": "Because."}]}, ONE),
        ({"conversations": [HUMAN, GPT], "system": "Be brief.", "tools": "[]"}, [("system", "Be brief."), *ONE]),
        ({"conversations": [{"from": "system", "value": "S"}, HUMAN, GPT], "system": ""}, [("system", "S"), *ONE]),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n\n1 2"), ("assistant", "3")]),
        ({"instruction": "Add.", "input": "", "output": "3"}, [("user", "Add."), ("assistant", "3")]),
        ({"instruction": "", "input": "1 2", "output": "3"}, [("user", "1 2"), ("assistant", "3")]),
        ({"instruction": "Add.", "output": "3"}, [("user", "Add."), ("assistant", "3")]),
        ({"instruction": "Add.", "input": None, "response": "3"}, [("user", "Add."), ("assistant", "3")]),
        (
            {"instruction": "Why?", "output": "Because.", "history": [["Why?", "Because."]], "system": "S"},
            [("system", "S"), *ONE * 2],
        ),
        ({"instruction": "Why?", "output": "Because.", "history": '[["Why?", "Because."]]'}, ONE * 2),
        ({"instruction": "Why?", "output": "Because.", "history": []}, ONE),
        ({"system": "S", "user": "Why?", "assistant": "Because."}, [("system", "S"), *ONE]),
        ({"user": "Why?", "assistant": "Because."}, ONE),
        ({"prompt": "Add.", "completion": " 3"}, [("user", "Add."), ("assistant", " 3")]),
        ({"prompt": "Add.", "response": "3"}, [("user", "Add."), ("assistant", "3")]),
        ({"prompt": [USER], "completion": [ANSWER]}, ONE),
        ({"question": "Why?", "answer": "Because."}, ONE),
        ({"query": "Why?", "response": "Because."}, ONE),
    ],
)
def test_layouts_are_found_by_their_keys(row: dict[str, Any], expected: list[tuple[str, str]]):
    assert turns(row) == expected


def test_only_the_completion_is_learned_when_the_prompt_holds_answers_too():
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert chat(row).learned_turns() == [3]
    assert chat(row | {"system": "S"}).learned_turns() == [4]
    assert chat(row, system="S").learned_turns() == [4]
    assert chat({"messages": [USER, ANSWER, USER, ANSWER]}, system="S").learned_turns() == [2, 4]


def test_system_prompt_of_the_config_goes_before_chats_that_have_none():
    assert turns({"messages": [USER, ANSWER]}, system="S") == [("system", "S"), *ONE]
    assert turns({"messages": [{"role": "system", "content": "own"}, USER, ANSWER]}, system="S")[0] == ("system", "own")
    assert turns({"conversations": [HUMAN, GPT], "system": "own"}, system="S")[0] == ("system", "own")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "no known layout has the keys (none)"),
        ({"puzzle": "..3", "solution": "483"}, "no known layout has the keys 'puzzle', 'solution'"),
        ({"prompt": "a", "code": "b"}, "no known layout"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": "not json"}, "'messages' is a text that is not JSON"),
        ({"messages": {"role": "user"}}, "'messages' is an object, not a list"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [ANSWER]}, "message 1 is from 'assistant' where 'user' is due"),
        ({"messages": [USER, ANSWER, USER]}, "ends with a user turn"),
        ({"messages": [USER, USER, ANSWER]}, "message 2 is from 'user' where 'assistant' is due"),
        ({"messages": [USER, ANSWER, ANSWER]}, "message 3 is from 'assistant' where 'user' is due"),
        ({"messages": [USER, ANSWER, {"role": "system", "content": "x"}, ANSWER]}, "only the first may be one"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "message 2, from 'assistant', is empty"),
        ({"messages": [{"role": "human", "content": "Why?"}, ANSWER]}, "role 'human'; did you mean 'user'?"),
        ({"messages": [{"role": "developer", "content": "Why?"}, ANSWER]}, "did you mean 'system'?"),
        ({"messages": [{"role": "asistant", "content": "Why?"}]}, "did you mean 'assistant'?"),
        ({"messages": [HUMAN]}, "messages[0] has no role: its keys are 'from', 'value'"),
        ({"messages": ["Why?", ANSWER]}, "messages[0] is a text, not an object"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "messages[0].content is null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "part of the type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}, ANSWER]}, "content[0] is a part"),
        ({"messages": [{"role": "user", "content": []}, ANSWER]}, "message 1, from 'user', is empty"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, "messages[1] has weight 0"),
        ({"messages": [USER, ANSWER | {"train": False}]}, "messages[1] has train False"),
        ({"messages": [USER | {"loss": True}, ANSWER]}, "a turn from 'user' is never learned"),
        ({"messages": [USER, ANSWER | {"masked": True}]}, "messages[1] has masked True"),
        ({"messages": [USER, ANSWER | {"reasoning_content": "Hm."}]}, "'reasoning_content', which is not rendered"),
        ({"messages": [USER, ANSWER | {"thinking": "Hm."}]}, "'thinking', which is not rendered"),
        ({"messages": [{"role": "system", "content": "a"}, USER, ANSWER], "system": "b"}, "another one in its first"),
        ({"messages": [{"role": "user", "content": "a \ud800"}, ANSWER]}, "character 3 that is not valid Unicode"),
        ({"conversations": [HUMAN, {"from": "narrator", "value": "x"}]}, "unknown role 'narrator'"),
        ({"conversations": [GPT, HUMAN]}, "ends with a user turn"),
        ({"dialogue": "A: Why?\nB: So."}, "'dialogue' is a text that is not JSON"),
        ({"instruction": "Add.", "output": 3}, "output is a number"),
        ({"instruction": "Add.", "output": None}, "output is null"),
        ({"instruction": "", "output": "3"}, "message 1, from 'user', is empty"),
        ({"instruction": "Add.", "output": "3", "history": [["a"]]}, "history[0] is not a pair"),
        ({"instruction": "Add.", "output": "3", "history": [["a", None]]}, "history[0][1] is null"),
        ({"prompt": [USER], "completion": [USER]}, "no assistant turn"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "no assistant turn"),
        ({"prompt": [USER], "completion": [ANSWER, USER]}, "ends with a user turn"),
        ({"text": " \n"}, "text is empty"),
        ({"text": 3}, "text is a number"),
    ],
)
def test_refused_row_says_where_what_and_how_to_go_on(row: dict[str, Any], words: str):
    assert words in reason(row)


def test_columns_map_the_files_names_to_ours():
    row = {"puzzle": "..3", "solution": "483", "source": "easy"}
    columns = (("user", "puzzle"), ("assistant", "solution"))
    assert turns(row, columns=columns) == [("user", "..3"), ("assistant", "483")]
    assert unused_columns(row, LayoutOptions(columns=columns)) == ("source",)
    # A mapped column is no longer there under its own name, and a column of our name gives way to a mapped one.
    row = {"text": "Why?", "answer": "Because.", "question": "other"}
    assert turns(row, columns=(("question", "text"),)) == ONE
    assert unused_columns(row, LayoutOptions(columns=(("question", "text"),))) == ("question",)
    assert turns({"system": "Why?", "answer": "Because."}, columns=(("question", "system"),)) == ONE
    # Names may be exchanged.
    row = {"answer": "Why?", "question": "Because."}
    assert turns(row, columns=(("question", "answer"), ("answer", "question"))) == ONE
    # The layout is one that reads all mapped columns.
    row = {"messages": [USER, ANSWER], "prompt": "Why?", "code": "Because."}
    assert turns(row, columns=(("completion", "code"),)) == ONE
    assert unused_columns(row, LayoutOptions(columns=(("completion", "code"),))) == ("messages",)


@pytest.mark.parametrize(
    ("columns", "layout", "words"),
    [
        ((("prompt", "frage"),), "auto", "has no column 'frage', to which data.columns maps 'prompt'"),
        ((("prompt", "a"), ("completion", "a")), "auto", "gives one column to two fields"),
        ((("history", "a"),), "auto", "'history' and reads 'history', as data.columns asks"),
        ((("history", "a"),), "prompt_completion", "maps 'history', which the layout prompt_completion does not read"),
    ],
)
def test_mapping_that_cannot_be_followed_refuses_the_row(columns: Any, layout: Any, words: str):
    assert words in reason({"prompt": "a", "completion": "b", "a": "c"}, columns=columns, format=layout)


def test_columns_that_no_layout_reads_are_named_unless_they_are_empty():
    row = {"instruction": "a", "output": "b", "response": "c", "id": 0, "context": "d", "x": None, "y": "", "\ud800": 1}
    assert unused_columns(row) == ("response", "id", "context", "\\ud800")
    assert unused_columns({"query": "a", "response": "b", "system": "c"}) == ()
    assert unused_columns({"puzzle": "a"}) == ()


def test_prompts_are_read_up_to_the_turn_that_is_to_be_answered():
    def prompt(row: dict[str, Any], **reading: Any) -> list[tuple[str, str]]:
        return [(turn.role, turn.content) for turn in read_prompt(row, HERE, reading=LayoutOptions(**reading))[0]]

    assert prompt({"prompt": "Why?"}) == ONE[:1]
    assert prompt({"prompt": "Why?"}, system="S") == [("system", "S"), *ONE[:1]]
    assert prompt({"messages": [USER, ANSWER, USER], "prompt": "x"}) == [*ONE, *ONE[:1]]
    assert prompt({"conversations": [HUMAN], "system": "S"}) == [("system", "S"), *ONE[:1]]
    assert prompt({"frage": "Why?"}, columns=(("prompt", "frage"), ("completion", "antwort"))) == ONE[:1]
    asked = [USER, {"role": "assistant", "content": None, "tool_calls": [ADD_CALL]}, RESULT]
    messages, tools = read_prompt({"messages": asked, "tools": [ADD]}, HERE)
    assert messages[-1].call_id == "c1"
    assert json.loads(tools) == [{"type": "function", "function": ADD}]
    for row in ({"messages": []}, {"frage": "Why?"}, {"prompt": " "}, {"prompt": 3}, {"text": "Why?"}):
        with pytest.raises(DataError, match=r"answered|no question|empty|number"):
            read_prompt(row, HERE)


def test_the_question_is_read_from_every_layout_with_and_without_its_answer():
    rows = [{"messages": [USER, ANSWER]}, {"conversations": [HUMAN, {"from": "gpt", "value": "So."}]}]
    rows += [{"instruction": "Why?", "input": "", "output": "So."}, {"instruction": "Why?"}, {"query": "Why?"}]
    rows += [{first: "Why?", second: "So."} for first, second in (("user", "assistant"), ("prompt", "completion"))]
    for row in [*rows, {"question": "Why?", "answer": "So."}]:
        assert [(turn.role, turn.content) for turn in read_prompt(row, HERE)[0]] == ONE[:1], row


def test_named_layout_is_used_even_where_the_keys_would_say_another():
    row = {"messages": [USER, ANSWER], "prompt": "Add.", "completion": "3"}
    assert turns(row, format="prompt_completion")[0] == ("user", "Add.")
    assert "has no key 'instruction'" in reason(row, format="alpaca")


def test_plain_text_is_a_text_to_the_character():
    assert to_record({"text": " a\n\u2028b\0 ", "url": "x"}, HERE, reading=LayoutOptions(system="S")) == Text(
        " a\n\u2028b\0 ", HERE
    )
