"""Writes the files of a toy for reinforcement learning: two words in, a function of one line out, tests judge it.

    add 7   ->   def f(x): return x+7

noisy.jsonl holds solutions to imitate, most of them wrong in the operator or the number and some in the spelling. A
model that has learned them answers right only now and then. train.jsonl and held_out.jsonl hold the same questions with
tests, and no question is in both: what is rewarded there is a program that passes. One fixed seed: the files are the
same on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 11
HERE = Path(__file__).resolve().parent

OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
TRAIN_NUMBERS, HELD_OUT_NUMBERS = range(1, 10), range(10, 13)
EVERY_NUMBER = [*TRAIN_NUMBERS, *HELD_OUT_NUMBERS]
ARGUMENTS = (0, 5, 21)
"""What the tests call the function with: a wrong operator or number passes one of them at most."""

SOLUTIONS = 40
"""Noisy solutions to each question."""

NOISE = 0.6
"""Chance that the operator is drawn from all three, and the same for the number, which may draw the right one."""

MISSPELT = 0.1
"""Chance of a `return` that is no Python."""


def program(word: str, number: int) -> str:
    """The right answer."""
    return f"def f(x): return x{OPERATORS[word]}{number}"


def noisy_program(rng: random.Random, word: str, number: int) -> str:
    """An answer that is right about one time in four."""
    if rng.random() < NOISE:
        word = rng.choice(list(OPERATORS))
    if rng.random() < NOISE:
        number = rng.choice(EVERY_NUMBER)
    written = program(word, number)
    return written.replace("return", "retrun") if rng.random() < MISSPELT else written


def apply(word: str, x: int, number: int) -> int:
    """What the right program returns."""
    return {"add": x + number, "sub": x - number, "mul": x * number}[word]


def user(word: str, number: int) -> dict[str, str]:
    """The question as a turn of a chat."""
    return {"role": "user", "content": f"{word} {number}"}


def assistant(answer: str) -> dict[str, str]:
    """An answer as a turn of a chat."""
    return {"role": "assistant", "content": answer}


def solutions() -> Iterator[dict[str, Any]]:
    """Chats with a noisy answer, in random order."""
    rng = random.Random(SEED)
    questions = [(word, number) for word in OPERATORS for number in EVERY_NUMBER] * SOLUTIONS
    rng.shuffle(questions)
    for word, number in questions:
        yield {"messages": [user(word, number), assistant(noisy_program(rng, word, number))]}


def problems(numbers: range) -> Iterator[dict[str, Any]]:
    """Questions with their right answers, and what the rewards read: tests, and the name that they call."""
    for word in OPERATORS:
        for number in numbers:
            yield {
                "messages": [user(word, number), assistant(program(word, number))],
                "tests": [f"assert f({x}) == {apply(word, x, number)}" for x in ARGUMENTS],
                "entry_point": "f",
            }


def as_jsonl(rows: Iterator[dict[str, Any]]) -> str:
    """A file's whole text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    return {
        "noisy.jsonl": as_jsonl(solutions()),
        "train.jsonl": as_jsonl(problems(TRAIN_NUMBERS)),
        "held_out.jsonl": as_jsonl(problems(HELD_OUT_NUMBERS)),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")
