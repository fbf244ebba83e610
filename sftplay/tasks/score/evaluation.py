"""Evaluate a run on held-out problems: at the start, every few steps, and at the end of a stage and of the run.

The evaluation samples problems with the run's hints, with empty ones and with the static one: the differences show
whether solver or guide has learned. Every rank samples a share of the problems.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.errors import RunError
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.episode_rewards import EpisodeResult, describe, expect_known, format_episode, write_lines
from sftplay.tasks.score.losses import check_stage1_gate
from sftplay.tasks.score.sample_episodes import Action, Episode, HintKind, diagnose, exchange_hints, read_reference
from sftplay.train.disk import check_room, checkpoint_bytes
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept

EvaluatedEpisode = tuple[int, EpisodeResult, dict[str, Any]]
"""Number of the episode, result, and the episode formatted for people."""


class EvaluateEpisodes(Observer):
    """Writes eval/step-N.json and .jsonl, and adds the figures to the next line of metrics.

    Existing files are read: after a resume nothing is measured twice.
    """

    trainer: Any

    def __init__(self, cfg: RunConfig, questions: Sequence[Question], *, folder: Path, every: int) -> None:
        """`folder` is the run's eval/; `every` is the steps between two evaluations."""
        self.cfg, self.questions, self.folder, self.every = cfg, questions, folder, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._check_min_hint_gain()
            self.evaluate(0)

    def measures_at(self, step: int, state: Any) -> bool:
        return step % self.every == 0 or step in (self.cfg.score.stage1_steps, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step, stage1 = state.global_step, self.cfg.score.stage1_steps
        if self.measures_at(step, state):
            control.should_log = True  # writes a line with the figures
            figures = self.evaluate(step)
            if step == stage1 and step < state.max_steps:
                self._warn_at_gate(figures)
            is_best = state.best_metric is None or figures["acc_t2"] > state.best_metric
            if self.cfg.train.best_metric == "acc_t2" and is_best:
                state.best_metric, state.best_global_step = figures["acc_t2"], step
                log.say(f"the highest acc_t2 so far, {figures['acc_t2']:.3f}: these weights are kept", "eval")
                if not control.should_save:
                    self._save(control, more)

    def _save(self, control: Any, more: Mapping[str, Any]) -> None:
        """Let the Trainer save after this evaluation. It comes too late for the callbacks that prepare a save."""
        checkpoints = Path(self.trainer.args.output_dir)
        if log.is_main():
            check_room(checkpoints, checkpoint_bytes(checkpoints, more["model"], optimizer=more["optimizer"]))
        self.trainer.heartbeat.enter("save")
        control.should_save = True

    def evaluate(self, step: int) -> dict[str, Any]:
        """Return the figures of a step, sampled or read from the step's file. Every rank must call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        kept = path.read_text(encoding="utf-8") if log.is_main() and path.exists() else None
        known = gather_objects(kept)[0]
        figures = json.loads(known) if known else self._measure(step, path)
        logged = {
            f"eval_{key}": value for key, value in figures.items() if isinstance(value, float) and key != "seconds"
        }
        if step:
            trainer.held_out_figures = logged
        else:  # the first line of metrics comes at step 1, but a tracker's curve starts here
            trainer.log(logged)
        log.say(f"step {step}/{trainer.state.max_steps}  {format_summary(figures)}", "eval")
        return figures

    def _measure(self, step: int, path: Path) -> dict[str, Any]:
        """Sample all problems, and write figures and episodes."""
        began = time.monotonic()
        evaluated, empty, static, *other = self._sample("own", "empty", "static", "other")
        figures: dict[str, Any] = {"step": step, "n": len(evaluated), **compute_figures(evaluated)}
        figures |= {
            "acc_t2_empty": compute_figures(empty)["acc_t2"],
            "acc_t2_static": compute_figures(static)["acc_t2"],
        }
        figures |= {"acc_t2_other_hint": compute_figures(other[0])["acc_t2"] if other else None}
        if self.cfg.score.eval_temperature:
            greedy = compute_figures(self._sample("own", is_greedy=True)[0])
            figures |= {f"{name}_greedy": greedy[name] for name in ("acc_t1", "acc_t2")}
        figures |= {"diagnosis": diagnose(figures), "seconds": round(time.monotonic() - began, 3)}
        if log.is_main():
            write_lines(path.with_suffix(".jsonl"), [line for _, _, line in evaluated])
            write_text(path, json.dumps(figures, indent=1) + "\n")
        return figures

    def _sample(self, *kinds: HintKind, is_greedy: bool = False) -> list[list[EvaluatedEpisode]]:
        """Sample the problems with each kind of hints; return the episodes of all ranks in the order of their numbers.

        First answers are the same with each kind, so they are sampled once. `is_greedy` samples a problem once, with
        the likeliest tokens; otherwise the config decides. The kind other is left out where all hints are equal.
        """
        by_kind, firsts, others = list[list[EvaluatedEpisode]](), None, dict[int, list[int]]()
        for hints in kinds:
            if hints == "other" and not others:
                continue
            with random_numbers_kept(), self.trainer.heartbeat.within("evaluation"):
                episodes = self._sample_share(hints, is_greedy=is_greedy, firsts=firsts, others=others)
                shares = gather_objects(self._score(episodes), self.trainer.heartbeat)
            if hints == "own" and "other" in kinds:
                written = gather_objects({number: episode.hint_ids for number, episode in episodes})
                others = exchange_hints({number: ids for rank in written for number, ids in rank.items()})
            firsts = [episode.first for _, episode in episodes]
            by_number = {evaluated[0]: evaluated for share in shares for evaluated in share}
            expect_known([result for _, result, _ in by_number.values()])
            by_kind.append([by_number[number] for number in sorted(by_number)])
        return by_kind

    def _sample_share(
        self,
        hints: HintKind,
        *,
        is_greedy: bool = False,
        firsts: Sequence[Action] | None = None,
        others: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> list[tuple[int, Episode]]:
        """Sample this rank's episodes with their numbers. All ranks have as many: one may be sampled twice."""
        trainer, score = self.trainer, self.cfg.score
        n_samples, temperature = (1, 0.0) if is_greedy else (score.eval_samples, score.eval_temperature)
        n, world = len(self.questions) * n_samples, log.world_size()
        numbers = [number % n for number in range(log.rank(), ceil(n / world) * world, world)]
        questions = [self.questions[number // n_samples] for number in numbers]
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
        return list(zip(numbers, episodes, strict=True))

    def _score(self, episodes: Sequence[tuple[int, Episode]]) -> list[EvaluatedEpisode]:
        trainer = self.trainer
        results = trainer.reward_scorer.score([episode for _, episode in episodes], heartbeat=trainer.heartbeat)
        return [
            (number, result, format_episode(episode, result, tokenizer=trainer.episode_sampler.tokenizer))
            for (number, episode), result in zip(episodes, results, strict=True)
        ]

    def _check_min_hint_gain(self) -> None:
        """Raise RunError where the solver cannot use a hint that states the answer: it would learn to copy."""
        min_gain = self.cfg.score.min_hint_gain
        if not min_gain or self.cfg.score.guidance == "none":
            return
        if not any(read_reference(question) for question in self.questions):
            raise RunError(
                "no problem has an answer that a correct hint could state, so it is not known whether the solver can "
                "use one",
                where="score.min_hint_gain",
                fix="give the rows the column answer, or set score.min_hint_gain: 0",
            )
        right, empty = (compute_figures(evaluated) for evaluated in self._sample("right", "empty"))
        with_hint, without = float(right["acc_t2"] or 0.0), float(empty["acc_t2"] or 0.0)
        shares = f"right in {with_hint:.1%} with a correct hint and in {without:.1%} with an empty one"
        log.say(f"second answers are {shares}", "eval")
        if with_hint - without < min_gain:
            raise RunError(
                f"the solver cannot use a hint: its second answers are {shares}, a gain of {with_hint - without:.3f}",
                where="score.min_hint_gain",
                fix=f"warm the model up on rows with hints (task_mode sft), until the gain is {min_gain:g}; or set "
                "score.min_hint_gain: 0",
            )

    def _warn_at_gate(self, figures: dict[str, Any]) -> None:
        kl_first = float(self.trainer.figures.get("kl_t1") or 0.0)
        objection = check_stage1_gate(kl_first=kl_first, delta=float(figures["delta"]), kl1_max=self.cfg.score.kl1_max)
        if objection:
            log.say(f"warning: stage 1 ends, but {objection}; stage 2 begins all the same", "score")
        else:
            log.say(
                f"stage 1 ends: KL of turn 1 {kl_first:.3g}, delta {figures['delta']:+.3f}; stage 2 begins", "score"
            )


def compute_figures(evaluated: Sequence[EvaluatedEpisode]) -> dict[str, float | None]:
    """Compute the figures of evaluated episodes."""
    return describe([result for _, result, _ in evaluated])


def format_summary(figures: dict[str, Any]) -> str:
    """Format the figures as one line."""
    names = ("acc_t1", "acc_t2", "delta", "i2c", "c2i")
    means = "  ".join(f"{name} {figures[name]:.3f}" for name in names)
    hints = f"empty hint {figures['acc_t2_empty']:.3f}, static {figures['acc_t2_static']:.3f}"
    return f"{means}  ({hints}; n {figures['n']}): {figures['diagnosis']}"
