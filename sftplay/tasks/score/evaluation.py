"""Score both turns of episodes, and evaluate a run on held-out problems with each kind of hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.evaluate.rewarded import find_mean
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, aligned
from sftplay.reward.table import judges_form
from sftplay.tasks.score.sample_episodes import (
    Action,
    Episode,
    HintKind,
    compute_edit_ratio,
    compute_turn_figures,
    decode_text,
    diagnose,
    exchange_hints,
    hint_equals_answer,
    is_leaked,
    read_reference,
)
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.guards import check_room, checkpoint_bytes
from sftplay.train.metrics import EvaluateAtSteps


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

    known = [result for result in results if result.is_known]
    right = [(first is True, second is True) for first, second in (result.right for result in known)]
    parsed = [result for result in results if result.is_parsed]
    accepted = find_mean(form for result in parsed for form in (result.form_first, result.form_second))
    return {
        **compute_turn_figures([first for first, _ in right], [second for _, second in right]),
        "reward_t1": find_mean(result.first for result in known),
        "reward_t2": find_mean(result.second for result in known),
        "edit_ratio": fmean(result.edit_ratio for result in results),
        "frac_identical": fmean(result.is_identical for result in results),
        "repeats": find_mean(result.is_identical for result, (first, _) in zip(known, right, strict=True) if not first),
        "follows_hint": find_mean(result.follows_hint for result in results),
        "changes_to_hint": find_mean(result.follows_hint for result in results if not result.is_identical),
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


EvaluatedEpisode = tuple[int, EpisodeResult, dict[str, Any]]
"""Number of the episode, result, and the episode formatted for people."""


class EvaluateEpisodes(EvaluateAtSteps):
    """Measures both turns of held-out problems, also at the start and at the end of stage 1."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._check_min_hint_gain()
            self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step, score, trainer = state.global_step, self.cfg.score, self.trainer
        if not self.measures_at(step, state):
            return
        control.should_log = True  # writes a line with the figures
        figures = self.evaluate(step)
        if step == score.stage1_steps and step < state.max_steps:
            kl_first, delta = float(trainer.figures.get("kl_t1") or 0.0), float(figures["delta"])
            faults, limit = [], score.kl1_max
            if kl_first >= limit:
                faults.append(f"turn 1 has moved from the reference (KL {kl_first:.3g}, score.kl1_max {limit:g})")
            if delta <= 0:
                faults.append(f"second answers are no better than first ones (delta {delta:+.3f})")
            if faults:
                log.say(f"warning: stage 1 ends, but {' and '.join(faults)}; stage 2 begins all the same", "score")
            else:
                log.say(f"stage 1 ends: KL of turn 1 {kl_first:.3g}, delta {delta:+.3f}; stage 2 begins", "score")
        is_best = state.best_metric is None or figures["acc_t2"] > state.best_metric
        if self.cfg.train.best_metric != "acc_t2" or not is_best:
            return
        state.best_metric, state.best_global_step = figures["acc_t2"], step
        log.say(f"the highest acc_t2 so far, {figures['acc_t2']:.3f}: these weights are kept", "eval")
        if not control.should_save:
            # It comes too late for the callbacks that prepare a save.
            checkpoints = Path(trainer.args.output_dir)
            if log.is_main():
                check_room(checkpoints, checkpoint_bytes(checkpoints, more["model"], optimizer=more["optimizer"]))
            trainer.heartbeat.enter("save")
            control.should_save = True

    def measure(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        evaluated, *others = self._sample("own", "empty", "static", "other")
        figures = {"n": len(evaluated), **describe([result for _, result, _ in evaluated])}
        for name, sampled in zip_longest(("acc_t2_empty", "acc_t2_static", "acc_t2_other_hint"), others):
            figures[name] = describe([result for _, result, _ in sampled])["acc_t2"] if sampled else None
        if self.cfg.score.eval_temperature:
            greedy = describe([result for _, result, _ in self._sample("own", is_greedy=True)[0]])
            figures |= {f"{name}_greedy": greedy[name] for name in ("acc_t1", "acc_t2")}
        return {**figures, "diagnosis": diagnose(figures)}, [line for _, _, line in evaluated]

    def summarize(self, figures: dict[str, Any]) -> tuple[dict[str, float], str]:
        means = "  ".join(f"{name} {figures[name]:.3f}" for name in ("acc_t1", "acc_t2", "delta", "i2c", "c2i"))
        hints = f"empty hint {figures['acc_t2_empty']:.3f}, static {figures['acc_t2_static']:.3f}"
        logged = {name: value for name, value in figures.items() if isinstance(value, float) and name != "seconds"}
        return logged, f"{means}  ({hints}; n {figures['n']}): {figures['diagnosis']}"

    def _sample(self, *kinds: HintKind, is_greedy: bool = False) -> list[list[EvaluatedEpisode]]:
        """Sample the problems with each kind of hints; return the episodes of all ranks in the order of their numbers.

        First answers are the same with each kind, so they are sampled once. `is_greedy` samples a problem once, with
        the likeliest tokens; otherwise the config decides. The kind other is left out where all hints are equal.
        """
        trainer, score, world = self.trainer, self.cfg.score, log.world_size()
        tokenizer = trainer.episode_sampler.tokenizer
        n_samples, temperature = (1, 0.0) if is_greedy else (score.eval_samples, score.eval_temperature)
        n = len(self.rows) * n_samples
        # All ranks sample as many; one may repeat.
        numbers = [number % n for number in range(log.rank(), ceil(n / world) * world, world)]
        questions = [self.rows[number // n_samples] for number in numbers]
        by_kind, others = list[list[EvaluatedEpisode]](), dict[int, list[int]]()
        firsts: Sequence[Action] | None = None
        for hints in kinds:
            if hints == "other" and not others:
                continue
            with random_numbers_kept(), trainer.heartbeat.within("evaluation"):
                trainer.role_models.eval()
                try:
                    with torch.no_grad(), trainer.accelerator.autocast():
                        episodes = trainer.episode_sampler.sample_episodes(
                            questions,
                            numbers=numbers,
                            seed=self.cfg.seed,
                            temperature=temperature,
                            hints=hints,
                            firsts=firsts,
                            others=[others[number] for number in numbers] if hints == "other" else (),
                        )
                finally:
                    trainer.role_models.train()
                results = trainer.reward_scorer.score(episodes, heartbeat=trainer.heartbeat)
                lines = [format_episode(*pair, tokenizer=tokenizer) for pair in zip(episodes, results, strict=True)]
                shares = gather_objects(list(zip(numbers, results, lines, strict=True)), trainer.heartbeat)
            if hints == "own" and "other" in kinds:
                hint_ids = [episode.hint_ids for episode in episodes]
                written = gather_objects(dict(zip(numbers, hint_ids, strict=True)))
                others = exchange_hints({number: ids for rank in written for number, ids in rank.items()})
            firsts = [episode.first for episode in episodes]
            by_number = {evaluated[0]: evaluated for share in shares for evaluated in share}
            expect_known([result for _, result, _ in by_number.values()])
            by_kind.append([by_number[number] for number in sorted(by_number)])
        return by_kind

    def _check_min_hint_gain(self) -> None:
        """Raise RunError where the solver cannot use a hint that states the answer: it would learn to copy."""
        min_gain, where = self.cfg.score.min_hint_gain, "score.min_hint_gain"
        if not min_gain or self.cfg.score.guidance == "none":
            return
        if not any(read_reference(question) for question in self.rows):
            what = "no problem has an answer that a correct hint could state"
            fix = "give the rows the column answer, or set score.min_hint_gain: 0"
            raise RunError(f"{what}, so it is not known whether the solver can use one", where=where, fix=fix)
        with_hint, without = (
            float(describe([result for _, result, _ in evaluated])["acc_t2"] or 0.0)
            for evaluated in self._sample("right", "empty")
        )
        shares = f"right in {with_hint:.1%} with a correct hint and in {without:.1%} with an empty one"
        log.say(f"second answers are {shares}", "eval")
        if with_hint - without < min_gain:
            what = f"the solver cannot use a hint: its second answers are {shares}, a gain of {with_hint - without:.3f}"
            fix = f"warm the model up on rows with hints (task_mode sft), until the gain is {min_gain:g}"
            raise RunError(what, where=where, fix=f"{fix}; or set score.min_hint_gain: 0")
