"""A toy task: the model reads rows of numbers and learns to predict the next one.

A row is `{"text": "3 1 4 1 5"}`. docs/extending.md copies this folder to sftplay/tasks/.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.evaluate.evaluate import held_out_loss
from sftplay.tasks.sft import task as sft
from sftplay.train.task import Rows, TrainerParts

FIRST_ID = 3
"""Token id of the number 0: the ids before it are special."""


def load_rows(cfg: RunConfig, _: Any) -> Rows:
    """Return the numbers as token ids, each one the label of those before it."""
    content = Path(cfg.data.train_path).read_bytes()
    rows, every = [], cfg.get_value("numbers.held_out_every")
    for n, line in enumerate(content.splitlines()):
        ids = [FIRST_ID + int(number) for number in json.loads(line)["text"].split()]
        rows.append({"input_ids": ids, "labels": ids, "row": n})
    return Rows(
        train=Dataset.from_list([row for row in rows if row["row"] % every]),
        held_out=Dataset.from_list([row for row in rows if row["row"] % every == 0]),
        report={"files": {cfg.data.train_path: hashlib.sha256(content).hexdigest()}, "sources": {}, "read": len(rows)},
    )


def report_rows(rows: Rows, _tokenizer: Any, **_: Any) -> None:
    """Say how many rows there are."""
    log.say(f"{len(rows.train)} rows of numbers to train on")


def measure(model: Any, rows: Rows, *, path: Path, **_: Any) -> None:
    """Write the mean loss of the next number over the held-out rows."""
    figures = {"n": len(rows.held_out or ()), "loss": held_out_loss(model, rows.held_out, pad_token_id=0)}
    write_text(path, json.dumps(figures) + "\n")


def build_trainer(parts: TrainerParts) -> Any:
    """Return the trainer of SFT: its loss of the next token is that of the next number."""
    return sft.build_trainer(parts)
