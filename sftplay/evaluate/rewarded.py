"""Answers to prompts, and what the rewards of a config say of them: the figures of an evaluation, and every answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from sftplay import log
from sftplay.config.data import RewardConfig
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Prompts, Question
from sftplay.environments.rollouts import Rollouts, TurnRecord, abstain_where_failed, compute_turn_figures, turn_columns
from sftplay.evaluate.code import mean_pass_at_k
from sftplay.evaluate.evaluate import evenly_spaced, ready_to_answer, write_measurement
from sftplay.generate.generate import Generator, answer_ids
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.reward_set import RewardSet, aligned, combined
from sftplay.reward.table import has_full_value
from sftplay.units import plural

PASS = "pass"
"""Share of the answers that every reward for content gives its full 1. Rewards for form are left out of it."""


def find_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None where there is none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


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
    record: TurnRecord | None = None  # of a completion of several turns

    def passes(self, content: Sequence[str]) -> bool | None:
        """Return whether each of the rewards `content` gives 1; None where one has no value, or there are none."""
        values = [self.rewards[name] for name in content]
        known = [value for value in values if value is not None]
        return None if len(known) < len(values) or not values else min(known) >= 1.0

    def as_json(self, content: Sequence[str]) -> dict[str, Any]:
        """Return a line of eval/step-N.jsonl."""
        return {
            "row": self.asked.row,
            "prompt": self.asked.question,
            "reference": self.asked.columns.get("answer"),
            "prediction": self.answer,
            "correct": self.passes(content),
            "rewards": self.rewards,
            "reward": self.reward,
            "verdict": self.verdict,
            **(self.record.as_json() if self.record else {}),
        }


def content_rewards(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return the names of the rewards that only a right answer gets in full."""
    return [reward.name for reward in rewards if has_full_value(reward)]


def reward_answers(
    reward_set: RewardSet,
    asked: Sequence[Question],
    *,
    columns: Sequence[str],
    answers: Sequence[str],
    n_tokens: Sequence[int],
    records: Sequence[TurnRecord] = (),
) -> list[Rewarded]:
    """Return what the rewards say of each answer; `answers` and their lengths in tokens are aligned with `asked`, and
    so are `records` where completions have several turns.

    `columns` are those that any row has.
    """
    given = aligned([question.columns for question in asked], columns) | turn_columns(records)
    ids = list(map(range, n_tokens))  # rewards for length, which alone get tokens, count them
    scored = abstain_where_failed(reward_set.score(list(answers), given, completion_ids=ids), records)
    by_answer = zip(*(scores.values for scores in scored.by_name.values()), strict=True)
    values = [dict(zip(scored.by_name, scores, strict=True)) for scores in by_answer]
    sums = combined(scored, reward_set.weights)
    happened: Sequence[TurnRecord | None] = records or [None] * len(asked)
    return list(map(Rewarded, asked, answers, n_tokens, values, sums, scored.verdicts, happened))


def compute_figures(answers: Sequence[Rewarded], *, rewards: Sequence[RewardConfig]) -> dict[str, Any]:
    """Compute `n`, `reward` and `reward/NAME` (means of known values), `pass` and its standard error, `hidden_pass`,
    counts by status, and counts of unknown values."""
    content = content_rewards(rewards)
    named = {reward.name: [answer.rewards[reward.name] for answer in answers] for reward in rewards}
    measures: dict[str, list[Any]] = {
        "reward": [answer.reward for answer in answers],
        **{f"reward/{name}": values for name, values in named.items()},
        PASS: [answer.passes(content) for answer in answers],
        "hidden_pass": [(answer.verdict or {}).get("hidden_pass") for answer in answers],
    }
    means = {key: mean for key, values in measures.items() if (mean := find_mean(values)) is not None}
    statuses = Counter(answer.verdict["status"] for answer in answers if answer.verdict)
    right = [int(known) for known in measures[PASS] if known is not None]
    return {
        "n": len(answers),
        **means,
        **({"pass_stderr": mean_pass_at_k(right, n=1, k=1)[1]} if right else {}),
        "completion_tokens": fmean(answer.n_tokens for answer in answers),
        "abstained": {name: count for name, values in named.items() if (count := values.count(None))},
        **({"statuses": dict(sorted(statuses.items()))} if statuses else {}),
        **compute_turn_figures([answer.record for answer in answers if answer.record]),
    }


def write_evaluation(
    path: Path, *, figures: Mapping[str, Any], answers: Sequence[Rewarded], rewards: Sequence[RewardConfig]
) -> None:
    """Write the figures to `path` (.json) and every answer next to it (.jsonl); figures come last."""
    content = content_rewards(rewards)
    write_measurement(path, figures, rows=(answer.as_json(content) for answer in answers))


def evaluate_prompts(model: Any, prompts: Prompts, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Have a model answer the held-out prompts greedily, as long as in training; write `path`, return its figures."""
    renderer, tag = prompts.renderer, path.stem
    questions = evenly_spaced(prompts.held_out, cfg.eval.limit)
    generator = Generator(model, renderer.tokenizer, renderer.end_token_ids, cfg.grpo.max_completion_length)
    log.say(f"measuring the model ({tag}) on {plural(len(questions), 'held-out prompt')}", "eval")
    records: list[TurnRecord] = []
    with ready_to_answer(model, cfg):
        if rollouts := Rollouts.open(cfg, prompts, end_ids=generator.all_end_ids):
            with rollouts:
                in_lockstep = hasattr(model, "unshard")  # ranks that hold it in parts sample equally often
                found = rollouts.run(
                    questions,
                    partial(_sample_turn, generator, cfg.eval.batch_size),
                    count_going=(lambda n: max(gather_objects(n))) if in_lockstep else int,
                )
            records, lengths = [ids.record for ids in found], [ids.n_sampled for ids in found]
            texts = [record.answer for record in records]
        else:
            show = partial(log.progress, total=len(questions), what="answered", tag="eval")
            prompt_ids = [question.ids for question in questions]
            ids = answer_ids(generator, prompt_ids, batch_size=cfg.eval.batch_size, progress=show)
            texts, lengths = renderer.tokenizer.batch_decode(ids, skip_special_tokens=True), list(map(len, ids))
    columns = prompts.report["columns"]
    with RewardSet(cfg) as reward_set:
        answers = reward_answers(
            reward_set, questions, columns=columns, answers=texts, n_tokens=lengths, records=records
        )
    figures = compute_figures(answers, rewards=cfg.rewards)
    write_evaluation(path, figures=figures, answers=answers, rewards=cfg.rewards)
    log.say(f"{tag}: {format_summary(figures)}", "eval")
    return figures


def _sample_turn(generator: Generator, batch_size: int, prompts: list[list[int]], most: int) -> Any:
    """Sample one turn of each prompt, for `Rollouts.run`."""
    turns = answer_ids(replace(generator, max_new_tokens=most), prompts, batch_size=batch_size)
    return turns, None


def format_summary(figures: Mapping[str, Any]) -> str:
    means = {key: value for key, value in figures.items() if key == PASS or key.startswith("reward")}
    return "  ".join(f"{key} {value:.3f}" for key, value in means.items()) + f"  (n {figures['n']})"
