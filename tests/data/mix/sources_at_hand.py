"""Rows of documents and chats, and comparisons of the rows that a mixture makes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from sftplay.data.mixture.load import MixtureRows
from tests.data.conftest import WORDS


def document(n: int, words: int) -> dict[str, str]:
    generator = random.Random(n)
    return {"text": f"Number {n}. " + " ".join(generator.choices(WORDS, k=words))}


def chat(n: int) -> dict[str, str]:
    generator = random.Random(n)
    return {
        "prompt": f"Which stone is number {n}?",
        "completion": " ".join(generator.choices(WORDS, k=generator.randint(1, 9))),
    }


def read_rows(rows: MixtureRows, n: int | None = None) -> list[dict[str, Any]]:
    return [rows.train[number] for number in range(len(rows.train) if n is None else n)]


def same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    return len(one) == len(two) and all(
        a["row"] == b["row"] and all(np.array_equal(a[key], b[key]) for key in ("input_ids", "labels", "position_ids"))
        for a, b in zip(one, two, strict=True)
    )


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
