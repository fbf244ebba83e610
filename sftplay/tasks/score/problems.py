"""The order of a run's problems, and the minibatch of episodes that each optimizer step learns from.

A rollout batch is the episodes that are sampled together; the episodes of a problem are adjacent in it. It feeds one
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
from sftplay.config.run import RunConfig
from sftplay.data.order import order_hash, training_order
from sftplay.data.prompts.load import Prompts
from sftplay.generate.sampling import derive_seed
from sftplay.train.task import RowOrder


@dataclass(frozen=True, kw_only=True)
class MinibatchSchedule:
    """How a rollout batch is cut into minibatches of `step_episodes`, one for each of its optimizer steps.

    A pass over the batch (PPO's epoch) takes `minibatches` steps.
    """

    step_episodes: int
    minibatches: int = 1
    passes: int = 1
    seed: int = 0

    @classmethod
    def from_config(cls, cfg: RunConfig) -> MinibatchSchedule:
        """Read the schedule from a run's config."""
        passes, episodes = cfg.score.num_iterations, cfg.train.effective_batch_size
        return cls(step_episodes=episodes, minibatches=cfg.score.steps_per_generation, passes=passes, seed=cfg.seed)

    @property
    def steps(self) -> int:
        """Optimizer steps of a rollout batch."""
        return self.minibatches * self.passes

    @property
    def episodes(self) -> int:
        """Episodes of a rollout batch."""
        return self.minibatches * self.step_episodes

    def find_place(self, row: int) -> int:
        """Return the place of the episode at `row` of the training order, which lists the steps in sequence.

        Every `minibatches` adjacent episodes are shuffled over as many steps. So a step gets an episode of every
        problem, or nearly, and a rank's steps together have the episodes that the rank has sampled.
        """
        step, at = divmod(row, self.step_episodes)
        batch, step = divmod(step, self.steps)
        number, minibatch = divmod(step, self.minibatches)
        first = (batch * self.step_episodes + at) * self.minibatches
        random = Random(derive_seed(derive_seed(self.seed, batch * self.passes + number), at)).random
        keys = [random() for _ in range(self.minibatches)]
        return first + sorted(range(self.minibatches), key=keys.__getitem__)[minibatch]

    def rank_places(self, batch: int) -> range:
        """Return the adjacent places of the episodes that this rank samples."""
        share = self.episodes // log.world_size()
        first = batch * self.episodes + log.rank() * share
        return range(first, first + share)


class StepRows:
    """The episodes of all optimizer steps in sequence; each of `problems` has `repeats` adjacent episodes."""

    def __init__(self, problems: Sequence[int], *, repeats: int, schedule: MinibatchSchedule, steps: int) -> None:
        self.problems, self.repeats, self.schedule = problems, repeats, schedule
        self._length = steps * schedule.step_episodes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        place = self.schedule.find_place(row)
        return {"place": place, "row": self.find_problem(place)}

    def find_problem(self, place: int) -> int:
        """Return the number of an episode's problem."""
        return self.problems[place // self.repeats]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack `place` and `row` (the number of the problem), int64 [episodes]."""
    return {key: torch.tensor([row[key] for row in rows]) for key in ("place", "row")}


def create_run_order(cfg: RunConfig, prompts: Prompts) -> tuple[StepRows, RowOrder]:
    """Return the episodes of the whole run, and the order that the run's setup records."""
    score, n, schedule = cfg.score, len(prompts.train), MinibatchSchedule.from_config(cfg)
    steps = cfg.train.max_steps or score.stage1_steps + score.stage2_steps
    problems_per_batch = schedule.episodes // score.episodes_per_problem
    order = training_order(n, math.ceil(steps / schedule.steps) * problems_per_batch, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    known = RowOrder(steps=steps, steps_per_epoch=math.ceil(n / problems_per_batch) * schedule.steps, digest=digest)
    return StepRows(order, repeats=score.episodes_per_problem, schedule=schedule, steps=steps), known
