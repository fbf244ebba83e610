"""Score both turns of episodes with the run's rewards, and write samples of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, aligned
from sftplay.reward.table import judges_form
from sftplay.tasks.score.sample_episodes import (
    Episode,
    compute_edit_figures,
    compute_turn_figures,
    decode_text,
    hint_equals_answer,
    is_leaked,
)

MIN_RIGHT_REWARD = 1.0 - 1e-9
"""Least reward of a right answer: all rewards for content give their full value."""


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """The rewards and figures of one episode, as plain values that can be sent to other ranks."""

    first: float | None
    second: float | None
    """Weighted mean of the rewards for content, 0 to 1; 0 for a truncated answer; None where a reward has no value."""

    is_known: bool
    """False where a reward has no value for an answer: the episode is in no mean and in no loss."""

    form_first: bool | None
    form_second: bool | None
    """Whether all rewards for form accept the answer; None where one has no value."""

    is_parsed: bool
    """Whether any reward judges the form."""

    leaks: bool
    n_cut: int
    """How many of the two answers were truncated."""

    hint_tokens: int
    edit_ratio: float
    is_identical: bool
    follows_hint: bool | None = None
    """Whether the second answer is the hint's answer; None without a hint."""

    @property
    def right(self) -> tuple[bool | None, bool | None]:
        """Whether the first and the second answer are right; None where that is unknown."""
        first, second = (None if value is None else value >= MIN_RIGHT_REWARD for value in (self.first, self.second))
        return first, second


