"""Writes the files of a toy for preferences: a thing and a number in, one of two forms out, and pairs say which.

    goat 57   ->   57 x goat     (what lives is counted first)
    lamp 57   ->   lamp: 57      (what does not is named first)

mixed.jsonl holds chats to imitate, in which both forms stand equally often behind every thing. A model that has learned
them knows the forms, and not the rule. pairs.jsonl holds pairs: the form that the rule wants, and the other one.
held_out.jsonl holds pairs with numbers that occur in neither file. One fixed seed: the files are the same on every
machine.

Each form is wanted behind half of the things, so that liking one of them better says nothing about the rule, and as it
is the longer one for half of the pairs, neither does liking long answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEED = 33
HERE = Path(__file__).resolve().parent

LIVING = [
    "ant", "bat", "bear", "bee", "calf", "cat", "cow", "crab", "crow", "deer", "dog", "dove", "duck", "eagle",
    "fox", "frog", "goat", "goose", "hare", "hawk", "hen", "horse", "lamb", "lion", "mole", "moth", "mouse", "mule",
    "owl", "ox", "pig", "rat", "seal", "sheep", "snail", "swan", "toad", "trout", "wasp", "wolf",
]  # fmt: skip
LIFELESS = [
    "axe", "bag", "bell", "bolt", "book", "boot", "bowl", "box", "brick", "broom", "chain", "chair", "clock",
    "coat", "cup", "desk", "door", "drum", "fork", "glove", "hat", "key", "knife", "lamp", "mat", "mug", "nail",
    "pan", "pen", "pot", "ring", "rope", "rug", "saw", "sock", "spoon", "stool", "table", "tent", "vase",
]  # fmt: skip
THINGS = LIVING + LIFELESS

HELD_OUT_NUMBERS = range(10, 100, 3)
TRAIN_NUMBERS = [number for number in range(10, 100) if number not in HELD_OUT_NUMBERS]

IMITATED = 24
"""Chats for each thing; half of them in each form."""

PAIRS = 12
HELD_OUT_PAIRS = 3
"""Pairs for each thing, each with another number."""


def forms(thing: str, number: int) -> tuple[str, str]:
    """Both answers: the one that the rule wants, and the other one."""
    counted, named = f"{number} x {thing}", f"{thing}: {number}"
    return (counted, named) if thing in LIVING else (named, counted)


def turn(role: str, content: str) -> dict[str, str]:
    """A turn of a chat."""
    return {"role": role, "content": content}


def chats() -> Iterator[dict[str, Any]]:
    """Chats in random order, half of each thing's in each form."""
    rng = random.Random(SEED)
    rows = [
        (thing, number, form)
        for thing in THINGS
        for form in (0, 1)
        for number in rng.sample(TRAIN_NUMBERS, IMITATED // 2)
    ]
    rng.shuffle(rows)
    for thing, number, form in rows:
        yield {"messages": [turn("user", f"{thing} {number}"), turn("assistant", forms(thing, number)[form])]}


def pairs(numbers: Iterable[int], count: int, name: str) -> Iterator[dict[str, Any]]:
    """`count` pairs for each thing, in random order."""
    rng = random.Random(f"{SEED} {name}")
    rows = [(thing, number) for thing in THINGS for number in rng.sample(list(numbers), count)]
    rng.shuffle(rows)
    for thing, number in rows:
        chosen, rejected = forms(thing, number)
        yield {"prompt": f"{thing} {number}", "chosen": chosen, "rejected": rejected}


def as_jsonl(rows: Iterator[dict[str, Any]]) -> str:
    """A file's whole text."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    return {
        "mixed.jsonl": as_jsonl(chats()),
        "pairs.jsonl": as_jsonl(pairs(TRAIN_NUMBERS, PAIRS, "train")),
        "held_out.jsonl": as_jsonl(pairs(HELD_OUT_NUMBERS, HELD_OUT_PAIRS, "held out")),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")
