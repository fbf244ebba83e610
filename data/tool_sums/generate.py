"""Writes the files of a toy for tools: a sum that a tiny model cannot compute and a calculator can.

    57*83 = ?   ->   a call of calculator("57*83"), its result 4731, and then: It is 4731

noisy.jsonl holds dialogues to imitate by one who mostly answers at once, with a number by chance. A model that has
learned them guesses where it answers greedily, and calls in some sampled answers. train.jsonl holds the same questions
with right answers. held_out.jsonl has numbers that occur in neither file. One fixed seed: the files are the same on
every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEED = 23
HERE = Path(__file__).resolve().parent

OPERATORS = "+-*"

CALLS = 0.4
"""Share of the demonstrator's answers that ask the calculator; the others are numbers by chance."""

HELD_OUT_NUMBERS = range(10, 100, 5)
TRAIN_NUMBERS = [number for number in range(11, 100) if number not in HELD_OUT_NUMBERS]
NOISY, TRAIN, HELD_OUT = 3000, 400, 90
"""Rows of each file."""

TOOL = {"name": "calculator"}
"""The template of the toy shows the names of tools alone."""


def compute(left: int, operator: str, right: int) -> int:
    """The right answer."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def draw(rng: random.Random, numbers: list[int]) -> tuple[int, str, int]:
    """A sum: the larger number first, so that none is below zero."""
    left, right = rng.sample(numbers, 2)
    return max(left, right), rng.choice(OPERATORS), min(left, right)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    """A turn of a chat."""
    return {"role": role, "content": content, **more}


def question(left: int, operator: str, right: int) -> dict[str, Any]:
    """A sum as the user's turn."""
    return turn("user", f"{left}{operator}{right} = ?")


def dialogues() -> Iterator[dict[str, Any]]:
    """Chats to imitate."""
    rng = random.Random(SEED)
    for _ in range(NOISY):
        left, operator, right = draw(rng, TRAIN_NUMBERS)
        turns = [question(left, operator, right)]
        answer = str(compute(*draw(rng, TRAIN_NUMBERS)))
        if rng.random() < CALLS:
            answer = str(compute(left, operator, right))
            arguments = {"expression": f"{left}{operator}{right}"}
            call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
            turns += [turn("assistant", "", tool_calls=[call]), turn("tool", answer)]
        yield {"messages": [*turns, turn("assistant", f"It is {answer}")], "tools": [TOOL]}


def problems(count: int, numbers: Iterable[int], *, seed: int) -> Iterator[dict[str, Any]]:
    """Questions with their right answers."""
    rng, seen = random.Random(seed), set[tuple[int, str, int]]()
    while len(seen) < count:
        drawn = draw(rng, list(numbers))
        if drawn not in seen:
            seen.add(drawn)
            yield {"prompt": [question(*drawn)], "answer": str(compute(*drawn))}


def as_jsonl(rows: Iterator[dict[str, Any]]) -> str:
    """A file's whole text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    return {
        "noisy.jsonl": as_jsonl(dialogues()),
        "train.jsonl": as_jsonl(problems(TRAIN, TRAIN_NUMBERS, seed=SEED + 1)),
        "held_out.jsonl": as_jsonl(problems(HELD_OUT, HELD_OUT_NUMBERS, seed=SEED + 2)),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")