class RewardScorer:
    """Scores episodes with the rewards of a run on one rank; a context manager that ends the reward processes."""

    def __init__(self, cfg: RunConfig, *, columns: Sequence[str], tokenizer: Any) -> None:
        """`columns` are the columns that any row has."""
        self.rewards, self.columns, self.tokenizer = RewardSet(cfg), tuple(columns), tokenizer
        form = {reward.name for reward in cfg.rewards if judges_form(reward)}
        self._form = [name for name in self.rewards.names if name in form]
        weights = dict(zip(self.rewards.names, self.rewards.weights, strict=True))
        self._content = {name: weight for name, weight in weights.items() if name not in form and weight}
        self._missing_rewards = MissingRewardMonitor()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    def score(self, episodes: Sequence[Episode], *, heartbeat: Heartbeat) -> list[EpisodeResult]:
        """Score this rank's episodes. Every rank must call it.

        Raises:
            RunError: on every rank, where a reward abstains too often.
        """
        with heartbeat.within("reward"):
            actions = [episode.first for episode in episodes] + [episode.second for episode in episodes]
            texts = [decode_text(self.tokenizer, action.ids) for action in actions]
            rows = [episode.question.columns for episode in episodes] * 2
            scored = self.rewards.score(texts, aligned(rows, self.columns))
            ranks = gather_objects(replace(scored, verdicts=[None] * len(texts)), heartbeat)
        self._missing_rewards.add(BatchRewards.concatenate(ranks))
        n = len(episodes)
        return [self._create_result(episode, scored, at=(at, at + n)) for at, episode in enumerate(episodes)]

    def _create_result(self, episode: Episode, scored: BatchRewards, *, at: tuple[int, int]) -> EpisodeResult:
        values = [self._mean_content_reward(scored, place) for place in at]
        truncated = [episode.first.is_truncated, episode.second.is_truncated]
        first, second = (0.0 if is_truncated else value for value, is_truncated in zip(values, truncated, strict=True))
        forms = [{scored.by_name[name].values[place] for name in self._form} for place in at]
        form = [None if None in rewards else rewards <= {1} for rewards in forms]
        edits = compute_edit_figures([episode.first.ids_without_end], [episode.second.ids_without_end])
        hint, second_text = (decode_text(self.tokenizer, ids) for ids in (episode.hint_ids, episode.second.ids))
        return EpisodeResult(
            first=first,
            second=second,
            is_known=None not in (first, second),
            form_first=form[0],
            form_second=form[1],
            is_parsed=bool(self._form),
            leaks=is_leaked(episode.question, hint),
            n_cut=sum(truncated),
            hint_tokens=len(episode.hint_ids),
            edit_ratio=edits["edit_ratio"],
            is_identical=bool(edits["frac_identical"]),
            follows_hint=hint_equals_answer(hint, second_text) if hint.strip() else None,
        )

    def _mean_content_reward(self, scored: BatchRewards, place: int) -> float | None:
        """Compute the weighted mean of the rewards for content; None where one has no value."""
        pairs = [(scored.by_name[name].values[place], weight) for name, weight in self._content.items()]
        if any(value is None for value, _ in pairs):
            return None
        return sum((value or 0.0) * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def gather_results(results: Sequence[EpisodeResult], heartbeat: Heartbeat) -> list[EpisodeResult]:
    """Gather the results of all ranks, in rank order. Every rank must call it."""
    return [result for rank in gather_objects(list(results), heartbeat) for result in rank]


def expect_known(results: Sequence[EpisodeResult]) -> None:
    """Raise RunError where no result is known: there is nothing to measure."""
    if not any(result.is_known for result in results):
        raise RunError(
            f"none of {len(results):,} episodes has a known reward",
            where="rewards",
            fix="try the rewards with `make reward-check`, and the boxes with `make sandbox ARGS=--self-test`",
        )


def _known_share(values: Sequence[bool | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def describe(results: Sequence[EpisodeResult]) -> dict[str, float | None]:
    """Compute the figures of section "Metrics" from results; figures of rewards use the known episodes only."""
    known = [result for result in results if result.is_known]
    right = [(first is True, second is True) for first, second in (result.right for result in known)]
    repeated = [result.is_identical for result, (first, _) in zip(known, right, strict=True) if not first]
    parsed = [result for result in results if result.is_parsed]
    forms = [form for result in parsed for form in (result.form_first, result.form_second) if form is not None]
    return {
        **compute_turn_figures([first for first, _ in right], [second for _, second in right]),
        "reward_t1": fmean(result.first or 0.0 for result in known) if known else None,
        "reward_t2": fmean(result.second or 0.0 for result in known) if known else None,
        "edit_ratio": fmean(result.edit_ratio for result in results),
        "frac_identical": fmean(result.is_identical for result in results),
        "repeats": fmean(repeated) if repeated else None,
        "follows_hint": _known_share([result.follows_hint for result in results]),
        "changes_to_hint": _known_share([result.follows_hint for result in results if not result.is_identical]),
        "hint_leak": fmean(result.leaks for result in results),
        "hint_tokens": fmean(result.hint_tokens for result in results),
        "parse_failures": 1 - fmean(forms) if forms else None,
        "truncated": fmean(result.n_cut / 2 for result in results),
        "abstained": 1 - fmean(result.is_known for result in results),
    }


def format_episode(episode: Episode, result: EpisodeResult, *, tokenizer: Any) -> dict[str, Any]:
    """Format an episode for people to read."""
    return {
        "row": episode.question.row,
        "problem": episode.question.question,
        "first": decode_text(tokenizer, episode.first.ids),
        "hint": decode_text(tokenizer, episode.hint_ids),
        "second": decode_text(tokenizer, episode.second.ids),
        "rewards": [result.first, result.second],
        "correct": list(result.right),
        "leaks": result.leaks,
    }


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines as JSON Lines."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def write_episode_samples(
    episodes: Sequence[Episode],
    results: Sequence[EpisodeResult],
    *,
    run_folder: Path,
    step: int,
    gains: Mapping[str, Tensor | None],
    tokenizer: Any,
    limit: int | None,
) -> None:
    """Write the main rank's first `limit` episodes with their advantages, `gains` by name: [episodes]."""
    if not log.is_main() or limit == 0:
        return
    lines = []
    for at, (episode, result) in enumerate(zip(episodes[:limit], results, strict=False)):
        advantages = {name: None if gain is None else round(float(gain[at]), 6) for name, gain in gains.items()}
        lines.append({**format_episode(episode, result, tokenizer=tokenizer), "advantages": advantages})
    write_lines(run_folder / "samples" / f"step-{step}.jsonl", lines)
