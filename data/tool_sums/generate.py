"""Writes the files of a toy for tools: a sum that a tiny model cannot compute and a calculator can.

    square 57   ->   a call of calculator("57**2"), its result 3249, and then: It is 3249

noisy.jsonl holds dialogues to imitate by one who mostly gives up at once. A model that has learned them gives up where
it answers greedily, and calls in some sampled answers. train.jsonl holds the same questions with right answers.
held_out.jsonl has numbers that occur in neither file: a model that is right there asks the calculator. One fixed seed:
the files are the same on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEED = 23
HERE = Path(__file__).resolve().parent

EXPRESSIONS = {"square": "{0}**2", "double": "{0}*2", "triple": "{0}*3"}
RESULTS = {"square": lambda number: number**2, "double": lambda number: 2 * number, "triple": lambda number: 3 * number}

CALLS = 0.45
"""Share of the demonstrator's answers that ask the calculator."""

GIVES_UP = "I do not know"
DIALOGUES = 18
"""Of each question."""

HELD_OUT_NUMBERS = range(10, 100, 3)
TRAIN_NUMBERS = [number for number in range(10, 100) if number not in HELD_OUT_NUMBERS]

TOOL = {"name": "calculator"}
"""The template of the toy shows the names of tools alone."""


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    """A turn of a chat."""
    return {"role": role, "content": content, **more}


def dialogues() -> Iterator[dict[str, Any]]:
    """Chats to imitate, in random order."""
    rng = random.Random(SEED)
    asked = [(word, number) for word in EXPRESSIONS for number in TRAIN_NUMBERS] * DIALOGUES
    rng.shuffle(asked)
    for word, number in asked:
        turns = [turn("user", f"{word} {number}"), turn("assistant", GIVES_UP)]
        if rng.random() < CALLS:
            arguments = {"expression": EXPRESSIONS[word].format(number)}
            call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
            result = str(RESULTS[word](number))
            answer = turn("assistant", f"It is {result}")
            turns[1:] = [turn("assistant", "", tool_calls=[call]), turn("tool", result), answer]
        yield {"messages": turns, "tools": [TOOL]}


def problems(numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Questions with their right answers."""
    for word in EXPRESSIONS:
        for number in numbers:
            yield {"prompt": [turn("user", f"{word} {number}")], "answer": str(RESULTS[word](number))}


def as_jsonl(rows: Iterator[dict[str, Any]]) -> str:
    """A file's whole text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    return {
        "noisy.jsonl": as_jsonl(dialogues()),
        "train.jsonl": as_jsonl(problems(TRAIN_NUMBERS)),
        "held_out.jsonl": as_jsonl(problems(HELD_OUT_NUMBERS)),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")
