"""Held-out problems played while a run trains: at the start, every so many steps, at the end of a stage and of the run.

Each problem is played with the run's own hints, with empty ones and with the static one: the differences tell who has
learned, solver or guide. Every rank plays its share.
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
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.errors import RunError
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.episode_rewards import Verdict, describe, expect_known, line_of, write_lines
from sftplay.tasks.score.losses import gate_objection
from sftplay.tasks.score.sample_episodes import Action, Episode, Hints, diagnosis, exchange_hints, reference_of
from sftplay.train.disk import check_room, checkpoint_bytes
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept

Measured = tuple[int, Verdict, dict[str, Any]]
"""Number of the episode, verdict, and the episode for people."""


class EvaluateEpisodes(Observer):
    """Writes eval/step-N.json and .jsonl, and hands the figures to the next line of metrics.

    What lies there already is read: after a resume nothing is measured twice.
    """

    trainer: Any

    def __init__(self, cfg: RunConfig, questions: Sequence[Question], *, folder: Path, every: int) -> None:
        """`folder` is the run's eval/; `every` the steps between two evaluations."""
        self.cfg, self.questions, self.folder, self.every = cfg, questions, folder, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self._expect_readable_hints()
            self.evaluate(0)

    def measures_at(self, step: int, state: Any) -> bool:
        return step % self.every == 0 or step in (self.cfg.score.stage1_steps, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step, stage1 = state.global_step, self.cfg.score.stage1_steps
        if self.measures_at(step, state):
            control.should_log = True  # a line for the figures
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
        """Have the Trainer save behind this evaluation. Callbacks that prepare a save have been asked before it."""
        checkpoints = Path(self.trainer.args.output_dir)
        if log.is_main():
            check_room(checkpoints, checkpoint_bytes(checkpoints, more["model"], optimizer=more["optimizer"]))
        self.trainer.heartbeat.enter("save")
        control.should_save = True

    def evaluate(self, step: int) -> dict[str, Any]:
        """The figures of a step, for which all problems are played once. All ranks call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        kept = path.read_text(encoding="utf-8") if log.is_main() and path.exists() else None
        known = gather_objects(kept)[0]
        figures = json.loads(known) if known else self._measure(step, path)
        told = {f"eval_{key}": value for key, value in figures.items() if isinstance(value, float) and key != "seconds"}
        if step:
            trainer.held_out_figures = told
        else:  # the first line of metrics is that of step 1, but a tracker's curve begins here
            trainer.log(told)
        log.say(f"step {step}/{trainer.state.max_steps}  {said_of(figures)}", "eval")
        return figures

    def _measure(self, step: int, path: Path) -> dict[str, Any]:
        """Play all problems, and write what they say."""
        began = time.monotonic()
        played, empty, static, *other = self._play("own", "empty", "static", "other")
        figures: dict[str, Any] = {"step": step, "n": len(played), **figures_of(played)}
        figures |= {"acc_t2_empty": figures_of(empty)["acc_t2"], "acc_t2_static": figures_of(static)["acc_t2"]}
        figures |= {"acc_t2_other_hint": figures_of(other[0])["acc_t2"] if other else None}
        if self.cfg.score.eval_temperature:
            said = figures_of(self._play("own", is_greedy=True)[0])
            figures |= {f"{name}_greedy": said[name] for name in ("acc_t1", "acc_t2")}
        figures |= {"diagnosis": diagnosis(figures), "seconds": round(time.monotonic() - began, 3)}
        if log.is_main():
            write_lines(path.with_suffix(".jsonl"), [line for _, _, line in played])
            write_text(path, json.dumps(figures, indent=1) + "\n")
        return figures

    def _play(self, *kinds: Hints, is_greedy: bool = False) -> list[list[Measured]]:
        """With each kind of hints: the episodes of all ranks, each once, in the order of their numbers.

        First answers are the same with each kind, so they are drawn once. `is_greedy`: each problem once, with the
        likeliest tokens; else as the config says. Hints of the kind other are left out where all own ones are equal.
        """
        played, firsts, others = list[list[Measured]](), None, dict[int, list[int]]()
        for hints in kinds:
            if hints == "other" and not others:
                continue
            with random_numbers_kept(), self.trainer.heartbeat.within("evaluation"):
                episodes = self._share(hints, is_greedy=is_greedy, firsts=firsts, others=others)
                shares = gather_objects(self._judged(episodes), self.trainer.heartbeat)
            if hints == "own" and "other" in kinds:
                written = gather_objects({number: episode.hint_ids for number, episode in episodes})
                others = exchange_hints({number: ids for rank in written for number, ids in rank.items()})
            firsts = [episode.first for _, episode in episodes]
            by_number = {each[0]: each for share in shares for each in share}
            expect_known([verdict for _, verdict, _ in by_number.values()])
            played.append([by_number[number] for number in sorted(by_number)])
        return played

    def _share(
        self,
        hints: Hints,
        *,
        is_greedy: bool = False,
        firsts: Sequence[Action] | None = None,
        others: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> list[tuple[int, Episode]]:
        """This rank's episodes with their numbers. Every rank has as many as the others: one may be played twice."""
        trainer, score = self.trainer, self.cfg.score
        each, temperature = (1, 0.0) if is_greedy else (score.eval_samples, score.eval_temperature)
        n, world = len(self.questions) * each, log.world_size()
        numbers = [number % n for number in range(log.rank(), ceil(n / world) * world, world)]
        questions = [self.questions[number // each] for number in numbers]
        trainer.cast.eval()
        try:
            with torch.no_grad(), trainer.accelerator.autocast():
                episodes = trainer.player.play(
                    questions,
                    numbers=numbers,
                    seed=self.cfg.seed,
                    temperature=temperature,
                    hints=hints,
                    firsts=firsts,
                    others=[others[number] for number in numbers] if hints == "other" else (),
                )
        finally:
            trainer.cast.train()
        return list(zip(numbers, episodes, strict=True))

    def _judged(self, episodes: Sequence[tuple[int, Episode]]) -> list[Measured]:
        trainer = self.trainer
        verdicts = trainer.judge.judge([episode for _, episode in episodes], heartbeat=trainer.heartbeat)
        return [
            (number, verdict, line_of(episode, verdict, tokenizer=trainer.player.tokenizer))
            for (number, episode), verdict in zip(episodes, verdicts, strict=True)
        ]

    def _expect_readable_hints(self) -> None:
        """Raise RunError where the solver cannot use a hint that states the answer: it would learn to copy."""
        wanted = self.cfg.score.min_hint_gain
        if not wanted or self.cfg.score.guidance == "none":
            return
        if not any(reference_of(question) for question in self.questions):
            raise RunError(
                "no problem has an answer that a correct hint could state, so it is not known whether the solver can "
                "use one",
                where="score.min_hint_gain",
                fix="give the rows the column answer, or set score.min_hint_gain: 0",
            )
        right, empty = (figures_of(played) for played in self._play("right", "empty"))
        with_hint, without = float(right["acc_t2"] or 0.0), float(empty["acc_t2"] or 0.0)
        said = f"right in {with_hint:.1%} with a correct hint and in {without:.1%} with an empty one"
        log.say(f"second answers are {said}", "eval")
        if with_hint - without < wanted:
            raise RunError(
                f"the solver cannot use a hint: its second answers are {said}, a gain of {with_hint - without:.3f}",
                where="score.min_hint_gain",
                fix=f"warm the model up on rows with hints (task_mode sft), until the gain is {wanted:g}; or set "
                "score.min_hint_gain: 0",
            )

    def _warn_at_gate(self, figures: dict[str, Any]) -> None:
        kl_first = float(self.trainer.figures.get("kl_t1") or 0.0)
        objection = gate_objection(kl_first=kl_first, delta=float(figures["delta"]), kl1_max=self.cfg.score.kl1_max)
        if objection:
            log.say(f"warning: stage 1 ends, but {objection}; stage 2 begins all the same", "score")
        else:
            log.say(
                f"stage 1 ends: KL of turn 1 {kl_first:.3g}, delta {figures['delta']:+.3f}; stage 2 begins", "score"
            )


def figures_of(played: Sequence[Measured]) -> dict[str, float | None]:
    """What the verdicts say."""
    return describe([verdict for _, verdict, _ in played])


def said_of(figures: dict[str, Any]) -> str:
    """The figures in a line."""
    names = ("acc_t1", "acc_t2", "delta", "i2c", "c2i")
    means = "  ".join(f"{name} {figures[name]:.3f}" for name in names)
    hints = f"empty hint {figures['acc_t2_empty']:.3f}, static {figures['acc_t2_static']:.3f}"
    return f"{means}  ({hints}; n {figures['n']}): {figures['diagnosis']}"
