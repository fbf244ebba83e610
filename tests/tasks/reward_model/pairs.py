"""Pairs of which the one is better that ends in the word "salt", and runs on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from small_run import WORDS, Inputs


def write_pairs(path: Path, count: int, *, seed: int, **columns: Any) -> Path:
    """Write ragged pairs; `columns` are further ones of every row."""
    rng = random.Random(seed)
    lines = []
    for n in range(count):
        prompt = f"{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        words = [" ".join(rng.choices(WORDS[:13], k=rng.choice([1, 2, 5, 9]))) for _ in range(2)]
        lines.append(json.dumps({"prompt": prompt, "chosen": f"{words[0]} salt", "rejected": words[1], **columns}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def pair_inputs(model: Path, folder: Path, **columns: Any) -> Inputs:
    train = write_pairs(folder / "train.jsonl", 60, seed=1, **columns)
    return Inputs(model, train, write_pairs(folder / "held_out.jsonl", 12, seed=2, **columns))


RUN = {"task_mode": "reward_model", "train__learning_rate": 0.01, "eval__limit": 12}
"""Changes of a small run that make it one on pairs."""
