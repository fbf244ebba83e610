"""The parts of a trainer that the kit uses, and how callbacks get the trainer: `attach` gives it to each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import TrainerCallback

from sftplay.heartbeat import Heartbeat
from sftplay.train.interval import StepCounts


class StepTrainer(Protocol):
    """The parts of transformers' Trainer that the kit uses, and the rows and counts of the last step."""

    args: Any
    state: Any
    model: Any
    model_wrapped: Any
    accelerator: Any
    callback_handler: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    heartbeat: Heartbeat
    counts: StepCounts
    last_loss: Any
    lr_scheduler: Any
    micro_batcher: Any
    replay: Any
    source_names: Sequence[str]  # names of a mixture's sources; empty in other tasks
    held_out_sources: dict[str, dict[str, float]]  # figures of each source in the last evaluation

    @property
    def last_rows(self) -> list[int]: ...
    def take_counts(self) -> StepCounts: ...
    def rows_not_finite(self) -> list[int]: ...

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line's figures beyond those of every task; `logs` are the Trainer's. All ranks call it."""


class Observer(TrainerCallback):
    """A callback that uses the trainer itself."""

    trainer: StepTrainer

    def attach(self, trainer: StepTrainer) -> None:
        """Take the trainer, once it is built and before it wraps its model or trains."""
        self.trainer = trainer

    def measures_at(self, step: int, state: Any) -> bool:
        """Return whether this callback itself measures held-out rows at the end of that step."""
        return False
