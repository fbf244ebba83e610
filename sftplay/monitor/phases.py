"""Sets the phase of the rank's heartbeat at the events of the Trainer.

The window and `gather_objects` set the phases of forward, backward, evaluation batches and collective operations.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from sftplay.heartbeat import Heartbeat


class TrackPhases(TrainerCallback):
    """Must be the last callback: what the others do in an event belongs to the phase before it."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("data", step=state.global_step + 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("forward", step=state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate:
            self.heartbeat.enter("evaluation")
        else:
            self._end_step(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_step(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("data", step=state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("idle")

    def _end_step(self, state: Any, control: Any) -> None:
        if control.should_save:
            self.heartbeat.enter("save")
        else:
            self.heartbeat.enter("data", step=state.global_step + 1)
