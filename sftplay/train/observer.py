"""The parts of a trainer that the kit uses, and how callbacks get the trainer: `attach` gives it to each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import TrainerCallback

from sftplay.heartbeat import Heartbeat
from sftplay.train.interval import StepCounts


class TrainerView(Protocol):
    """The parts of transformers' Trainer that the kit uses."""

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
    """A trainer that also knows the rows and counts of its last step (`train.exact_batch`)."""

    heartbeat: Heartbeat
    counts: StepCounts
    last_loss: Any
    lr_scheduler: Any
    micro_batcher: Any
    replay: Any
    source_names: Sequence[str]
    """Names of a mixture's sources; empty in other tasks."""

    held_out_sources: dict[str, dict[str, float]]
    """What the last evaluation measured of each source."""

    @property
    def last_rows(self) -> list[int]: ...
    def take_counts(self) -> StepCounts: ...
    def rows_not_finite(self) -> list[int]: ...

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What a line of metrics says beyond the figures of every task; `logs` are the Trainer's. All ranks call it."""


class Observer(TrainerCallback):
    """A callback that uses the trainer itself."""

    trainer: StepTrainer

    def attach(self, trainer: StepTrainer) -> None:
        """Called once, after the trainer is built and before it wraps its model or trains."""
        self.trainer = trainer

    def measures_at(self, step: int, state: Any) -> bool:
        """True when this callback itself measures held-out rows at the end of that step."""
        return False
