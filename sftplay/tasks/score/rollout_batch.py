"""Save and load a rollout batch that is not used up: the episodes of all ranks, their results and advantages.

With it a run resumes in the middle of a rollout batch as if it had not stopped, on any number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sftplay import log
from sftplay.atomic import write_text
from sftplay.data.prompts.questions import Question
from sftplay.errors import RunError
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.advantages import Advantages
from sftplay.tasks.score.episode_rewards import EpisodeResult
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.update import ScoredEpisodes

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

    Raises:
        RunError: the file is missing, or cannot be read.
    """
    path = checkpoint / EPISODES_FILE
    n = len(questions)
    rank_slice = slice(log.rank() * n, (log.rank() + 1) * n)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        episodes, parts = [], dict[str, Any]()
        for described, question in zip(kept["episodes"][rank_slice], questions, strict=True):
            parts = {name: Action(**part) if isinstance(part, dict) else part for name, part in described.items()}
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
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError(
            f"the episodes of its rollout batch cannot be read: {error}", where=str(path), fix=fix
        ) from error
