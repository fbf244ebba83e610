"""The prompts of a run in training order: exactly those of its drawings, each once for its group."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

from sftplay.config.schema.run import RunConfig
from sftplay.data.order import order_hash, steps_for, training_order
from sftplay.data.prompts.load import Prompts
from sftplay.data.prompts.questions import Question, Questions
from sftplay.train.task import RowOrder

KEPT_QUESTIONS = 1024
"""Questions that are not read from disk again. TRL asks for a row once for each completion and micro-batch."""


class Tokens(list[int]):
    """Tokens of a prompt, of which TRL takes a deep copy: number by number that costs more than to read them."""

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return type(self)(self)


class PromptRow(dict[str, Any]):
    """A prompt as TRL's trainer takes it."""

    def to(self, *_: Any, **__: Any) -> Self:
        """Itself: it holds no tensor. Without this accelerate looks into each token and each column for one."""
        return self


class PromptRows:
    """Prompts as TRL's trainer takes them. Without an order they stand as in their file."""

    def __init__(self, questions: Questions, order: Sequence[int] | None = None) -> None:
        self.questions = questions
        self.order = range(len(questions)) if order is None else order
        self._read = lru_cache(KEPT_QUESTIONS)(questions.__getitem__)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, row: int) -> PromptRow:
        """`prompt` holds token ids, so that TRL asks with the kit's own tokens, and takes completions as plain text."""
        question = self.question(row)
        return PromptRow(
            prompt=Tokens(question.ids), row=question.row, words=question.question, columns=question.columns
        )

    def question(self, row: int) -> Question:
        """The prompt at this place of the order."""
        return self._read(self.order[row])


def prompts_of_drawing(cfg: RunConfig) -> int:
    """Prompts whose completions are drawn together."""
    return cfg.train.effective_batch_size * cfg.grpo.steps_per_generation // cfg.grpo.num_generations


def steps_of_drawing(cfg: RunConfig) -> int:
    """Optimizer steps that learn from the completions of one drawing."""
    return cfg.grpo.steps_per_generation * cfg.grpo.num_iterations


def run_order(cfg: RunConfig, prompts: Prompts) -> tuple[list[int], RowOrder]:
    """The prompts of the whole run by their number, and what a run's set-up needs to know of them."""
    n, at_once, steps_each = len(prompts.train), prompts_of_drawing(cfg), steps_of_drawing(cfg)
    steps = cfg.train.max_steps or steps_for(n, cfg.train.epochs, effective_batch=at_once) * steps_each
    order = training_order(n, math.ceil(steps / steps_each) * at_once, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    return order, RowOrder(steps=steps, steps_per_epoch=math.ceil(n / at_once) * steps_each, digest=digest)
