"""Evaluate a run on held-out problems: at the start, every few steps, and at the end of a stage and of the run.

The evaluation samples problems with the run's hints, with empty ones and with the static one: the differences show
whether solver or guide has learned. Every rank samples a share of the problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import torch

from sftplay import log
from sftplay.errors import RunError
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.episode_rewards import EpisodeResult, describe, expect_known, format_episode
from sftplay.tasks.score.sample_episodes import Action, HintKind, diagnose, exchange_hints, read_reference
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.guards import check_room, checkpoint_bytes
from sftplay.train.metrics import EvaluateAtSteps

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
