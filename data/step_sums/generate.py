"""Writes the problems of a toy for self-correction: four digits added step by step, modulo 5.

    4+3+1+0=   ->   233

The answer is the three running sums. A fifth of the 625 problems is held out, by a rule over all four digits, so each
step of a held-out problem occurs in others. The file is the same on every machine.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASE = 5


def is_held_out(digits: tuple[int, ...]) -> bool:
    """Whether a problem is never trained on. `builtin:steps` leaves the same ones out."""
    return sum(place * digit for place, digit in enumerate(digits, 1)) % BASE == 0


def row(digits: tuple[int, ...]) -> dict[str, str]:
    """A problem and its answer."""
    answer = [sum(digits[:n]) % BASE for n in (2, 3, 4)]
    return {"text": "+".join(map(str, digits)) + "=", "answer": "".join(map(str, answer))}


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    problems = list(itertools.product(range(BASE), repeat=4))
    return {
        name: "".join(json.dumps(row(digits)) + "\n" for digits in problems if is_held_out(digits) is held_out)
        for name, held_out in (("train.jsonl", False), ("held_out.jsonl", True))
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")
