"""Held-out prompts answered greedily while a run learns from rewards: at the start, every so many steps, at the end.

The answers are made by the trainer's own way of generating and judged by the run's own rewards. Every rank answers its
share, so that no rank waits for one that generates alone, which would never end where weights are sharded. The random
numbers are put back: what is learned does not depend on how often it is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.deliver.evaluate.rewarded import PASS, Asked, Judged, figures_of, judge_answers, write_evaluation
from sftplay.monitor.metrics import gather_objects
from sftplay.monitor.observer import Observer
from sftplay.reward.reward_set import RewardSet
from sftplay.tasks.step.random_numbers import random_numbers_kept

GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Written out: what a generation config leaves open comes from the one that was shipped with the model."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt to be answered, as token ids."""

    asked: Asked
    input_ids: list[int]


def held_out_prompts(rows: Any, *, limit: int | None) -> list[HeldOutPrompt]:
    """At most `limit` of the held-out rows of `data.prompts`, evenly spread over them."""
    count = len(rows) if limit is None else min(limit, len(rows))
    prompts = []
    for number in (i * len(rows) // count for i in range(count)):
        row = rows[number]
        content = json.loads(row["content"])
        asked = Asked(int(row["row"]), content["question"], content["columns"])
        prompts.append(HeldOutPrompt(asked, list(row["input_ids"])))
    return prompts


class EvaluatePrompts(Observer):
    """Writes eval/step-N.json and .jsonl, and hands the figures to the next line of metrics.

    What lies there already is kept: after a resume nothing is measured twice.
    """

    trainer: Any
    """TRL's GRPOTrainer with the kit's parts."""

    def __init__(
        self,
        cfg: RunConfig,
        prompts: Sequence[HeldOutPrompt],
        *,
        reward_set: RewardSet,
        folder: Path,
        every: int,
    ) -> None:
        """`folder` is the run's eval/; `every` the steps between two evaluations."""
        self.cfg, self.prompts, self.reward_set = cfg, prompts, reward_set
        self.folder, self.every = folder, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps:
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        """Answer all prompts and judge the answers, once a step. Every rank must call it."""
        path = self.folder / f"step-{step}.json"
        if gather_objects(path.exists())[0]:
            return
        began = time.monotonic()
        with random_numbers_kept():
            mine, generation_s = self._answer_share()
            shares = gather_objects(mine, self.trainer.heartbeat)
        judged = sorted(
            {each.asked.row: each for share in shares for each in share}.values(), key=lambda j: j.asked.row
        )
        figures = {"step": step, **figures_of(judged, rewards=self.cfg.rewards)}
        figures |= {"generation_seconds": generation_s, "seconds": time.monotonic() - began}
        if log.is_main():
            write_evaluation(path, figures=figures, judged=judged, rewards=self.cfg.rewards)
        means = {key: value for key, value in figures.items() if key == PASS or key.startswith("reward")}
        said = "  ".join(f"{key} {value:.3f}" for key, value in means.items())
        log.say(f"step {step}/{self.trainer.state.max_steps}  held-out {said}  (n {figures['n']})", "eval")

    def _answer_share(self) -> tuple[list[Judged], float]:
        """This rank's prompts with their judged answers, and the seconds that answering took.

        Every rank has as many prompts and as many batches as the others: one prompt may be answered twice.
        """
        n, world = len(self.prompts), log.world_size()
        numbers = range(log.rank(), ceil(n / world) * world, world)
        share = [self.prompts[number % n] for number in numbers]
        share.sort(key=lambda prompt: len(prompt.input_ids))
        began = time.monotonic()
        tokens = list(self._answers(share))
        generation_s = time.monotonic() - began
        texts = self.trainer.processing_class.batch_decode(tokens, skip_special_tokens=True)
        self.trainer.heartbeat.enter("evaluation")
        lengths = [len(ids) for ids in tokens]
        judged = judge_answers(self.reward_set, [each.asked for each in share], answers=texts, n_tokens=lengths)
        return judged, generation_s

    def _answers(self, prompts: Sequence[HeldOutPrompt]) -> Iterator[list[int]]:
        model, size = self.trainer.model_wrapped, self.cfg.eval.batch_size
        was_training = model.training
        model.eval()
        try:
            with greedy(self.trainer):
                for first in range(0, len(prompts), size):
                    self.trainer.heartbeat.enter("evaluation")  # a beat for each batch: only one can take too long
                    batch = [prompt.input_ids for prompt in prompts[first : first + size]]
                    yield from self.trainer._generate_single_turn(batch, None, {}, 1)[0]
        finally:
            model.train(was_training)


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
