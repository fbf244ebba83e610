"""Ends a run in good order: on a signal with a full checkpoint, on a step that is not finite without one.

Running out of memory is handled in `out_of_memory`, a full disk in `disk`.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from sftplay import log
from sftplay.atomic import write_text
from sftplay.errors import RunError
from sftplay.monitor.gradient_norm import gradient_norm
from sftplay.monitor.metrics import gather_objects
from sftplay.monitor.observer import Observer
from sftplay.signals import StopAtOnce, catch_signals

FP16_PATIENCE = 16
"""Steps in a row an fp16 run may skip: the gradient scaler halves its first scale, 2^16, once a step."""

SHOWN_ROWS = 8
"""Row ids that an error names; all of them are in its file."""


class StopOnSignal(Observer):
    """After a stop signal the run finishes the step, writes a checkpoint and ends. A second signal ends it at once.

    Ranks agree at the end of a step: otherwise one could wait in a collective for another that has left. `outside`
    handles signals before the first step and after the last; without it this process's signals are left alone.
    """

    def __init__(self, outside: StopAtOnce | None = None) -> None:
        self.received = 0
        self._came_here = False
        self._outside = outside

    def install(self) -> None:
        """Take over the stop signals of this process."""
        catch_signals(self._on_signal)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._outside:
            self.received = self._outside.received
            self.install()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._outside:
            self._outside.install()

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._came_here:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        # Not `received`: the others may have told of the first signal before it arrived here.
        self._came_here = True
        self.received = number
        log.say(f"{signal.Signals(number).name}: the step is finished, a checkpoint is written, then the run ends")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.agree():
            control.should_log = True  # otherwise the steps since the last line would be counted nowhere
            control.should_save = True
            control.should_training_stop = True
        return control

    def agree(self) -> bool:
        """True on every rank when one of them has received a signal; every rank must call it."""
        agreed = max(gather_objects(self.received, self.trainer.heartbeat))
        if agreed:  # never back to 0: a signal may have come while the ranks were agreeing
            self.received = agreed
        return bool(agreed)


class StopOnBadStep(Observer):
    """Ends the run before the optimizer takes a step whose loss or gradient is not finite on some rank.

    Checks in on_pre_optimizer_step, where all ranks come together: so all stop together and none waits in a collective.
    A check on logs would come after the weights are spoilt. In fp16 the gradient scaler skips such steps by itself and
    lowers its scale; there the run ends only after so many of them that no scale can help.
    """

    def __init__(self, path: Path) -> None:
        self.in_a_row = 0
        """Steps skipped since the last one that the optimizer took."""

        self._path = path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        ranks = gather_objects(
            (float(self.trainer.last_loss), float(gradient_norm(model.parameters()))), self.trainer.heartbeat
        )
        bad = [rank for rank, pair in enumerate(ranks) if not all(map(math.isfinite, pair))]
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if self.in_a_row > (FP16_PATIENCE if args.fp16 else 0):
            raise self._explain(state.global_step + 1, ranks)

    def check_loss(self, loss: torch.Tensor) -> None:
        """The same check after each forward pass, for DeepSpeed, which steps within its backward pass."""
        ranks = gather_objects((float(loss), 0.0), self.trainer.heartbeat)
        if not all(math.isfinite(each) for each, _ in ranks):
            raise self._explain(self.trainer.state.global_step + 1, ranks)

    def _explain(self, step: int, ranks: list[tuple[float, float]]) -> RunError:
        """The error with which every rank ends; the main rank writes which rows the step had."""
        rows = gather_objects((self.trainer.last_rows, self.trainer.rows_not_finite()), self.trainer.heartbeat)
        found = [
            {"rank": n, "loss": loss, "gradient_norm": norm, "row_ids": ids, "rows_not_finite": suspects}
            for n, ((loss, norm), (ids, suspects)) in enumerate(zip(ranks, rows, strict=True))
        ]
        if log.is_main():
            write_text(self._path, json.dumps({"step": step, "ranks": found}, indent=1) + "\n")
        # A loss belongs to one rank; gradients are the same on all ranks once they are averaged.
        lost = [n for n, (loss, _) in enumerate(ranks) if not math.isfinite(loss)]
        whose = f"loss of step {step} is not finite on rank {', '.join(map(str, lost))}"
        suspects = [row for each in found for row in each["rows_not_finite"]]
        named = f"; alone, too, not finite: rows {', '.join(map(str, suspects[:SHOWN_ROWS]))}" if suspects else ""
        return RunError(
            f"the {whose if lost else f'gradient of step {step} is not finite'}{named}",
            where=str(self._path),
            fix="look at the step's rows, which this file lists (`make inspect`), or lower train.learning_rate; the "
            "last checkpoint is from before",
        )


class StopWithoutProgress(EarlyStoppingCallback):
    """transformers' early stopping whose count goes on after a resume; its own starts again at zero."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        self.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)
