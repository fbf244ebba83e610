"""The rewards of both turns of an episode, and the samples that are kept."""

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
from sftplay.config.schema.run import RunConfig
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, aligned
from sftplay.reward.table import judges_form
from sftplay.tasks.score.sample_episodes import (
    Episode,
    action_figures,
    gives_the_hints_answer,
    is_leaked,
    text_of,
    turn_figures,
)

RIGHT = 1.0 - 1e-9
"""From here on an answer counts as right: all rewards for content give it everything."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one episode is worth, in plain numbers that can be sent to other ranks."""

    first: float | None
    second: float | None
    """Weighted mean of the rewards for content, 0 to 1; 0 for an answer that was cut off; None where a reward has no
    value."""

    is_known: bool
    """False where a reward has no value for one of the answers: the episode is in no mean, and teaches nothing."""

    form_first: bool | None
    form_second: bool | None
    """Whether all rewards for form accept the answer; None where one of them has no value."""

    is_parsed: bool
    """Whether any reward judges the form."""

    leaks: bool
    n_cut: int
    """Answers of the two that were cut off."""

    hint_tokens: int
    edit_ratio: float
    is_identical: bool
    follows_hint: bool | None = None
    """Whether the second answer is that of the hint; None without a hint."""

    @property
    def right(self) -> tuple[bool | None, bool | None]:
        """Whether each answer is right; None where that is not known."""
        first, second = (None if value is None else value >= RIGHT for value in (self.first, self.second))
        return first, second


