"""Writes the files of a toy for reinforcement learning: two words in, a function of one line out, tests judge it.

    add 7   ->   def f(x): return x+7

noisy.jsonl holds solutions to imitate by one who mistakes each word for another one: the wrong operator is the most
frequent. A model that has learned them is wrong where it answers greedily, and right in some sampled answers.
train.jsonl holds the same questions with tests. held_out.jsonl has numbers that occur in neither file: a model that is
right there has learned the words. One fixed seed: the files are the same on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEED = 11
HERE = Path(__file__).resolve().parent

OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
MISTAKEN = {"add": "sub", "sub": "mul", "mul": "add"}
"""What the demonstrator mostly takes a word for."""

WEIGHTS = {"mistaken": 0.45, "right": 0.35}
"""How often an answer has the operator of that word; else it has the third one."""

HELD_OUT_NUMBERS = range(10, 100, 3)
TRAIN_NUMBERS = [number for number in range(10, 100) if number not in HELD_OUT_NUMBERS]
ARGUMENTS = (0, 5, 21)
"""What the tests call the function with: a wrong operator or number passes one of them at most."""

SOLUTIONS = 16
"""Noisy solutions to each question."""

WRONG_NUMBER = 0.2
"""Chance that the number is chosen by chance."""

MISSPELT = 0.05
"""Chance of a `return` that is no Python."""


def program(word: str, number: int) -> str:
    """The right answer."""
    return f"def f(x): return x{OPERATORS[word]}{number}"


def noisy_program(rng: random.Random, word: str, number: int) -> str:
    """An answer that is right about one time in four."""
    third = next(other for other in OPERATORS if other not in (word, MISTAKEN[word]))
    weights = (WEIGHTS["mistaken"], WEIGHTS["right"], 1 - sum(WEIGHTS.values()))
    word = rng.choices((MISTAKEN[word], word, third), weights)[0]
    if rng.random() < WRONG_NUMBER:
        number = rng.choice(TRAIN_NUMBERS)
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
    questions = [(word, number) for word in OPERATORS for number in TRAIN_NUMBERS] * SOLUTIONS
    rng.shuffle(questions)
    for word, number in questions:
        yield {"messages": [user(word, number), assistant(noisy_program(rng, word, number))]}


def problems(numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
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
