"""Hints that state the answer in some form, and ordinary ones that do not: written by hand, as reviewers write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.data.load_prompts import Question
from sftplay.tasks.score.sample_episodes import is_leaked

CONFIGS = Path(__file__).parents[3] / "configs"

LEAKS = [
    ("42", "It is 42."), ("42", "The result must be 42.0"), ("42", "forty-two"), ("42", "4 2"), ("42", "It is XLII."),
    ("42", "so that $\\boxed{42}$ comes out"), ("42", "$x = 42$ is right"), ("42", "#### 42"),
    ("42", "That is 42cm."), ("42", "4.2e1"), ("1234", "1,234"), ("1234", "It is $1{,}234$."),
    ("1234", "one thousand two hundred and thirty-four"), ("42.0", "42"), ("$42", "42 dollars"), ("0.5", "1/2"),
    ("1/2", "0.5"), ("\\frac{3}{4}", "3/4"), ("-3", "minus 3"), ("-3", "negative three"),
    ("7", "The answer is 7, as in the problem."), ("x+1", "The factor is x + 1."), ("x^2 + 1", "$x^2+1$"),
    ("blue", "It is blue."), ("007", "The code is 007."),
]  # fmt: skip
"""Reference and hint. The problem has the numbers 7 and 12."""

ORDINARY = [
    ("42", "check 142"), ("000", "0"), ("42", "42.5 is wrong"), ("42", "add 4 and 2"), ("42", "Compute 84/2 again."),
    ("42", "forty-three is too much"), ("42", "4 2 0"), ("2", "step 2: the sign is wrong"),
    ("1", "One of your sums is wrong; check that one."), ("2", "1. Add first.\n2. Then multiply."),
    ("3", "Your result has the wrong sign: -3"), ("7", "He has 7 apples at the beginning, not 8."),
    ("12", "Read again: twelve eggs are bought."), ("1234", "12,345"), ("x+1", "Divide by x - 1."),
    ("blue", "Think of the colours of a bluebird."),
]  # fmt: skip

PROGRAM = "```python\ndef add(a, b):\n    return a + b\n```"
LOOP = "def total(rows):\n    result = 0\n    for row in rows:\n        result += row\n    return result"

PROGRAMS = [
    (PROGRAM, "def add(a, b):\n    return sum((a, b))"),
    (PROGRAM, "Write `add: Callable = lambda x, y: x + y`."),
    (PROGRAM, "return a + b"),
    (PROGRAM, "The line must be `return a + b`."),
    (PROGRAM, "```python\nreturn a + b\n```"),
    (PROGRAM, "def plus(x, y):\n    return x + y"),
    ("", "return a + b"),
    (LOOP, "Try this:\n```python\nresult = 0\nfor row in rows:\n    result += row\nreturn result\n```"),
    (
        LOOP,
        "```\ndef f(xs):\n    result = 0\n    for row in xs:\n        result += row\n    return result\n```\nis right",
    ),
]

NO_PROGRAMS = [
    (PROGRAM, "You return `a - b`: look at the sign."),
    (PROGRAM, "`return a - b` is wrong."),
    (PROGRAM, "add(2, 3) must give 5"),
    (PROGRAM, "def subtract(a, b):\n    return a - b"),
    (PROGRAM, "Does add work for negative numbers?"),
    (LOOP, "`return result` stands inside the loop."),
]


def is_leaked_by(reference: str, hint: str) -> bool:
    return is_leaked(Question(0, [], "He has 7 apples and 12 eggs.", {"answer": reference}), hint)


def is_program_leaked_by(reference: str, hint: str) -> bool:
    columns = {"answer": reference, "entry_point": "total" if reference == LOOP else "add"}
    return is_leaked(Question(0, [], "", columns), hint)


def test_a_hint_that_states_the_answer_leaks_it_in_whatever_form():
    assert [each for each in LEAKS if not is_leaked_by(f"...\n#### {each[0]}", each[1])] == []


def test_an_ordinary_hint_leaks_nothing():
    assert [each for each in ORDINARY if is_leaked_by(*each)] == []


def test_a_hint_that_writes_the_program_leaks_it_under_any_name_or_none():
    assert [each for each in PROGRAMS if not is_program_leaked_by(*each)] == []


def test_a_hint_that_quotes_the_wrong_program_leaks_nothing():
    assert [each for each in NO_PROGRAMS if is_program_leaked_by(*each)] == []


@pytest.mark.parametrize("name", ["run_score_gsm8k.yaml", "run_score_mbpp.yaml"])
def test_configs_whose_hint_could_be_the_answer_fine_a_leak(name: str):
    assert load_config(CONFIGS / name).score.leak_penalty > 0
