"""Environments and tools that hang, die, print, raise and return what they should not: what tests load by path."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import time
from typing import Any

import numpy

HANGS_S = 600


class Game:
    """Does what it is told: the model's text is an order."""

    def __init__(self, limit: int) -> None:
        self.limit, self.turns = limit, 0
        self.tools = [self.peek]

    def reset(self, row: dict[str, Any]) -> str | None:
        if row.get("broken"):
            raise ValueError(row["broken"])
        self.number = random.randrange(10**9)
        return row.get("first")

    def step(self, text: str) -> Any:
        self.turns += 1
        return act(text, self.number) or (f"turn {self.turns}", 0.5, self.turns >= self.limit)

    def peek(self) -> str:
        """Look at the turns so far."""
        return f"{self.turns} turns"


def act(order: str, number: int) -> Any:
    if order == "hang":
        while True:
            time.sleep(HANGS_S)
    if order == "die":
        os._exit(7)
    if order == "crash":
        ctypes.string_at(0)
    if order == "kill":
        os.kill(os.getpid(), 40)  # a signal without a name
    if order == "child":
        subprocess.Popen(["sleep", str(HANGS_S)])
        time.sleep(HANGS_S)
    if order == "daemon":
        return str(subprocess.Popen(["sleep", str(HANGS_S)], start_new_session=True).pid), 0.0, False
    if order == "numpy":
        return str(numpy.random.rand()), 0.0, False
    if order.startswith("variable "):
        return os.environ.get(order.split()[1], "unset"), 0.0, False
    if order == "print":
        for _ in range(200):
            print("x" * 1_000_000)
            os.write(1, b"y" * 1000)
    if order == "raise":
        raise LookupError("no such thing")
    if order == "exit":
        raise SystemExit(3)
    wrong = {
        "bytes": (b"text", 1.0, False), "two": ("text", 1.0), "none": (None, 1.0, False),
        "nan": ("text", float("nan"), False), "word": ("text", "much", False), "maybe": ("text", 1.0, "no"),
        "half": ("\ud800", 1.0, False), "number": (str(number), 0.0, True), "nothing": None,
    }  # fmt: skip
    if order == "big":
        return "x" * 200_000_000, 1.0, False
    return wrong.get(order)


def make(limit: int = 2) -> Game:
    return Game(limit)


def make_with_server(pid_file: str) -> Game:
    with open(pid_file, "w") as file:
        file.write(str(subprocess.Popen(["sleep", str(HANGS_S)], start_new_session=True).pid))
    return Game(2)


def make_broken() -> Game:
    raise RuntimeError("no board")


def make_nothing() -> str:
    return "no environment"


STATE: list[str] = []


def order(text: str) -> Any:
    """Do what the text says.

    Args:
        text: The order.
    """
    if text == "remember":
        STATE.append(text)
        return len(STATE)
    if text in ("object", "value"):
        return object() if text == "object" else {"found": [1, 2.5, True]}
    if text == "void":
        return None
    found = act(text, 0)
    return found[0] if isinstance(found, tuple) else text.upper()


def count() -> int:
    """Count what is remembered."""
    return len(STATE)


def scale(number: int, *, factor: int = 2) -> int:
    """Scale a number.

    Args:
        number: What is scaled.
    """
    return number * factor


class Deaf(Game):
    def reset(self) -> None:  # type: ignore[override]
        """Takes no row."""


def make_deaf() -> Deaf:
    return Deaf(2)


async def later(number: int) -> int:
    """Scale a number later."""
    return number


def nameless(number: int, /) -> int:
    """Scale a number without a name."""
    return number


def unready(number: int) -> int:
    """Scale a number, with a file that is not there."""
    return number


def open_nothing() -> None:
    raise LookupError("no index")


unready.prepare = open_nothing  # type: ignore[attr-defined]


def untyped(x):
    """Has no types."""
    return x
