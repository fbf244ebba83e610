"""What the folders of data/ promise: files that their generators write, right answers, unseen held-out rows."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sftplay.model.builtin import ALPHABET, StepsRecipe

DATA = Path(__file__).resolve().parents[1] / "data"


def load_generator(folder: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder}_generate", DATA / folder / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: str, file: str) -> list[dict[str, Any]]:
    """The rows; those of chats with `question` and `answer`, the texts of their two turns."""
    lines = (DATA / folder / file).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    turns = [[turn["content"] for turn in row.get("messages", [])] for row in rows]
    return [row | dict(zip(("question", "answer"), texts)) for row, texts in zip(rows, turns, strict=True)]


@pytest.mark.parametrize(
    "folder",
    [
        "counted_things", "mistaken_words", "one_liners", "small_programs", "step_sums", "tool_sums",
        "twenty_questions", "word_problems",
    ],
)  # fmt: skip
def test_the_files_are_what_the_generator_writes(folder: str):
    for file, text in load_generator(folder).files().items():
        assert (DATA / folder / file).read_text("utf-8") == text, file


def test_the_files_of_demo_and_base_are_what_their_generators_write():
    demo = load_generator("demo")
    for file, (share, count) in demo.FILES.items():
        assert (DATA / "demo" / file).read_text("utf-8") == demo.as_jsonl(share, count)
    assert (DATA / "base" / "practice.txt").read_text("utf-8") == "\n".join(load_generator("base").passages())


def test_no_name_of_a_held_out_row_of_the_demo_occurs_in_training_or_in_the_base_text():
    names = {name for row in read("demo", "held_out.jsonl") for name in re.findall(r"[^\W\d_]+", row["answer"])}
    words = set(re.findall(r"\w+", (DATA / "demo" / "train.jsonl").read_text("utf-8")))
    for path in (DATA / "base").glob("*.txt"):
        words |= {word.capitalize() for word in re.findall(r"[^\W\d_]+", path.read_text("utf-8"))}
    assert len(names) > 200
    assert names & words == set()


def test_the_chats_of_the_anchor_are_what_the_generator_writes_and_no_question_occurs_twice_or_was_practised():
    questions = set()
    for file, chats in load_generator("anchor").rows().items():
        rows = read("anchor", f"{file}.jsonl")
        written = [[(turn["role"], turn["content"]) for turn in row["messages"]] for row in rows]
        assert written == [list(chat) for chat in chats]
        assert all([role for role, _ in chat] == ["user", "assistant"] * (len(chat) // 2) for chat in written)
        assert not questions & {chat[0][1] for chat in written}
        questions |= {chat[0][1] for chat in written}
    assert len(questions) == 2200
    practised = (DATA / "base" / "practice.txt").read_text(encoding="utf-8")
    assert not [text for text in questions if f"user\n{text}<|im_end|>" in practised]


def test_nothing_that_is_learned_from_is_held_out():
    questions = [row["question"] for file in ("train", "held_out") for row in read("one_liners", f"{file}.jsonl")]
    assert len(set(questions)) == len(questions) == 27 + 9
    rows = {file: read("mistaken_words", f"{file}.jsonl") for file in ("train", "noisy", "held_out")}
    numbers = {file: {row["question"].split()[1] for row in found} for file, found in rows.items()}
    answered = {row["answer"][19:] for row in rows["noisy"]}
    assert (len(rows["train"]), len(rows["held_out"]), len(numbers["held_out"])) == (180, 90, 30)
    assert not numbers["held_out"] & (numbers["train"] | numbers["noisy"] | answered)


def test_the_sums_for_tools_are_right_and_their_held_out_numbers_are_in_no_other_file():
    rows = {file: read("tool_sums", f"{file}.jsonl") for file in ("noisy", "train", "held_out")}
    asked = {file: [row["prompt"][0]["content"].split() for row in rows[file]] for file in ("train", "held_out")}
    for file, questions in asked.items():
        for (word, number), row in zip(questions, rows[file], strict=True):
            n = int(number)
            assert int(row["answer"]) == (n * n if word == "square" else 2 * n if word == "double" else n + n + n)
    asked["noisy"] = [row["question"].split() for row in rows["noisy"]]
    numbers = {file: {number for _, number in questions} for file, questions in asked.items()}
    assert (len(rows["train"]), len(rows["held_out"]), len(numbers["held_out"])) == (180, 90, 30)
    assert not numbers["held_out"] & (numbers["train"] | numbers["noisy"])
    called = [row["messages"] for row in rows["noisy"] if "tool_calls" in row["messages"][1]]
    assert 0.42 < len(called) / len(rows["noisy"]) < 0.48
    for question, call, result, answer in called:
        word, number = question["content"].split()
        behind = {"square": "**2", "double": "*2", "triple": "*3"}[word]
        assert call["tool_calls"][0]["function"]["arguments"] == {"expression": f"{number}{behind}"}
        n = int(number)
        right = {"square": n * n, "double": 2 * n, "triple": 3 * n}[word]
        assert result["content"] == str(right) == answer["content"].removeprefix("It is ")


def test_sums_are_right_and_the_warm_start_of_steps_knows_no_held_out_problem():
    train, held_out = (
        {row["text"]: row["answer"] for row in read("step_sums", f"{file}.jsonl")} for file in ("train", "held_out")
    )
    assert (len(train), len(held_out), len(train | held_out)) == (500, 125, 625)
    for problem, answer in (train | held_out).items():
        sums = accumulate(map(int, problem.rstrip("=").split("+")))
        assert answer == "".join(str(total % 5) for total in list(sums)[1:])
    ids, targets = StepsRecipe(rows=20_000).traces(torch.Generator().manual_seed(0))
    assert {"".join(ALPHABET[token] for token in row[:8]) for row in ids.tolist()} == set(train)
    assert ids.shape == targets.shape == (20_000, 17)
