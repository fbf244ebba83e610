"""Answers to prompts, and what the rewards of a config say of them: the figures of an evaluation, and every answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.rewards import RewardConfig
from sftplay.config.run import RunConfig
from sftplay.data.prompts.load import Prompts
from sftplay.data.prompts.questions import Question, Questions
from sftplay.evaluate.code import mean_pass_at_k
from sftplay.evaluate.evaluate import ready_to_answer
from sftplay.generate.generate import Generator, answer_all
from sftplay.reward.reward_set import RewardSet, aligned, combined
from sftplay.reward.table import judges_form

PASS = "pass"
"""Share of the answers that every reward for content gives its full 1. Rewards for form are left out of it."""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """One answer, and what the rewards say of it."""

    asked: Question
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


def reward_answers(
    reward_set: RewardSet,
    asked: Sequence[Question],
    *,
    columns: Sequence[str],
    answers: Sequence[str],
    n_tokens: Sequence[int],
) -> list[Rewarded]:
    """What the rewards say of each answer; `answers` and their lengths in tokens are aligned with `asked`.

    `columns` are those that any row has.
    """
    scored = reward_set.score(list(answers), aligned([question.columns for question in asked], columns))
    by_answer = zip(*(scores.values for scores in scored.by_name.values()), strict=True)
    values = [dict(zip(scored.by_name, each, strict=True)) for each in by_answer]
    sums = combined(scored, reward_set.weights)
    return [Rewarded(*each) for each in zip(asked, answers, n_tokens, values, sums, scored.verdicts, strict=True)]


def compute_figures(answers: Sequence[Rewarded], *, rewards: Sequence[RewardConfig]) -> dict[str, Any]:
    """Compute `n`, `reward` and `reward/NAME` (means of known values), `pass` and its standard error, `hidden_pass`,
    counts by status, and counts of unknown values."""
    content = content_rewards(rewards)
    named = {f"reward/{reward.name}": [each.rewards[reward.name] for each in answers] for reward in rewards}
    measures: dict[str, list[Any]] = {
        "reward": [each.reward for each in answers],
        **named,
        PASS: [each.passes(content) for each in answers],
        "hidden_pass": [(each.verdict or {}).get("hidden_pass") for each in answers],
    }
    means = {key: fmean(known) for key, values in measures.items() if (known := [v for v in values if v is not None])}
    abstained = {reward.name: named[f"reward/{reward.name}"].count(None) for reward in rewards}
    statuses = Counter(each.verdict["status"] for each in answers if each.verdict)
    right = [int(known) for known in measures[PASS] if known is not None]
    return {
        "n": len(answers),
        **means,
        **({"pass_stderr": mean_pass_at_k(right, n=1, k=1)[1]} if right else {}),
        "completion_tokens": fmean(each.n_tokens for each in answers),
        "abstained": {name: count for name, count in abstained.items() if count},
        **({"statuses": dict(sorted(statuses.items()))} if statuses else {}),
    }


def write_evaluation(
    path: Path, *, figures: Mapping[str, Any], answers: Sequence[Rewarded], rewards: Sequence[RewardConfig]
) -> None:
    """Write the figures to `path` (.json) and every answer beside it (.jsonl); figures come last."""
    content = content_rewards(rewards)
    lines = (json.dumps(each.as_json(content), ensure_ascii=False, default=str) + "\n" for each in answers)
    write_text(path.with_suffix(".jsonl"), "".join(lines))
    write_text(path, json.dumps(figures, indent=1) + "\n")


def evaluate_questions(
    generator: Generator, questions: Sequence[Question], *, columns: Sequence[str], cfg: RunConfig, path: Path
) -> dict[str, Any]:
    """Have a model answer the questions greedily, and reward the answers; write `path` and return its figures."""
    tag = path.stem
    log.say(f"measuring the model ({tag}) on {len(questions):,} held-out prompts", "eval")
    with ready_to_answer(generator.model, cfg):
        texts = answer_all(
            generator,
            [question.ids for question in questions],
            batch_size=cfg.eval.batch_size,
            progress=lambda done: log.progress(done, len(questions), what="answered", tag="eval"),
        )
    lengths = [len(generator.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    with RewardSet(cfg) as reward_set:
        answers = reward_answers(reward_set, questions, columns=columns, answers=texts, n_tokens=lengths)
    figures = compute_figures(answers, rewards=cfg.rewards)
    write_evaluation(path, figures=figures, answers=answers, rewards=cfg.rewards)
    log.say(f"{tag}: {format_summary(figures)}", "eval")
    return figures


def evaluate_prompts(model: Any, prompts: Prompts, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """`evaluate_questions` on the held-out prompts of a run that learns from rewards, with answers as long as its own
    completions."""
    renderer = prompts.renderer
    generator = Generator(model, renderer.tokenizer, renderer.end_token_ids, cfg.grpo.max_completion_length)
    questions = evenly_spaced(prompts.held_out, cfg.eval.limit)
    return evaluate_questions(generator, questions, columns=prompts.report["columns"], cfg=cfg, path=path)


def format_summary(figures: Mapping[str, Any]) -> str:
    """Format the figures as one line."""
    means = {key: value for key, value in figures.items() if key == PASS or key.startswith("reward")}
    return "  ".join(f"{key} {value:.3f}" for key, value in means.items()) + f"  (n {figures['n']})"


def evenly_spaced(questions: Sequence[Question] | Questions, limit: int | None) -> list[Question]:
    """Return at most `limit` questions, evenly spaced over all of them."""
    count = len(questions) if limit is None else min(limit, len(questions))
    return [questions[at * len(questions) // count] for at in range(count)]
