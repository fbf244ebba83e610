"""Rows as prompts: the tokens that ask them, the columns that rewards read, and what becomes of each row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_run import grpo_inputs, grpo_options
from small_run import write_small_run
from transformers import AutoTokenizer

from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Question, Questions, load_prompts
from sftplay.errors import DataError

CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "why the river"}]

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def make_config(tiny_llama: Path, tmp_path: Path) -> MakeConfig:
    """A config with the training rows `rows`, in a jsonl file or in the file that is given."""
    inputs = grpo_inputs(tiny_llama, tmp_path / "made")

    def make(rows: list[dict[str, Any]] | Path, held_out: list[dict[str, Any]] | None = None, **more: Any) -> RunConfig:
        paths = []
        for name, content in (("train", rows), ("held_out", held_out or [])):
            path = content if isinstance(content, Path) else tmp_path / f"{name}.jsonl"
            if not isinstance(content, Path):
                path.write_text("".join(json.dumps(row) + "\n" for row in content))
            paths.append(str(path))
        sides = {"data__train_path": paths[0], "data__val_path": paths[1] if held_out else None}
        split = {} if held_out or "data__split" in more else {"data__split": 0}
        return load_config(write_small_run(tmp_path, inputs, **grpo_options(inputs, **sides, **split, **more)))

    return make


def list_questions(questions: Questions) -> list[Question]:
    return [questions[number] for number in range(len(questions))]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "why the river"}, CHAT[1:]),
        ({"prompt": CHAT}, CHAT),
        ({"messages": [*CHAT, {"role": "assistant", "content": "salt"}]}, CHAT),
        ({"prompt": "why the river", "completion": "salt"}, CHAT[1:]),
        ({"question": "why the river", "answer": "salt"}, CHAT[1:]),
    ],
    ids=["text", "messages", "chat", "with its completion", "question and answer"],
)
def test_a_prompt_is_asked_with_the_tokens_of_its_template_and_an_answer_is_cut_off(
    row: dict[str, Any], asked: list[dict[str, str]], make_config: MakeConfig, tokenizer: Any
):
    (question,) = list_questions(load_prompts(make_config([row]), tokenizer).train)
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert question.ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert question.columns.get("answer") == (None if len(row) == 1 and "prompt" in row else "salt")
    assert question.question == "why the river"


def test_columns_reach_rewards_as_in_the_row_by_the_names_of_the_file_and_of_the_config(
    make_config: MakeConfig, tokenizer: Any
):
    rows = [
        {"prompt": "one", "answer": 5, "spec": {"a": 1}, "tests": ["x"]},
        {"prompt": "two", "answer": "5", "spec": {"b": [2, None]}},
    ]
    prompts = load_prompts(make_config(rows), tokenizer)
    assert [question.columns for question in list_questions(prompts.train)] == rows
    assert prompts.report["columns"] == ["prompt", "answer", "spec", "tests"]

    cfg = make_config([{"frage": "one", "loesung": "5"}], data__columns={"question": "frage", "answer": "loesung"})
    (question,) = list_questions(load_prompts(cfg, tokenizer).train)
    assert question.columns == {"frage": "one", "loesung": "5", "question": "one", "answer": "5"}


def test_every_row_is_counted_once(make_config: MakeConfig, tokenizer: Any):
    rows: list[dict[str, Any]] = [
        {"prompt": "why the river"},
        {"prompt": "why  The river"},
        {"prompt": "salt " * 100},
        {"colour": "green"},
        {"prompt": "is held out"},
    ]
    cfg = make_config(
        rows, [{"prompt": "is held out"}], data__duplicates="drop", data__contamination="drop", data__on_bad_row="skip"
    )
    report = load_prompts(cfg, tokenizer).report
    train = report["sources"]["train"]
    assert train["dropped"] == {"duplicate": 1, "leak": 1, "too_long": 1}
    assert (train["read"], train["kept"], train["refused"]) == (5, 1, 1)
    assert report["read"] == report["kept"] + report["cut"] + sum(report["dropped"].values()) + report["refused"]
    (line,) = Path(report["refused_rows"]).read_text().splitlines()
    refused = json.loads(line)
    assert (refused["path"], refused["line"]) == (cfg.data.train_path, 4)
    assert refused["reason"].startswith("has no question")


@pytest.mark.parametrize(
    ("row", "policy", "said"),
    [
        ({"prompt": "salt " * 100}, {"data__too_long": "error"}, r"train\.jsonl:1 has \d+ tokens.*116"),
        ({"colour": "green"}, {}, r"train\.jsonl:1 has no question; its keys are 'colour'"),
        ({"prompt": "one", "completions": []}, {}, r"train\.jsonl:1 has a column 'completions', the name by which"),
        ({"prompt": "is held out"}, {}, r"train\.jsonl:1 is held out as well, at .*held_out\.jsonl:1"),
    ],
    ids=["too long", "no question", "a taken name", "leak"],
)
def test_a_row_that_may_not_be_left_out_is_named_with_its_line(
    row: dict[str, Any], policy: dict[str, Any], said: str, make_config: MakeConfig, tokenizer: Any
):
    with pytest.raises(DataError, match=said):
        load_prompts(make_config([row], [{"prompt": "is held out"}], **policy), tokenizer)


SCORE: dict[str, Any] = {"task_mode": "score", "score__max_new_tokens": 20, "score__max_hint_tokens": 20}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": [*CHAT[1:], {"role": "assistant", "content": "salt"}, *CHAT[1:]]}, "2 turns before its last one"),
        ({"prompt": CHAT}, "a system prompt of its own"),
        (
            {"prompt": CHAT[1:], "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
            "tools",
        ),
    ],
    ids=["earlier turns", "system", "tools"],
)
def test_a_row_that_says_more_than_two_turn_episodes_ask_is_refused_and_counted(
    row: dict[str, Any], said: str, make_config: MakeConfig, tokenizer: Any
):
    with pytest.raises(DataError, match=rf"train\.jsonl:1 has {said}, but task mode score asks"):
        load_prompts(make_config([row], **SCORE), tokenizer)
    report = load_prompts(make_config([row, {"prompt": "one"}], **SCORE, data__on_bad_row="skip"), tokenizer).report
    assert (report["refused"], report["kept"]) == (1, 1)
    load_prompts(make_config([row]), tokenizer)  # task grpo asks all of it


def test_a_share_of_the_prompts_is_held_out_each_with_all_its_rows(make_config: MakeConfig, tokenizer: Any):
    rows = [{"prompt": f"row {n // 2}", "answer": str(n)} for n in range(60)]
    prompts = load_prompts(make_config(rows, data__split=0.3), tokenizer)
    sides = [{question.question for question in list_questions(side)} for side in (prompts.train, prompts.held_out)]
    assert all(sides)
    assert sides[0].isdisjoint(sides[1])
    assert len(prompts.train) + len(prompts.held_out) == 60


@pytest.mark.parametrize("mode", ["grpo", "score"])
def test_a_prompt_that_is_too_long_is_told_with_the_keys_that_give_its_task_room(
    make_config: MakeConfig, tokenizer: Any, mode: str
):
    cfg = make_config([{"prompt": "salt " * 200}], data__too_long="error").with_values({"task_mode": mode}, "a test")
    with pytest.raises(DataError, match="has ") as refusal:
        load_prompts(cfg, tokenizer)
    named = {word.strip(",;") for word in refusal.value.fix.split() if "." in word}
    assert {key.split(".")[0] for key in named} - {"model", "data"} == {mode}


def test_nothing_left_to_ask_says_what_became_of_the_rows(make_config: MakeConfig, tokenizer: Any):
    with pytest.raises(DataError, match="no prompt is left to train on: 1 read, 1 too long"):
        load_prompts(make_config([{"prompt": "salt " * 100}]), tokenizer)
