"""Writes the files of a toy for tools: a sum in words, which a model cannot compute and a calculator can.

    57 times 83   ->   a call of calculator("57*83"), its result 4731, and then: It is 4731

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

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}

WEIGHTS = {"guess": 0.55, "call": 0.35, "mistake": 0.1}
"""How often the demonstrator answers at once, calls rightly, and calls with another operator."""

HELD_OUT_NUMBERS = range(10, 100, 5)
TRAIN_NUMBERS = [number for number in range(11, 100) if number not in HELD_OUT_NUMBERS]
NOISY, TRAIN, HELD_OUT = 3000, 400, 90
"""Rows of each file."""

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / // % **, brackets, sqrt, abs, round, min, max, log, exp, pi.",
                }
            },
            "required": ["expression"],
        },
    },
}
"""How the shipped tool is described."""


def compute(left: int, word: str, right: int) -> int:
    """The right answer."""
    return {"plus": left + right, "minus": left - right, "times": left * right}[word]


def draw(rng: random.Random, numbers: list[int]) -> tuple[int, str, int]:
    """A question: the larger number first, so that no answer is below zero."""
    left, right = rng.sample(numbers, 2)
    return max(left, right), rng.choice(list(OPERATORS)), min(left, right)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    """A turn of a chat."""
    return {"role": role, "content": content, **more}


def dialogues() -> Iterator[dict[str, Any]]:
    """Chats to imitate."""
    rng = random.Random(SEED)
    for _ in range(NOISY):
        left, word, right = draw(rng, TRAIN_NUMBERS)
        way = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        asked = turn("user", f"{left} {word} {right}")
        if way == "guess":
            answer = compute(*draw(rng, TRAIN_NUMBERS))
            yield {"messages": [asked, turn("assistant", f"It is {answer}")], "tools": [TOOL]}
            continue
        called = word if way == "call" else rng.choice([other for other in OPERATORS if other != word])
        arguments = {"expression": f"{left}{OPERATORS[called]}{right}"}
        call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
        result = str(compute(left, called, right))
        turns = [turn("assistant", "", tool_calls=[call]), turn("tool", result), turn("assistant", f"It is {result}")]
        yield {"messages": [asked, *turns], "tools": [TOOL]}


def problems(count: int, numbers: Iterable[int], *, seed: int) -> Iterator[dict[str, Any]]:
    """Questions with their right answers."""
    rng, seen = random.Random(seed), set[tuple[int, str, int]]()
    while len(seen) < count:
        question = draw(rng, list(numbers))
        if question not in seen:
            seen.add(question)
            yield {"prompt": [turn("user", "{} {} {}".format(*question))], "answer": str(compute(*question))}


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
