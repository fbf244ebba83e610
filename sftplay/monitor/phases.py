"""Tells the rank's pulse which part of a step the Trainer is in, as far as its callbacks show it.

Forward, backward, evaluation pieces and meetings of ranks are marked where they happen, in the window and in `gather`.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from sftplay.heartbeat import Pulse


class PhaseMarks(TrainerCallback):
    """Must be the last callback: what the others do in an event still belongs to the phase before."""

    def __init__(self, pulse: Pulse) -> None:
        self.pulse = pulse

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pulse.enter("data", step=state.global_step + 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pulse.enter("forward", step=state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pulse.enter("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate:
            self.pulse.enter("evaluation")
        else:
            self._end_step(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_step(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pulse.enter("data", step=state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pulse.enter("idle")

    def _end_step(self, state: Any, control: Any) -> None:
        if control.should_save:
            self.pulse.enter("save")
        else:
            self.pulse.enter("data", step=state.global_step + 1)
