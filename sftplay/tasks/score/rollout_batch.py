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


class RolloutBatch(NamedTuple):
    """Episodes that were sampled together, with their results and advantages."""

    number: int
    scored: ScoredEpisodes
    advantages: Advantages


def save_rollout_batch(rollout_batch: RolloutBatch, checkpoint: Path) -> None:
    """Write what the next steps still learn from. Every rank must call it."""
    scored, advantages = rollout_batch.scored, rollout_batch.advantages
    resampled = [[action._asdict() for action in pair] for pair in scored.resampled]
    ranks = gather_objects(([_describe(episode) for episode in scored.episodes], resampled))
    if not log.is_main():
        return
    kept = {
        "number": rollout_batch.number,
        "episodes": [episode for episodes, _ in ranks for episode in episodes],
        "fresh": [pair for _, pairs in ranks for pair in pairs],
        "verdicts": [asdict(result) for result in scored.results],
        # JSON brings fp32 numbers back as they were.
        "credit": {
            "first": None if advantages.first is None else advantages.first.tolist(),
            "second": advantages.second.tolist(),
            "guide": advantages.guide.tolist(),
            "figures": advantages.figures,
            "paid": [turn.tolist() for turn in advantages.returns],
        },
    }
    write_text(checkpoint / EPISODES_FILE, json.dumps(kept))


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
        pairs = zip(kept["episodes"][rank_slice], questions, strict=True)
        episodes = [_read_episode(described, question) for described, question in pairs]
        resampled = [(Action(**first), Action(**second)) for first, second in kept["fresh"][rank_slice]]
        results = [EpisodeResult(**fields) for fields in kept["verdicts"]]
        scored = ScoredEpisodes(episodes, results, resampled)
        return RolloutBatch(kept["number"], scored, _read_advantages(kept["credit"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError(f"the episodes of its drawing cannot be read: {error}", where=str(path), fix=fix) from error


def _describe(episode: Episode) -> dict[str, Any]:
    return {
        "first": episode.first._asdict(),
        "hint": None if episode.hint is None else episode.hint._asdict(),
        "hint_ids": list(episode.hint_ids),
        "second": episode.second._asdict(),
    }


def _read_episode(described: dict[str, Any], question: Question) -> Episode:
    hint = None if described["hint"] is None else Action(**described["hint"])
    first, second = Action(**described["first"]), Action(**described["second"])
    return Episode(question=question, first=first, hint=hint, hint_ids=described["hint_ids"], second=second)


def _read_advantages(kept: dict[str, Any]) -> Advantages:
    def as_tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return Advantages(
        first=None if kept["first"] is None else as_tensor(kept["first"]),
        second=as_tensor(kept["second"]),
        guide=as_tensor(kept["guide"]),
        figures=kept["figures"],
        returns=(as_tensor(kept["paid"][0]), as_tensor(kept["paid"][1])),
    )
