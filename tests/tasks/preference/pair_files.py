"""Files of pairs, loaded as a run loads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.data.records import IGNORE_INDEX
from sftplay.tasks.preference.load_pairs import Pairs, load

WORDS = ("cat", "dog", "man", "sun", "red", "old", "cup", "pen", "map", "tin", "fog", "hen", "jar")


def write_pairs(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pair_config(
    home: Path, rows: Sequence[Any], *, task: str = "dpo", max_seq_len: int = 256, **data: Any
) -> RunConfig:
    """A config with `rows` as training rows; nothing is held out unless `split` or `val` (rows) says so."""
    values = {"train_path": str(write_pairs(home / "train.jsonl", rows)), "processed_dir": str(home / "processed")}
    for name in ("val", "test"):
        if held_out := data.pop(name, None):
            values[f"{name}_path"] = str(write_pairs(home / f"{name}.jsonl", held_out))
    section = data.pop("reward_model", None)
    split = {} if "val_path" in values else {"split": 0.0}
    tree = {"task_mode": task, "model": {"name": "x", "max_seq_len": max_seq_len}, "data": values | split | data}
    return RunConfig.model_validate(tree | ({"reward_model": section} if section else {}))


def load_pairs(home: Path, rows: Sequence[Any], tokenizer: Any, **options: Any) -> Pairs:
    return load(pair_config(home, rows, **options), tokenizer)


def sides(row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """The tokens of a row: its prompt, its chosen side, the other."""
    ids, prompt, chosen = row["input_ids"], row["prompt_tokens"], row["chosen_tokens"]
    return ids[:prompt], ids[prompt : prompt + chosen], ids[prompt + chosen :]


def learned(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """The text of the labels of each side."""
    cut = row["prompt_tokens"] + row["chosen_tokens"]
    parts = row["labels"][:cut], row["labels"][cut:]
    return tuple(tokenizer.decode([one for one in part if one != IGNORE_INDEX]) for part in parts)  # type: ignore[return-value]


def random_pairs(n: int, *, seed: int, longer: float = 0.5) -> list[dict[str, Any]]:
    """Pairs of random words; the chosen side is the longer one in a share `longer` of them."""
    random = Random(seed)

    def words(count: int) -> str:
        return "The " + " ".join(random.choice(WORDS) for _ in range(count)) + "."

    rows = []
    for number in range(n):
        short = random.randrange(3, 16)
        long = short + random.randrange(8, 16)  # in tokens too, of whatever vocabulary
        chosen, rejected = (long, short) if random.random() < longer else (short, long)
        rows.append({"prompt": f"{words(5)} {number}?", "chosen": words(chosen), "rejected": words(rejected)})
    return rows


def accounted(report: dict[str, Any]) -> bool:
    """Whether every row that was read is kept, cut, dropped or refused, in all and in each source."""
    return all(
        one["read"] == one["kept"] + one["cut"] + sum(one["dropped"].values()) + one["refused"]
        for one in (report, *report["sources"].values())
    )
