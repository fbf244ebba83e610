"""The prompts of a run in training order: exactly those of its rollout batches, one for each group."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

from sftplay.config.run import RunConfig
from sftplay.data.order import order_hash, steps_for, training_order
from sftplay.data.prompts.load import Prompts
from sftplay.data.prompts.questions import Questions
from sftplay.train.task import RowOrder

CACHED_QUESTIONS = 1024
"""Questions in the cache. TRL reads a row once for each completion and micro-batch."""


class Tokens(list[int]):
    """Tokens of a prompt. TRL makes a deep copy; a copy of each number costs more than reading them."""

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return type(self)(self)


class PromptRow(dict[str, Any]):
    """A prompt in the form of TRL's trainer."""

    def to(self, *_: Any, **__: Any) -> Self:
        """Return itself: it holds no tensor. Otherwise accelerate searches each token and each column for one."""
        return self


class PromptRows:
    """Prompts in the form of TRL's trainer. Without an order they are in the order of their file."""

    def __init__(self, questions: Questions, order: Sequence[int] | None = None) -> None:
        self.questions = questions
        self.order = range(len(questions)) if order is None else order
        self._read = lru_cache(CACHED_QUESTIONS)(questions.__getitem__)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, row: int) -> PromptRow:
        """Return a row. `prompt` holds token ids, so that TRL uses the kit's tokens, and takes completions as text."""
        question = self._read(self.order[row])
        return PromptRow(
            prompt=Tokens(question.ids), row=question.row, question=question.question, columns=question.columns
        )


def find_run_order(cfg: RunConfig, prompts: Prompts) -> tuple[list[int], RowOrder]:
    """Return the numbers of the prompts of the whole run, in order, and the RowOrder for the run's set-up."""
    n, grpo = len(prompts.train), cfg.grpo
    batch_prompts = cfg.train.effective_batch_size * grpo.steps_per_generation // grpo.num_generations
    batch_steps = grpo.steps_per_generation * grpo.num_iterations
    steps = cfg.train.max_steps or steps_for(n, cfg.train.epochs, effective_batch=batch_prompts) * batch_steps
    order = training_order(n, math.ceil(steps / batch_steps) * batch_prompts, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    return order, RowOrder(steps=steps, steps_per_epoch=math.ceil(n / batch_prompts) * batch_steps, digest=digest)
