"""The rewards of a config as measures of a model's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.records import Chat
from sftplay.reward.table import missing_column


def score_by_rewards(
    cfg: RunConfig, answers: Sequence[str], *, columns: Mapping[str, Sequence[Any]]
) -> dict[str, list[float | None]]:
    """Return name of a reward -> its value for each answer, None where unknown. `columns` are aligned with them.

    A shipped reward that reads another column is left out, and that is said.
    """
    measured = []
    for reward in cfg.rewards:
        if missing := missing_column(reward, columns):
            log.say(f"note: the reward {reward.name} is not measured: it reads the column {missing}", "eval")
        else:
            measured.append(reward)
    if not measured:
        return {}
    from sftplay.reward.reward_set import RewardSet  # brings the sandbox

    with RewardSet(cfg.model_copy(update={"rewards": measured})) as rewards:
        scored = rewards.score(answers, columns)
    for name, scores in scored.by_name.items():
        if count := scores.values.count(None):
            log.say(f"note: {name} gives no value for {count:,} answers: {'; '.join(scores.reasons)}", "eval")
    return {name: scores.values for name, scores in scored.by_name.items()}


def collect_columns(chats: Sequence[Chat], references: Sequence[str]) -> dict[str, list[Any]]:
    """Return what rewards read of held-out chats: `answer`, their reference, and the columns that all of them have."""
    rows = [json.loads(chat.columns) if chat.columns else {} for chat in chats]
    shared = set.intersection(*map(set, rows)) if rows else set()
    return {name: [row[name] for row in rows] for name in sorted(shared)} | {"answer": list(references)}


def mean_rewards(scores: dict[str, list[float | None]]) -> dict[str, float]:
    """Return `reward/NAME` -> mean of the values that are known; a reward without any is left out."""
    known = {name: [value for value in values if value is not None] for name, values in scores.items()}
    return {f"reward/{name}": sum(values) / len(values) for name, values in known.items() if values}
