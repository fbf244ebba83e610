"""Held-out prompts answered greedily while a run learns from rewards: at the start, every so many steps, at the end.

The answers are made by the trainer's own way of generating and judged by the run's own rewards. Every rank answers its
share, so that no rank waits for one that generates alone, which would never end where weights are sharded. The random
numbers are put back: what is learned does not depend on how often it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.evaluate.rewarded import PASS, Rewarded, compute_figures, format_summary, reward_answers, write_evaluation
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.scoring import Judge
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept

GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Written out: what a generation config leaves open comes from the one that was shipped with the model."""


class EvaluatePrompts(Observer):
    """Writes eval/step-N.json and .jsonl, and hands the figures to the next line of metrics.

    What lies there already is kept: after a resume nothing is measured twice.
    """

    trainer: Any
    """TRL's GRPOTrainer with the kit's parts."""

    def __init__(
        self,
        cfg: RunConfig,
        questions: Sequence[Question],
        *,
        judge: Judge,
        folder: Path,
        every: int,
        prompt_version: str,
    ) -> None:
        """`folder` is the run's eval/; `every` the steps between two evaluations."""
        self.cfg, self.questions, self.judge = cfg, questions, judge
        self.folder, self.every, self.prompt_version = folder, every, prompt_version

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.evaluate(0)

    def measures_at(self, step: int, state: Any) -> bool:
        return step % self.every == 0 or step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.measures_at(state.global_step, state):
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Have all questions answered and the answers rewarded, once a step. Every rank must call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        if gather_objects(path.exists())[0]:
            return
        began = time.monotonic()
        with random_numbers_kept(), trainer.heartbeat.within("evaluation"):
            shares = gather_objects(self._rewarded_share())
        by_row = {each.asked.row: each for share in shares for each in share}
        answers = [by_row[row] for row in sorted(by_row)]
        figures = {"step": step, **compute_figures(answers, rewards=self.cfg.rewards)}
        figures |= {"prompt_version": self.prompt_version, "executor": self.judge.rewards.executor}
        figures["seconds"] = round(time.monotonic() - began, 3)
        if log.is_main():
            write_evaluation(path, figures=figures, answers=answers, rewards=self.cfg.rewards)
        if step:  # the first line of metrics is that of step 1
            trainer.held_out_figures = {f"held_out_{key}": figures[key] for key in ("reward", PASS) if key in figures}
        log.say(f"step {step}/{trainer.state.max_steps}  held-out {format_summary(figures)}", "eval")

    def _rewarded_share(self) -> list[Rewarded]:
        """This rank's share of the questions, answered and rewarded.

        Every rank has as many questions and as many batches as the others: one question may be answered twice.
        """
        n, world = len(self.questions), log.world_size()
        numbers = range(log.rank(), ceil(n / world) * world, world)
        share = sorted((self.questions[number % n] for number in numbers), key=lambda question: len(question.ids))
        tokens = self._answers([question.ids for question in share])
        return reward_answers(
            self.judge.rewards,
            share,
            columns=self.judge.columns,
            answers=self.trainer.processing_class.batch_decode(tokens, skip_special_tokens=True),
            n_tokens=[len(ids) for ids in tokens],
        )

    def _answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Tokens of the greedy answers."""
        trainer = self.trainer
        trainer.model_wrapped.eval()
        try:
            with greedy(trainer), trainer.accelerator.autocast():
                answers: list[list[int]] = trainer._generate_single_turn(prompts, None, {}, 1)[0]
        finally:
            trainer.model_wrapped.train()
        return answers


@contextmanager
def greedy(trainer: Any) -> Iterator[None]:
    """Meanwhile the trainer's generation takes the likeliest token each time."""
    if trainer.use_vllm:
        with replaced(trainer.vllm_generation, **GREEDY | {"temperature": 0.0}):
            yield
        return
    config = trainer.generation_config.__class__.from_dict(trainer.generation_config.to_dict())
    config.update(do_sample=False, **GREEDY)
    with replaced(trainer, generation_config=config):
        yield


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """These attributes meanwhile, and then what they were."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)
