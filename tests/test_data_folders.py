"""What the folders of data/ promise: files that their generators write, right answers, unseen held-out rows."""

from __future__ import annotations

import itertools
import json
import re
from itertools import accumulate
from typing import Any

import pytest
import torch
from test_demo_data import DATA, load_generator

from sftplay.model.toys import ALPHABET, StepsRecipe


def read(folder: str, file: str) -> list[dict[str, Any]]:
    """The rows; those of chats with `question` and `answer`, the texts of their two turns."""
    lines = (DATA / folder / file).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    turns = [[turn["content"] for turn in row.get("messages", [])] for row in rows]
    return [row | dict(zip(("question", "answer"), texts)) for row, texts in zip(rows, turns, strict=True)]


@pytest.mark.parametrize("folder", ["mistaken_words", "one_liners", "small_programs", "step_sums", "word_problems"])
def test_the_files_are_what_the_generator_writes(folder: str):
    for file, text in load_generator(folder).files().items():
        assert (DATA / folder / file).read_text("utf-8") == text, file


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


def count_passed(program: str, tests: list[str]) -> int:
    """How many of a row's tests a program of this data passes."""
    names: dict[str, Any] = {}
    exec(program, names)
    passed = 0
    for test in tests:
        try:
            exec(test, names)
        except AssertionError:
            continue
        passed += 1
    return passed


@pytest.mark.parametrize(
    ("folder", "files", "numbers"),
    [("one_liners", ("train", "held_out"), range(1, 13)), ("mistaken_words", ("held_out",), range(10, 100))],
)
def test_the_right_line_passes_all_tests_and_any_other_one_at_most(folder: str, files: tuple[str, ...], numbers: range):
    lines = [f"def f(x): return x{operator}{number}" for operator, number in itertools.product("+-*", numbers)]
    rows = [row for file in files for row in read(folder, f"{file}.jsonl")]
    for row in rows[:: 1 + len(numbers) // 12]:
        passed = {line: count_passed(line, row["tests"]) for line in lines}
        assert passed.pop(row["answer"]) == 3
        assert max(passed.values()) <= 1


def test_nothing_that_is_learned_from_is_held_out():
    questions = [row["question"] for file in ("train", "held_out") for row in read("one_liners", f"{file}.jsonl")]
    assert len(set(questions)) == len(questions) == 27 + 9
    rows = {file: read("mistaken_words", f"{file}.jsonl") for file in ("train", "noisy", "held_out")}
    numbers = {file: {row["question"].split()[1] for row in found} for file, found in rows.items()}
    answered = {row["answer"][19:] for row in rows["noisy"]}
    assert (len(rows["train"]), len(rows["held_out"]), len(numbers["held_out"])) == (180, 90, 30)
    assert not numbers["held_out"] & (numbers["train"] | numbers["noisy"] | answered)


def test_each_small_program_passes_its_own_tests():
    rows = [row for file in load_generator("small_programs").files() for row in read("small_programs", file)]
    for row in rows:
        program = row["answer"].removeprefix("```python\n").removesuffix("\n```")
        assert f"def {row['entry_point']}(" in program
        assert count_passed(program, row["tests"]) == 3
        assert [test in row["question"] for test in row["tests"]] == [True, False, False]
    assert len(rows) == 12


def test_each_step_of_a_word_problem_is_right():
    questions = []
    for file in load_generator("word_problems").files():
        for row in read("word_problems", file):
            questions.append(row["question"])
            steps = re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)", row["answer"])
            assert len(steps) == 2
            for left, sign, right, result, shown in steps:
                a, b = int(left), int(right)
                assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(result) == int(shown)
            assert row["answer"].endswith(f"\n#### {steps[-1][3]}")
    assert len(questions) == len(set(questions)) == 80


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


def test_a_hint_of_the_warm_start_is_the_first_wrong_step_as_often_as_the_recipe_says():
    ids, _ = StepsRecipe(rows=20_000, blanks=0.0).traces(torch.Generator().manual_seed(0))
    n_right = 0
    for row in ids.tolist():
        words = [ALPHABET[token] for token in row]
        sums = [total % 5 for total in accumulate(int(word) for word in words[0:8:2])][1:]
        wrong = [step for step, pair in enumerate(zip(words[8:11], sums, strict=True), 1) if int(pair[0]) != pair[1]]
        n_right += int(words[12]) == (wrong[0] if wrong else 0)
    assert abs(n_right / 20_000 - (0.5 + 0.5 / 4)) < 0.02
