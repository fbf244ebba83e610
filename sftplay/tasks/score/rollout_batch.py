"""What a checkpoint keeps of a drawing that is not used up: the episodes of all ranks, their verdicts and their worth.

With it a run goes on in the middle of a drawing as if it had not stopped, on any number of processes.
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
from sftplay.tasks.score.episode_rewards import Verdict
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.update import Played

FILE = "episodes.json"


class Drawing(NamedTuple):
    """Episodes that were played at once, and what each is worth."""

    number: int
    played: Played
    credit: Advantages


def save_drawing(drawing: Drawing, checkpoint: Path) -> None:
    """Write what the next steps still learn from. Every rank must call it."""
    episodes, fresh = drawing.played.episodes, drawing.played.fresh
    mine = [_described(episode) for episode in episodes], [[each._asdict() for each in pair] for pair in fresh]
    ranks = gather_objects(mine)
    if not log.is_main():
        return
    credit = drawing.credit._asdict()
    kept = {
        "number": drawing.number,
        "episodes": [each for shares, _ in ranks for each in shares],
        "fresh": [pair for _, pairs in ranks for pair in pairs],
        "verdicts": [asdict(verdict) for verdict in drawing.played.verdicts],
        "credit": {name: _plain(value) for name, value in credit.items()},
    }
    write_text(checkpoint / FILE, json.dumps(kept))


def load_drawing(checkpoint: Path, *, questions: Sequence[Question]) -> Drawing:
    """The drawing that `save_drawing` wrote. `questions` are those of this rank's episodes, in their order.

    Raises:
        RunError: it is missing, or cannot be read.
    """
    path = checkpoint / FILE
    n = len(questions)
    own = slice(log.rank() * n, (log.rank() + 1) * n)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        shares = zip(kept["episodes"][own], questions, strict=True)
        episodes = [_episode(each, question) for each, question in shares]
        fresh = [(Action(**one), Action(**two)) for one, two in kept["fresh"][own]]
        verdicts = [Verdict(**each) for each in kept["verdicts"]]
        return Drawing(kept["number"], Played(episodes, verdicts, fresh), _credit(kept["credit"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError(f"the episodes of its drawing cannot be read: {error}", where=str(path), fix=fix) from error


def _described(episode: Episode) -> dict[str, Any]:
    return {
        "first": episode.first._asdict(),
        "hint": None if episode.hint is None else episode.hint._asdict(),
        "hint_ids": list(episode.hint_ids),
        "second": episode.second._asdict(),
    }


def _episode(kept: dict[str, Any], question: Question) -> Episode:
    hint = None if kept["hint"] is None else Action(**kept["hint"])
    first, second = Action(**kept["first"]), Action(**kept["second"])
    return Episode(question=question, first=first, hint=hint, hint_ids=kept["hint_ids"], second=second)


def _plain(value: Any) -> Any:
    """fp32 numbers come back from JSON as they were."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [each.tolist() for each in value] if isinstance(value, tuple) else value


def _credit(kept: dict[str, Any]) -> Advantages:
    def tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return Advantages(
        first=None if kept["first"] is None else tensor(kept["first"]),
        second=tensor(kept["second"]),
        guide=tensor(kept["guide"]),
        figures=kept["figures"],
        paid=(tensor(kept["paid"][0]), tensor(kept["paid"][1])),
    )
