"""The YAML of a small run: a tiny model, a few rows, a few steps; and the words of its rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = [
    "the", "river", "stone", "walks", "under", "green", "light", "and", "asks", "why",
    "seven", "old", "boats", "carry", "salt", "over", "quiet", "hills",
]  # fmt: skip
"""Words of the rows that tests write."""


@dataclass(frozen=True)
class Inputs:
    """The files a run starts from."""

    model: Path
    train: Path
    held_out: Path


def write_small_run(home: Path, inputs: Inputs, name: str = "run.yaml", **changes: Any) -> Path:
    """The file, below `home`; keyword `a__b=c` sets the key a.b."""
    values: dict[str, Any] = {
        "run_name": "run",
        "output_dir": str(home / "outputs"),
        "model": {"name": str(inputs.model), "max_seq_len": 128},
        "tuning": {"mode": "lora", "lora": {"r": 4}},
        "train": {"max_steps": 4, "effective_batch_size": 8, "learning_rate": 0.01, "gradient_checkpointing": False},
        "data": {
            "train_path": str(inputs.train),
            "val_path": str(inputs.held_out),
            "processed_dir": str(home / "processed"),
        },
        "logging": {"steps": 1, "backend": "none", "row_ids": True},
        "eval": {"limit": 4, "max_new_tokens": 4},
    }
    return write_values(home / name, values, changes)


def write_values(target: Path, values: dict[str, Any], changes: dict[str, Any]) -> Path:
    """The YAML of a config with changes; the key `a__b` of a change means a.b."""
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        branch = values
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(values, indent=1))  # JSON is YAML
    return target
