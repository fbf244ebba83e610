"""What data/one_liners promises: files that its generator writes, tests that only the right line passes, noise."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from test_demo_data import DATA, load_generator

FOLDER = DATA / "one_liners"


def rows(file: str, *, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The rows with `question` and `answer`, the texts of their two turns."""
    found = [json.loads(line) for line in (folder / f"{file}.jsonl").read_text("utf-8").splitlines()]
    return [row | dict(zip(("question", "answer"), (turn["content"] for turn in row["messages"]))) for row in found]


def n_passed(program: str, tests: list[str]) -> int:
    """How many of a row's tests a program of this data passes; a misspelt one passes none."""
    names: dict[str, Any] = {}
    try:
        exec(program, names)
    except SyntaxError:
        return 0
    passed = 0
    for test in tests:
        try:
            exec(test, names)
        except AssertionError:
            continue
        passed += 1
    return passed


def test_the_files_are_what_the_generator_writes():
    for file, text in load_generator("one_liners").files().items():
        assert (FOLDER / file).read_text("utf-8") == text, file


def test_the_right_line_passes_all_tests_and_any_other_one_at_most():
    lines = [f"def f(x): return x{operator}{number}" for operator, number in itertools.product("+-*", range(1, 13))]
    for row in [*rows("train"), *rows("held_out")]:
        passed = {line: n_passed(line, row["tests"]) for line in lines}
        assert passed.pop(row["answer"]) == 3
        assert max(passed.values()) <= 1


def test_no_question_is_both_trained_on_and_held_out():
    train, held_out = ([row["question"] for row in rows(file)] for file in ("train", "held_out"))
    assert (len(train), len(held_out)) == (27, 9)
    assert len(set(train + held_out)) == 36


def test_the_noise_leaves_the_right_answer_the_likeliest_and_about_one_in_four_right():
    problems = {row["question"]: row for row in [*rows("train"), *rows("held_out")]}
    answers: dict[str, list[str]] = {}
    for row in rows("noisy"):
        answers.setdefault(row["question"], []).append(row["answer"])
    assert set(answers) == set(problems)
    right = sum(answer == problems[question]["answer"] for question, each in answers.items() for answer in each)
    # Operator right 0.4 + 0.6 / 3, number right 0.4 + 0.6 / 12, spelling right 0.9: 0.243.
    assert abs(right / 1440 - 0.243) < 0.03
    assert sum("retrun" in answer for each in answers.values() for answer in each) / 1440 > 0.07
    for word, operator in {"add": "+", "sub": "-", "mul": "*"}.items():
        drawn = [answer[18] for question, each in answers.items() if question.startswith(word) for answer in each]
        assert max(set(drawn), key=drawn.count) == operator
    for number in map(str, range(1, 13)):
        drawn = [answer[19:] for question, each in answers.items() if question.split()[1] == number for answer in each]
        assert max(set(drawn), key=drawn.count) == number
