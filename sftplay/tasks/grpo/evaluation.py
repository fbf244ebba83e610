"""Answer held-out prompts greedily while a run learns from rewards: at the start, every so many steps, at the end.

The trainer generates the answers, and the run's rewards score them. Every rank answers its share; if one rank generated
alone, the others would wait for it, with sharded weights forever. The random state is restored afterwards, so that
training does not depend on how often it is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.evaluate.rewarded import PASS, Rewarded, compute_figures, format_summary, reward_answers, write_evaluation
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.scoring import RewardScorer
from sftplay.train.observer import Observer
from sftplay.train.random_numbers import random_numbers_kept

GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""All values are given: a missing one comes from the generation config that was shipped with the model."""


class EvaluatePrompts(Observer):
    """Writes eval/step-N.json and .jsonl, and adds the figures to the next line of metrics.

    Existing files are kept: after a resume no step is evaluated twice.
    """

    trainer: Any  # TRL's GRPOTrainer with the kit's parts

    def __init__(
        self, cfg: RunConfig, questions: Sequence[Question], *,
        scorer: RewardScorer, folder: Path, every_steps: int, prompt_version: str,
    ) -> None:  # fmt: skip
        """`folder` is the run's eval/; `every_steps` the steps between two evaluations."""
        self.cfg, self.questions, self.scorer = cfg, questions, scorer
        self.folder, self.every_steps, self.prompt_version = folder, every_steps, prompt_version

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.evaluate(0)

    def is_due(self, step: int, state: Any) -> bool:
        return step % self.every_steps == 0 or step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_due(state.global_step, state):
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Answer all questions and score the answers, once per step. Every rank must call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        if gather_objects(path.exists())[0]:
            return
        began = time.monotonic()
        with random_numbers_kept(), trainer.heartbeat.within("evaluation"):
            shares = gather_objects(self._score_share())
        by_row = {answer.asked.row: answer for share in shares for answer in share}
        answers = [by_row[row] for row in sorted(by_row)]
        figures = {"step": step, **compute_figures(answers, rewards=self.cfg.rewards)}
        figures |= {"prompt_version": self.prompt_version, "executor": self.scorer.rewards.executor}
        figures["seconds"] = round(time.monotonic() - began, 3)
        if log.is_main():
            write_evaluation(path, figures=figures, answers=answers, rewards=self.cfg.rewards)
        if step:  # the first line of metrics is that of step 1
            trainer.held_out_figures = {f"held_out_{key}": figures[key] for key in ("reward", PASS) if key in figures}
        log.say(f"step {step}/{trainer.state.max_steps}  held-out {format_summary(figures)}", "eval")

    def _score_share(self) -> list[Rewarded]:
        """Answer and score this rank's share of the questions.

        All ranks have equally many questions and batches, so a question may be answered twice.
        """
        n, world, trainer = len(self.questions), log.world_size(), self.trainer
        numbers = range(log.rank(), ceil(n / world) * world, world)
        share = sorted((self.questions[number % n] for number in numbers), key=lambda question: len(question.ids))
        trainer.model_wrapped.eval()
        try:
            with greedy_generation(trainer), trainer.accelerator.autocast():
                tokens = trainer._generate_single_turn([question.ids for question in share], None, {}, 1)[0]
        finally:
            trainer.model_wrapped.train()
        return reward_answers(
            self.scorer.rewards,
            share,
            columns=self.scorer.columns,
            answers=trainer.processing_class.batch_decode(tokens, skip_special_tokens=True),
            n_tokens=[len(ids) for ids in tokens],
        )


@contextmanager
def greedy_generation(trainer: Any) -> Iterator[None]:
    """Inside, the trainer generates the likeliest token each time."""
    if trainer.use_vllm:
        with replaced_attributes(trainer.vllm_generation, **GREEDY | {"temperature": 0.0}):
            yield
        return
    config = trainer.generation_config.__class__.from_dict(trainer.generation_config.to_dict())
    config.update(do_sample=False, **GREEDY)
    with replaced_attributes(trainer, generation_config=config):
        yield


@contextmanager
def replaced_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Inside, the attributes have these values; afterwards they have their former ones."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)
