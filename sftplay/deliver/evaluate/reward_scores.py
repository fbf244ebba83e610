"""The rewards of a config as measures of a model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from sftplay import log
from sftplay.config.schema.run import RewardConfig
from sftplay.reward.calls import RewardCall
from sftplay.reward.table import SHIPPED


def score_by_rewards(
    rewards: Sequence[RewardConfig], answers: Sequence[str], *, references: Sequence[str]
) -> dict[str, list[float | None]]:
    """Name of a reward -> its value for each answer; None where nothing is known.

    Answers come with the one column `answer`, their reference. A shipped reward that reads other columns is left out,
    and that is said.
    """
    scores: dict[str, list[float | None]] = {}
    for reward in rewards:
        columns = SHIPPED[reward.use].columns if reward.use in SHIPPED else ()
        if missing := [name for name in columns if name != "answer" and name not in reward.options]:
            log.say(f"note: the reward {reward.name} is not measured: it reads the column {missing[0]}", "eval")
            continue
        with closing(RewardCall(reward.use, reward.options, deadline_s=reward.deadline)) as call:
            found = call(list(answers), answer=list(references))
        scores[reward.name] = found.values
        if None in found.values:
            said = "; ".join(found.reasons)
            log.say(f"note: {reward.name} gives no value for {found.values.count(None):,} answers: {said}", "eval")
    return scores


def mean_rewards(scores: dict[str, list[float | None]]) -> dict[str, float]:
    """`reward/NAME` -> mean of the values that are known; a reward without any is left out."""
    known = {name: [value for value in values if value is not None] for name, values in scores.items()}
    return {f"reward/{name}": sum(values) / len(values) for name, values in known.items() if values}
