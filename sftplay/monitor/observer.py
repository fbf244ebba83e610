"""What the kit sees of a trainer, and how callbacks get hold of it: `attach` hands it to each of them once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import TrainerCallback

from sftplay.heartbeat import Heartbeat
from sftplay.monitor.interval import StepCounts


class TrainerView(Protocol):
    """What the kit uses of transformers' Trainer."""

    args: Any
    state: Any
    model: Any
    model_wrapped: Any
    accelerator: Any
    callback_handler: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...


class StepTrainer(TrainerView, Protocol):
    """A trainer that also says what its last step was made of (`tasks.step.window`)."""

    heartbeat: Heartbeat
    counts: StepCounts
    last_loss: Any
    micro_batcher: Any
    replay: Any

    @property
    def last_rows(self) -> list[int]: ...
    def take_counts(self) -> StepCounts: ...
    def rows_not_finite(self) -> list[int]: ...


class Observer(TrainerCallback):
    """A callback that looks at the trainer itself."""

    trainer: StepTrainer

    def attach(self, trainer: StepTrainer) -> None:
        """Called once, when the trainer is built and before it trains or wraps its model."""
        self.trainer = trainer
