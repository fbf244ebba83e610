"""The problems of a run in the order in which they are played, and the episodes that each optimizer step learns from.

A drawing is the episodes that are played at once: each problem as often as it has episodes, side by side. It feeds one
optimizer step, or several.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.order import order_hash, training_order
from sftplay.data.prompts.load import Prompts
from sftplay.generate.sampling import seed_of
from sftplay.train.task import RowOrder


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


@dataclass(frozen=True, kw_only=True)
class MinibatchSchedule:
    """Which episodes of a drawing each of its optimizer steps learns from."""

    step_episodes: int
    """Episodes of an optimizer step."""

    portions: int = 1
    """Steps to which a drawing is dealt."""

    passes: int = 1
    """How often it is dealt."""

    seed: int = 0

    @classmethod
    def of(cls, cfg: RunConfig) -> MinibatchSchedule:
        """That of a run."""
        score, episodes = cfg.score, cfg.train.effective_batch_size
        return cls(
            step_episodes=episodes, portions=score.steps_per_generation, passes=score.num_iterations, seed=cfg.seed
        )

    @property
    def steps(self) -> int:
        """Optimizer steps that a drawing feeds."""
        return self.portions * self.passes

    @property
    def episodes(self) -> int:
        """Episodes of a drawing."""
        return self.portions * self.step_episodes

    def place(self, row: int) -> int:
        """The place of the episode that is learned from as number `row`, steps one after the other.

        Every `portions` neighbours are dealt to as many steps in an order of their own. So each step gets an episode of
        every problem, or nearly, and a rank's steps together have the episodes that the rank has played.
        """
        step, at = divmod(row, self.step_episodes)
        drawing, step = divmod(step, self.steps)
        number, portion = divmod(step, self.portions)
        first = (drawing * self.step_episodes + at) * self.portions
        draw = Random(seed_of(seed_of(self.seed, drawing * self.passes + number), at)).random
        keys = [draw() for _ in range(self.portions)]
        return first + sorted(range(self.portions), key=keys.__getitem__)[portion]

    def own(self, drawing: int) -> range:
        """Places of the episodes that this rank plays, side by side."""
        share = self.episodes // log.world_size()
        first = drawing * self.episodes + log.rank() * share
        return range(first, first + share)


class StepRows:
    """The episodes of all optimizer steps, one step after the other."""

    def __init__(self, episodes: EpisodeRows, *, dealing: MinibatchSchedule, steps: int) -> None:
        self.episodes, self.dealing = episodes, dealing
        self._length = steps * dealing.step_episodes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.episodes[self.dealing.place(row)]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """`place` and `row` (the number of the problem), int64 [episodes]."""
    return {key: torch.tensor([row[key] for row in rows]) for key in ("place", "row")}


def run_order(cfg: RunConfig, prompts: Prompts) -> tuple[StepRows, RowOrder]:
    """The episodes of the whole run, and what a run's set-up needs to know of them."""
    score, n, dealing = cfg.score, len(prompts.train), MinibatchSchedule.of(cfg)
    steps = cfg.train.max_steps or score.stage1_steps + score.stage2_steps
    at_once = dealing.episodes // score.episodes_per_problem
    order = training_order(n, math.ceil(steps / dealing.steps) * at_once, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    known = RowOrder(steps=steps, steps_per_epoch=math.ceil(n / at_once) * dealing.steps, digest=digest)
    episodes = EpisodeRows(order, each=score.episodes_per_problem)
    return StepRows(episodes, dealing=dealing, steps=steps), known
