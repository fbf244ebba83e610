"""Rows in the layouts of other kits become the same canonical pair; what is no pair is refused with its reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from sftplay.data.layouts import LayoutOptions
from sftplay.data.records import Source
from sftplay.errors import DataError
from sftplay.tasks.preference.pairs import Pair, to_pair

PLACE = Source("pairs.jsonl", 7)
USER = {"role": "user", "content": "Why salt?"}
GOOD, BAD = {"role": "assistant", "content": "It keeps."}, {"role": "assistant", "content": "No idea."}
SYSTEM = {"role": "system", "content": "Be short."}
HUMAN, GPT = {"from": "human", "value": "Why salt?"}, {"from": "gpt", "value": "It keeps."}


def read(row: dict[str, Any], **options: Any) -> Pair:
    columns = tuple(options.pop("columns", {}).items())
    reading = LayoutOptions(columns=columns, system=options.pop("system", None))
    return to_pair(row, PLACE, reading=reading, **options)


def turns(pair: Pair) -> list[list[tuple[str, str]]]:
    return [[(turn.role, turn.content) for turn in part] for part in (pair.prompt, *pair.sides)]


def reason(row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as refusal:
        read(row, **options)
    assert refusal.value.where == "pairs.jsonl:7"
    assert refusal.value.fix
    return refusal.value.what


PLAIN = [[("user", "Why salt?")], [("assistant", "It keeps.")], [("assistant", "No idea.")]]

LAYOUTS = {
    "texts": {"prompt": "Why salt?", "chosen": "It keeps.", "rejected": "No idea."},
    "messages with a prompt": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "one message a side": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "whole dialogues": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "ultrafeedback": {
        "prompt": "Why salt?", "prompt_id": "x", "messages": [USER, GOOD],
        "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0, "score_rejected": 3.5,
    },
    "hh": {
        "chosen": "\n\nHuman: Why salt?\n\nAssistant: It keeps.",
        "rejected": "\n\nHuman: Why salt?\n\nAssistant: No idea.",
    },
    "hh with a prompt apart": {
        "prompt": "\n\nHuman: Why salt?\n\nAssistant:", "chosen": "It keeps.", "rejected": "No idea."
    },
    "llamafactory": {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No idea."}},
    "axolotl question": {"question": "Why salt?", "chosen": "It keeps.", "rejected": "No idea."},
    "axolotl instruction": {"instruction": "Why salt?", "input": "", "chosen": "It keeps.", "rejected": "No idea."},
    "swift": {"messages": [USER, GOOD], "rejected_response": "No idea."},
    "swift with messages": {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_pair(name: str):
    assert turns(read(LAYOUTS[name])) == PLAIN


def test_system_prompt_comes_from_its_column_the_first_turn_or_the_config():
    texts = LAYOUTS["texts"]
    lead = [("system", "Be short."), ("user", "Why salt?")]
    assert turns(read({"system": "Be short.", **texts}))[0] == lead
    assert turns(read({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}))[0] == lead
    assert turns(read(texts, system="Be short."))[0] == lead
    assert (
        turns(read({"prompt": "Why salt?", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}))[0] == lead
    )


def test_dialogues_share_all_turns_up_to_the_answer_that_differs():
    before = [USER, GOOD, {"role": "user", "content": "And pepper?"}]
    pair = read({"chosen": [*before, GOOD], "rejected": [*before, BAD]})
    assert turns(pair)[0] == [("user", "Why salt?"), ("assistant", "It keeps."), ("user", "And pepper?")]
    assert turns(pair)[1:] == PLAIN[1:]
    assert [chat.learned_from for chat in pair.chats] == [3, 3]


def test_side_that_goes_on_where_the_other_ends_keeps_its_further_turns():
    pair = read({"chosen": [USER, GOOD], "rejected": [USER, GOOD, {"role": "user", "content": "Yes?"}, BAD]})
    assert turns(pair)[0] == PLAIN[0]
    assert turns(pair)[1] == PLAIN[1]
    assert turns(pair)[2] == [("assistant", "It keeps."), ("user", "Yes?"), ("assistant", "No idea.")]


def test_white_space_of_answers_is_kept_to_the_character():
    pair = read({"prompt": " Why? ", "chosen": " a\n", "rejected": "\u00e9\u4e2d \U0001f600"})
    assert pair.texts == (" Why? ", " a\n", "\u00e9\u4e2d \U0001f600")
    assert turns(pair)[1] == [("assistant", " a\n")]


def test_tool_calls_and_their_results_may_stand_in_the_prompt_and_in_a_side():
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "weigh", "arguments": '{"what": "salt"}'}}]}  # fmt: skip
    result = {"role": "tool", "name": "weigh", "content": "7"}
    tools = [{"type": "function", "function": {"name": "weigh", "parameters": {"type": "object", "properties": {}}}}]
    in_prompt = read({"prompt": [USER, call, result], "chosen": "Seven.", "rejected": "Six.", "tools": tools})
    assert [turn.role for turn in in_prompt.prompt] == ["user", "assistant", "tool"]
    assert "weigh" in in_prompt.tools
    assert in_prompt.prompt[1].calls[0].id == in_prompt.prompt[2].call_id
    in_side = read({"chosen": [USER, call, result, GOOD], "rejected": [USER, BAD], "tools": tools})
    assert [[turn.role for turn in side] for side in in_side.sides] == [
        ["assistant", "tool", "assistant"],
        ["assistant"],
    ]


@pytest.mark.parametrize(
    ("scores", "margin"),
    [
        ({"score_chosen": 8, "score_rejected": 3.5}, 4.5),
        ({"chosen-rating": 2.0, "rejected-rating": 5.0}, -3.0),
        ({"score_chosen": "8.5", "score_rejected": "8"}, 0.5),  # csv has numbers as text
        ({"margin": 0.25, "score_chosen": 8, "score_rejected": 3}, 0.25),
        ({"score_chosen": 8}, math.nan),
        ({"score_chosen": math.nan, "score_rejected": 3}, math.nan),
        ({"score_chosen": None, "score_rejected": ""}, math.nan),
    ],
)
def test_margin_is_the_rows_own_or_the_difference_of_its_scores(scores: dict[str, Any], margin: float):
    assert read(LAYOUTS["texts"] | scores).margin == pytest.approx(margin, nan_ok=True)


@pytest.mark.parametrize("score", ["good", True, [1], math.inf, "inf", 10**400])
def test_score_that_is_no_finite_number_is_refused(score: object):
    assert "score_chosen" in reason(LAYOUTS["texts"] | {"score_chosen": score, "score_rejected": 1})


def test_columns_with_other_names_are_mapped():
    row = {"frage": "Why salt?", "gut": "It keeps.", "schlecht": "No idea.", "g": 3, "s": 1}
    columns = {"prompt": "frage", "chosen": "gut", "rejected": "schlecht", "score_chosen": "g", "score_rejected": "s"}
    pair = read(row, columns=columns)
    assert turns(pair) == PLAIN
    assert pair.margin == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": [USER, GOOD, {"role": "user", "content": " "}], "chosen": "a", "rejected": "b"},
            "its prompt: message 3, from 'user', is empty",
        ),
        ({"prompt": "Why?", "chosen": str([GOOD]), "rejected": str([BAD])}, "chosen is a text that is not JSON"),
        ({"prompt": "Why?", "chosen": "a"}, "has no 'rejected' side"),
        ({"prompt": "Why?", "chosen": None, "rejected": "b"}, "has no 'chosen' side"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        ({"prompt": "Why?", "chosen": "", "rejected": "b"}, "chosen side: message 2, from 'assistant', is empty"),
        ({"prompt": "Why?", "chosen": "a", "rejected": " \n"}, "rejected side: message 2, from 'assistant', is empty"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "message 1, from 'user', is empty"),
        ({"prompt": "Why?", "chosen": [], "rejected": [BAD]}, "chosen is an empty list"),
        ({"prompt": "Why?", "chosen": 7, "rejected": "b"}, "'chosen' is a number"),
        ({"prompt": "Why?", "chosen": "\ud800", "rejected": "b"}, "not valid Unicode"),
        ({"prompt": "Why?", "chosen": [USER, GOOD], "rejected": "No."}, "whole dialogue as one side"),
        ({"prompt": [USER, GOOD], "chosen": "a", "rejected": "b"}, "where 'user' is due"),
        ({"chosen": [USER], "rejected": [USER, BAD]}, "no shared prompt"),
        ({"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "Other?"}, BAD]}, "no shared prompt"),
        (
            {"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]},
            "chosen side does not begin and end with an assistant",
        ),
        ({"prompt": "Other?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt that its two dialogues do not"),
        ({"prompt": "Why?", "completion": "a", "label": True}, "one answer with a verdict, not a pair"),
        ({"messages": [USER], "rejected_response": "b"}, "no chosen answer"),
        ({"messages": [USER, GOOD], "rejected_response": ["b", "c"]}, "2 answers"),
        (
            {"chosen": "\n\nHuman: Why?\n\nAssistant: a", "rejected": "\n\nHuman: How?\n\nAssistant: b"},
            "differ in message 1",
        ),
    ],
)
def test_row_that_is_no_pair_is_refused_with_its_reason(row: dict[str, Any], words: str):
    assert words in reason(row)


@pytest.mark.parametrize(
    ("label", "verdict"),
    [(True, True), (False, False), (1, True), (0, False), (1.0, True), ("true", True), ("False", False), ("0", False)],
)
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_answer_with_a_verdict_is_read_in_any_layout_of_a_chat(label: object, verdict: bool, name: str):
    for row in (
        {"prompt": "Why salt?", "completion": "It keeps."},
        {"prompt": [USER], "completion": [GOOD]},
        {"messages": [USER, GOOD]},
        {"instruction": "Why salt?", "output": "It keeps."},
        {"conversations": [HUMAN, GPT]},
    ):
        pair = read(row | {name: label}, takes_answers=True)
        assert turns(pair) == PLAIN[:2]
        assert pair.desirable is verdict


def test_cells_with_messages_as_json_text_are_read_as_messages():
    whole = {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD], indent=1)}
    parts = {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])}
    sharegpt = {
        "prompt": "Why salt?",
        "chosen": json.dumps([GPT]),
        "rejected": json.dumps([GPT | {"value": "No idea."}]),
    }
    for row in (whole, parts, sharegpt):
        assert turns(read(row)) == PLAIN
    answer = {"prompt": parts["prompt"], "completion": parts["chosen"], "label": "1"}
    assert turns(read(answer, takes_answers=True)) == PLAIN[:2]


def test_answer_that_is_json_of_something_else_stays_a_text():
    answers = [
        '[{"city": "Rome"}]',
        "[]",
        '[{"role": "pilot", "content": "x"}]',
        '{"role": "user", "content": "x"}',
        "[{",
    ]
    for answer in answers:
        pair = read({"prompt": "Why salt?", "chosen": answer, "rejected": "No idea."})
        assert turns(pair)[1] == [("assistant", answer)]


def test_column_that_is_mapped_and_missing_is_named():
    what = reason({"prompt": "Why?", "chosen": "a", "rejected": "b"}, columns={"chosen": "good"})
    assert "has no column 'good', to which data.columns maps 'chosen'" in what


@pytest.mark.parametrize("label", ["maybe", 2, None, 0.5, [], math.nan])
def test_verdict_that_is_neither_true_nor_false_is_refused(label: object):
    assert "label" in reason({"prompt": "Why?", "completion": "a", "label": label}, takes_answers=True)


def test_texts_without_a_prompt_share_their_beginning_where_texts_are_continued():
    pair = read({"chosen": "The sky is blue.", "rejected": "The sky is black."}, is_plain=True)
    assert pair.texts == ("The sky is", " blue.", " black.")
    assert "share no beginning" in reason({"chosen": "a b", "rejected": "c d"}, is_plain=True)
