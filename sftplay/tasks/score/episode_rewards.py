"""Score both turns of episodes with the run's rewards, and write samples of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, aligned
from sftplay.reward.table import judges_form
from sftplay.tasks.score.sample_episodes import (
    Episode,
    compute_edit_ratio,
    compute_turn_figures,
    decode_text,
    hint_equals_answer,
    is_leaked,
)


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """The rewards and figures of one episode, as plain values that can be sent to other ranks.

    `first` and `second` are weighted means of the rewards for content, 0 to 1: 0 for a truncated answer, None where a
    reward has no value. Then the episode is not known: it is in no mean and in no loss. `form_first` and `form_second`
    say whether all rewards for form accept the answer (None where one has no value), `is_parsed` whether there are any,
    `leak` whether the hint states the right answer, `n_cut` how many of the two answers were truncated, and
    `follows_hint` whether the second answer is the hint's answer (None without a hint).
    """

    first: float | None
    second: float | None
    is_known: bool
    form_first: bool | None
    form_second: bool | None
    is_parsed: bool
    leak: bool
    n_cut: int
    hint_tokens: int
    edit_ratio: float
    is_identical: bool
    follows_hint: bool | None = None

    @property
    def right(self) -> tuple[bool | None, bool | None]:
        """Whether the first and the second answer are right; None where that is unknown."""
        # All rewards for content give their full value.
        first, second = (None if value is None else value >= 1.0 - 1e-9 for value in (self.first, self.second))
        return first, second


class RewardScorer:
    """Scores episodes with the rewards of a run on one rank; a context manager that ends the reward processes."""

    def __init__(self, cfg: RunConfig, *, columns: Sequence[str], tokenizer: Any) -> None:
        """`columns` are the columns that any row has."""
        self.rewards, self.columns, self.tokenizer = RewardSet(cfg), tuple(columns), tokenizer
        form = {reward.name for reward in cfg.rewards if judges_form(reward)}
        self._form = [name for name in self.rewards.names if name in form]
        weights = zip(self.rewards.names, self.rewards.weights, strict=True)
        self._content = {name: weight for name, weight in weights if name not in form and weight}
        self._missing_rewards = MissingRewardMonitor()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    def score(self, episodes: Sequence[Episode], *, heartbeat: Heartbeat) -> list[EpisodeResult]:
        """Score this rank's episodes; raise RunError, on every rank, where a reward abstains too often.

        Every rank must call it.
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
        turns, right, forms = (episode.first, episode.second), [], []
        for turn, place in zip(turns, at, strict=True):
            pairs = [(scored.by_name[name].values[place], weight) for name, weight in self._content.items()]
            is_known = all(value is not None for value, _ in pairs)
            mean = sum((value or 0.0) * weight for value, weight in pairs) / sum(self._content.values())
            right.append(0.0 if turn.is_truncated else mean if is_known else None)
            form = {scored.by_name[name].values[place] for name in self._form}
            forms.append(None if None in form else form <= {1})
        before, after = (turn.ids_without_end for turn in turns)
        hint, second_text = (decode_text(self.tokenizer, ids) for ids in (episode.hint_ids, episode.second.ids))
        return EpisodeResult(
            first=right[0],
            second=right[1],
            is_known=None not in right,
            form_first=forms[0],
            form_second=forms[1],
            is_parsed=bool(self._form),
            leak=is_leaked(episode.question, hint),
            n_cut=sum(turn.is_truncated for turn in turns),
            hint_tokens=len(episode.hint_ids),
            edit_ratio=compute_edit_ratio(before, after),
            is_identical=before == after,
            follows_hint=hint_equals_answer(hint, second_text) if hint.strip() else None,
        )


def expect_known(results: Sequence[EpisodeResult]) -> None:
    """Raise RunError where no result is known: there is nothing to measure."""
    if not any(result.is_known for result in results):
        what = f"none of {len(results):,} episodes has a known reward"
        fix = "try the rewards with `make reward-check`, and the boxes with `make sandbox ARGS=--self-test`"
        raise RunError(what, where="rewards", fix=fix)


def describe(results: Sequence[EpisodeResult]) -> dict[str, float | None]:
    """Compute the figures of section "Metrics" from results; figures of rewards use the known episodes only."""

    def mean(values: Iterable[float | None]) -> float | None:
        kept = [value for value in values if value is not None]
        return fmean(kept) if kept else None

    known = [result for result in results if result.is_known]
    right = [(first is True, second is True) for first, second in (result.right for result in known)]
    parsed = [result for result in results if result.is_parsed]
    accepted = mean(form for result in parsed for form in (result.form_first, result.form_second))
    return {
        **compute_turn_figures([first for first, _ in right], [second for _, second in right]),
        "reward_t1": mean(result.first for result in known),
        "reward_t2": mean(result.second for result in known),
        "edit_ratio": fmean(result.edit_ratio for result in results),
        "frac_identical": fmean(result.is_identical for result in results),
        "repeats": mean(result.is_identical for result, (first, _) in zip(known, right, strict=True) if not first),
        "follows_hint": mean(result.follows_hint for result in results),
        "changes_to_hint": mean(result.follows_hint for result in results if not result.is_identical),
        "hint_leak": fmean(result.leak for result in results),
        "hint_tokens": fmean(result.hint_tokens for result in results),
        "parse_failures": None if accepted is None else 1 - accepted,
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
        "leaks": result.leak,
    }