class EpisodeJudge:
    """The rewards of a run on one rank; a context manager, which ends their processes."""

    def __init__(self, cfg: RunConfig, *, columns: Sequence[str], tokenizer: Any) -> None:
        """`columns` are those that any row has."""
        self.rewards, self.columns, self.tokenizer = RewardSet(cfg), tuple(columns), tokenizer
        form = {reward.name for reward in cfg.rewards if judges_form(reward)}
        self._form = [name for name in self.rewards.names if name in form]
        weights = dict(zip(self.rewards.names, self.rewards.weights, strict=True))
        self._content = {name: weight for name, weight in weights.items() if name not in form and weight}
        self._abstentions = MissingRewardMonitor()

    def __enter__(self) -> EpisodeJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    def judge(self, episodes: Sequence[Episode], *, heartbeat: Heartbeat) -> list[Verdict]:
        """A verdict for each of this rank's episodes. Every rank must call it.

        Raises:
            RunError: on every rank, where a reward abstains too often.
        """
        with heartbeat.within("reward"):
            actions = [episode.first for episode in episodes] + [episode.second for episode in episodes]
            texts = [text_of(self.tokenizer, action.ids) for action in actions]
            rows = [episode.question.columns for episode in episodes] * 2
            scored = self.rewards.score(texts, aligned(rows, self.columns))
            ranks = gather_objects(replace(scored, verdicts=[None] * len(texts)), heartbeat)
        self._abstentions.add(BatchRewards.concatenate(ranks))
        n = len(episodes)
        return [self._verdict(episode, scored, at=(at, at + n)) for at, episode in enumerate(episodes)]

    def _verdict(self, episode: Episode, scored: BatchRewards, *, at: tuple[int, int]) -> Verdict:
        values = [self._value(scored, place) for place in at]
        cut = [episode.first.is_truncated, episode.second.is_truncated]
        first, second = (0.0 if is_cut else value for value, is_cut in zip(values, cut, strict=True))
        forms = [{scored.by_name[name].values[place] for name in self._form} for place in at]
        form = [None if None in each else each <= {1} for each in forms]
        says = action_figures([episode.first.said], [episode.second.said])
        hint, second_text = (text_of(self.tokenizer, ids) for ids in (episode.hint_ids, episode.second.ids))
        return Verdict(
            first=first,
            second=second,
            is_known=None not in (first, second),
            form_first=form[0],
            form_second=form[1],
            is_parsed=bool(self._form),
            leaks=is_leaked(episode.question, hint),
            n_cut=sum(cut),
            hint_tokens=len(episode.hint_ids),
            edit_ratio=says["edit_ratio"],
            is_identical=bool(says["frac_identical"]),
            follows_hint=gives_the_hints_answer(hint, second_text) if hint.strip() else None,
        )

    def _value(self, scored: BatchRewards, place: int) -> float | None:
        """The weighted mean of the rewards for content; None where one has no value."""
        pairs = [(scored.by_name[name].values[place], weight) for name, weight in self._content.items()]
        if any(value is None for value, _ in pairs):
            return None
        return sum((value or 0.0) * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def of_all_ranks(verdicts: Sequence[Verdict], heartbeat: Heartbeat) -> list[Verdict]:
    """The verdicts of every rank, in rank order. Every rank must call it."""
    return [verdict for rank in gather_objects(list(verdicts), heartbeat) for verdict in rank]


def expect_known(verdicts: Sequence[Verdict]) -> None:
    """Raise RunError where no verdict is known: there is nothing to measure."""
    if not any(verdict.is_known for verdict in verdicts):
        raise RunError(
            f"none of {len(verdicts):,} episodes has a known reward",
            where="rewards",
            fix="try the rewards with `make reward-check`, and the boxes with `make sandbox ARGS=--self-test`",
        )


def _share(values: Sequence[bool | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def describe(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    """The figures of section "Metrics" that verdicts tell; those about rewards over the episodes that are known."""
    known = [verdict for verdict in verdicts if verdict.is_known]
    right = [(first is True, second is True) for first, second in (verdict.right for verdict in known)]
    wrong = [each.is_identical for each, (first, _) in zip(known, right, strict=True) if not first]
    judged = [form for each in verdicts if each.is_parsed for form in (each.form_first, each.form_second)]
    forms = [form for form in judged if form is not None]
    return {
        **turn_figures([first for first, _ in right], [second for _, second in right]),
        "reward_t1": fmean(verdict.first or 0.0 for verdict in known) if known else None,
        "reward_t2": fmean(verdict.second or 0.0 for verdict in known) if known else None,
        "edit_ratio": fmean(verdict.edit_ratio for verdict in verdicts),
        "frac_identical": fmean(verdict.is_identical for verdict in verdicts),
        "repeats": fmean(wrong) if wrong else None,
        "follows_hint": _share([each.follows_hint for each in verdicts]),
        "changes_to_hint": _share([each.follows_hint for each in verdicts if not each.is_identical]),
        "hint_leak": fmean(verdict.leaks for verdict in verdicts),
        "hint_tokens": fmean(verdict.hint_tokens for verdict in verdicts),
        "parse_failures": 1 - fmean(forms) if forms else None,
        "truncated": fmean(verdict.n_cut / 2 for verdict in verdicts),
        "abstained": 1 - fmean(verdict.is_known for verdict in verdicts),
    }


def line_of(episode: Episode, verdict: Verdict, *, tokenizer: Any) -> dict[str, Any]:
    """An episode for people to read."""
    return {
        "row": episode.question.row,
        "problem": episode.question.question,
        "first": text_of(tokenizer, episode.first.ids),
        "hint": text_of(tokenizer, episode.hint_ids),
        "second": text_of(tokenizer, episode.second.ids),
        "rewards": [verdict.first, verdict.second],
        "correct": list(verdict.right),
        "leaks": verdict.leaks,
    }


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """One line of JSON for each."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def keep_episodes(
    episodes: Sequence[Episode],
    verdicts: Sequence[Verdict],
    *,
    run_folder: Path,
    step: int,
    gains: Mapping[str, Tensor | None],
    tokenizer: Any,
    limit: int | None,
) -> None:
    """Write the first episodes of the main rank with their advantages, `gains` by name: [episodes]."""
    if not log.is_main() or limit == 0:
        return
    lines = []
    for at, (episode, verdict) in enumerate(zip(episodes[:limit], verdicts, strict=False)):
        advantages = {name: None if gain is None else round(float(gain[at]), 6) for name, gain in gains.items()}
        lines.append({**line_of(episode, verdict, tokenizer=tokenizer), "advantages": advantages})
    write_lines(run_folder / "samples" / f"step-{step}.jsonl", lines)
