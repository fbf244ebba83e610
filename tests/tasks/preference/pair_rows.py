"""Rows of pairs in the columns that `load_pairs` writes, and their two texts apart."""

from __future__ import annotations

import random
from typing import Any

IGNORE = -100


def make_pairs(n: int, seed: int = 0, vocab: int = 400, *, kto: bool = False) -> list[dict[str, Any]]:
    """Ragged pairs of random tokens; some completions have a turn in between that is not learned. With `kto` the second
    completion is a mismatched one, and every row says whether the first is wanted.
    """
    rng, rows = random.Random(seed), []

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(rng.randint(1, most))]

    for number in range(n):
        prompt, sides = tokens(20), [tokens(12), tokens(30)]
        labels = [IGNORE] * len(prompt)
        for side in sides:
            gap = rng.randint(1, 3) if len(side) > 6 else 0
            labels += [IGNORE if 2 <= place < 2 + gap else token for place, token in enumerate(side)]
        row = {
            "input_ids": prompt + sides[0] + sides[1],
            "labels": labels,
            "prompt_tokens": len(prompt),
            "chosen_tokens": len(sides[0]),
            "row": 100 + number,
            "index": number,
        }
        rows.append(row | ({"desirable": rng.random() < 0.6} if kto else {}))
    return rows


def apart(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's two texts: token ids and labels of the prompt with each completion."""
    p, end = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    return [
        {key: row[key][:p] + row[key][part] for key in ("input_ids", "labels")}
        for part in (slice(p, end), slice(end, None))
    ]
