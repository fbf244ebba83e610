"""Answers to prompts, and what the rewards of a config say of them: the figures of an evaluation, and every answer.

It asks no model: whoever has the answers has them judged here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sftplay.atomic import write_text
from sftplay.config.schema.run import RewardConfig
from sftplay.reward.reward_set import RewardSet, combined
from sftplay.reward.table import judges_form

PASS = "pass"
"""Share of the answers that every reward for content gives its full 1. Rewards for form are left out of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A held-out prompt: its number among those that are asked, its words, and the columns that rewards read."""

    row: int
    question: str
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer, and what the rewards say of it."""

    asked: Asked
    answer: str
    n_tokens: int
    rewards: dict[str, float | None]
    reward: float | None
    """Their weighted sum."""

    verdict: dict[str, Any] | None

    def passes(self, content: Sequence[str]) -> bool | None:
        """Whether each of the rewards `content` gives 1; None where one has no value, or there are none."""
        values = [self.rewards[name] for name in content]
        known = [value for value in values if value is not None]
        return None if len(known) < len(values) or not values else min(known) >= 1.0

    def as_json(self, content: Sequence[str]) -> dict[str, Any]:
        """A line of eval/step-N.jsonl."""
        return {
            "row": self.asked.row,
            "prompt": self.asked.question,
            "reference": self.asked.columns.get("answer"),
            "prediction": self.answer,
            "correct": self.passes(content),
            "rewards": self.rewards,
            "reward": self.reward,
            "verdict": self.verdict,
        }


def content_rewards(rewards: Sequence[RewardConfig]) -> list[str]:
    """Names of the rewards that only a right answer gets in full."""
    return [reward.name for reward in rewards if not judges_form(reward)]


def judge_answers(
    reward_set: RewardSet, asked: Sequence[Asked], *, answers: Sequence[str], n_tokens: Sequence[int]
) -> list[Judged]:
    """What the rewards say of each answer; `answers` and their lengths in tokens are aligned with `asked`."""
    if not asked:
        return []
    shared = set.intersection(*(set(each.columns) for each in asked))
    columns = {name: [each.columns[name] for each in asked] for name in sorted(shared)}
    scored = reward_set.score(list(answers), columns)
    by_answer = zip(*(scores.values for scores in scored.by_name.values()), strict=True)
    together = zip(
        asked, answers, n_tokens, by_answer, combined(scored, reward_set.weights), scored.verdicts, strict=True
    )
    return [
        Judged(prompt, answer, length, dict(zip(scored.by_name, values, strict=True)), reward, verdict)
        for prompt, answer, length, values, reward, verdict in together
    ]


def figures_of(judged: Sequence[Judged], *, rewards: Sequence[RewardConfig]) -> dict[str, Any]:
    """`n`, `reward` and `reward/NAME` (means of what is known), `pass`, counts by status, and what is not known."""
    content = content_rewards(rewards)
    named = {f"reward/{reward.name}": [each.rewards[reward.name] for each in judged] for reward in rewards}
    measures: dict[str, list[Any]] = {
        "reward": [each.reward for each in judged],
        **named,
        PASS: [each.passes(content) for each in judged],
    }
    means = {key: fmean(known) for key, values in measures.items() if (known := [v for v in values if v is not None])}
    abstained = {reward.name: named[f"reward/{reward.name}"].count(None) for reward in rewards}
    statuses = Counter(each.verdict["status"] for each in judged if each.verdict)
    return {
        "n": len(judged),
        **means,
        "completion_tokens": fmean(each.n_tokens for each in judged),
        "abstained": {name: count for name, count in abstained.items() if count},
        **({"statuses": dict(sorted(statuses.items()))} if statuses else {}),
    }


def write_evaluation(
    path: Path, *, figures: Mapping[str, Any], judged: Sequence[Judged], rewards: Sequence[RewardConfig]
) -> None:
    """Write the figures to `path` (.json) and every answer beside it (.jsonl); figures come last."""
    content = content_rewards(rewards)
    lines = (json.dumps(each.as_json(content), ensure_ascii=False, default=str) + "\n" for each in judged)
    write_text(path.with_suffix(".jsonl"), "".join(lines))
    write_text(path, json.dumps(figures, indent=1) + "\n")
