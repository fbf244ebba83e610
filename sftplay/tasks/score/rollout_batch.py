"""Problems in training order, and the rollout batch of their episodes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Prompts, Question
from sftplay.data.order import order_hash, training_order
from sftplay.errors import RunError
from sftplay.generate.generate import derive_seed
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.episode_rewards import EpisodeResult
from sftplay.tasks.score.losses import Advantages
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.update import ScoredEpisodes
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


EPISODES_FILE = "episodes.json"

RENAMED = {"leak": "leaks"}
"""Field of `EpisodeResult` -> its key in the file."""


class RolloutBatch(NamedTuple):
    """Episodes that were sampled together, with their results and advantages."""

    number: int
    scored: ScoredEpisodes
    advantages: Advantages


def save_rollout_batch(rollout_batch: RolloutBatch, checkpoint: Path) -> None:
    """Write what the next steps still learn from. Every rank must call it."""
    scored, advantages = rollout_batch.scored, rollout_batch.advantages._asdict()
    episodes = [
        {name: part._asdict() if isinstance(part, Action) else part for name, part in episode._asdict().items()}
        for episode in scored.episodes
    ]
    for episode in episodes:
        del episode["question"]
    resampled = [[action._asdict() for action in pair] for pair in scored.resampled]
    ranks = gather_objects((episodes, resampled))
    if log.is_main():
        advantages["paid"] = advantages.pop("returns")
        kept = {
            "number": rollout_batch.number,
            "episodes": [episode for episodes, _ in ranks for episode in episodes],
            "fresh": [pair for _, pairs in ranks for pair in pairs],
            "verdicts": [{RENAMED.get(key, key): v for key, v in asdict(result).items()} for result in scored.results],
            "credit": advantages,
        }
        # JSON brings fp32 numbers back as they were.
        write_text(checkpoint / EPISODES_FILE, json.dumps(kept, default=Tensor.tolist))


def load_rollout_batch(checkpoint: Path, *, questions: Sequence[Question]) -> RolloutBatch:
    """Read what `save_rollout_batch` wrote; `questions` are those of this rank's episodes, in their order.

    Raise RunError where the file is missing, or cannot be read.
    """
    path, n = checkpoint / EPISODES_FILE, len(questions)
    rank_slice = slice(log.rank() * n, (log.rank() + 1) * n)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        episodes = []
        for described, question in zip(kept["episodes"][rank_slice], questions, strict=True):
            parts: dict[str, Any] = {
                name: Action(**part) if isinstance(part, dict) else part for name, part in described.items()
            }
            episodes.append(Episode(question=question, **parts))
        resampled = [(Action(**first), Action(**second)) for first, second in kept["fresh"][rank_slice]]
        renamed = {key: name for name, key in RENAMED.items()}
        results = [EpisodeResult(**{renamed.get(key, key): v for key, v in row.items()}) for row in kept["verdicts"]]
        credit = kept["credit"]
        turns = (credit["first"], credit["second"], credit["guide"], *credit["paid"])
        first, second, guide, *returns = (None if turn is None else torch.tensor(turn) for turn in turns)
        advantages = Advantages(first, second, guide, credit["figures"], (returns[0], returns[1]))
        return RolloutBatch(kept["number"], ScoredEpisodes(episodes, results, resampled), advantages)
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"the episodes of its rollout batch cannot be read: {error}"
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError(what, where=str(path), fix=fix) from error
