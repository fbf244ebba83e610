"""The problems of a run in the order in which they are played: each as often as it has episodes, side by side."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sftplay.config.schema.run import RunConfig
from sftplay.data.order import order_hash, training_order
from sftplay.data.prompts.load import Prompts
from sftplay.tasks.run.task import RowOrder


class EpisodeRows:
    """Places of episodes; `problems` in order, `each` episodes of a problem one after the other."""

    def __init__(self, problems: Sequence[int], *, each: int) -> None:
        self.problems, self.each = problems, each

    def __len__(self) -> int:
        return len(self.problems) * self.each

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < len(self):
            raise IndexError(place)
        return {"place": place, "row": self.problems[place // self.each]}


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """`place` and `row` (the number of the problem), int64 [episodes]."""
    return {key: torch.tensor([row[key] for row in rows]) for key in ("place", "row")}


def run_order(cfg: RunConfig, prompts: Prompts) -> tuple[EpisodeRows, RowOrder]:
    """The episodes of the whole run, and what a run's set-up needs to know of them."""
    score, n = cfg.score, len(prompts.train)
    steps = cfg.train.max_steps or score.stage1_steps + score.stage2_steps
    at_once = cfg.train.effective_batch_size // score.episodes_per_problem
    order = training_order(n, steps * at_once, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    known = RowOrder(steps=steps, steps_per_epoch=math.ceil(n / at_once), digest=digest)
    return EpisodeRows(order, each=score.episodes_per_problem), known
