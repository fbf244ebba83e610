"""Ends a run in good order: after a signal with a checkpoint, at a step that is not finite without one.

`out_of_memory` handles running out of memory, `disk` a full disk.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from sftplay import log
from sftplay.atomic import write_text
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.signals import Echoes, StopAtOnce, catch_signals
from sftplay.train.gradients import rough_gradient_norm
from sftplay.train.observer import Observer

FP16_PATIENCE = 16
"""Steps in a row that an fp16 run may skip. The gradient scaler begins at 2^16 and halves its scale once a step."""

SHOWN_ROWS = 8  # number of row ids in an error's text; all of them are in its file


class StopOnSignal(Observer):
    """After a stop signal the run finishes the step, writes a checkpoint and ends. A second signal ends it at once.

    Ranks agree at the end of a step. Otherwise one could wait in a collective operation for another that has ended.
    `outside` handles signals before the first step and after the last. Without it no handler is installed.
    """

    def __init__(self, outside: StopAtOnce | None = None) -> None:
        self.received = 0
        self._has_own_signal = False
        self._outside = outside
        self._echoes = outside.echoes if outside else Echoes()

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
        if self._echoes.is_echo():
            return
        if self._has_own_signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        # `received` cannot be used for this: it may be set by another rank before the first signal arrives here.
        self._has_own_signal = True
        self.received = number
        log.say(f"{signal.Signals(number).name}: the step is finished, a checkpoint is written, then the run ends")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.agree():
            control.should_log = True  # otherwise no line of metrics would count the steps since the last one
            control.should_save = True
            control.should_training_stop = True
        return control

    def agree(self) -> bool:
        """Return True on every rank when one of them has received a signal. Every rank must call it."""
        agreed = int(max(gather_numbers([self.received], self.trainer.heartbeat))[0])
        if agreed:  # never set back to 0: a signal may have come during the exchange
            self.received = agreed
        return bool(agreed)


class StopOnBadStep(Observer):
    """Ends the run before the optimizer takes a step whose loss or gradient is not finite on some rank.

    It checks in on_pre_optimizer_step, which all ranks reach. Therefore all stop together, and none waits in a
    collective operation. A check on logs would come after the weights are damaged. In fp16 the gradient scaler skips
    such steps by itself and lowers its scale. There the run ends only after so many of them that no scale can help.
    """

    def __init__(self, path: Path) -> None:
        self.skipped_in_a_row = 0  # steps that were skipped since the last one that the optimizer took
        self._path = path

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        norm = getattr(self.trainer, "clipped_norm", None)  # of this step, where the trainer has clipped by it
        norm = rough_gradient_norm(model.parameters()) if norm is None else getattr(norm, "full_tensor", lambda: norm)()
        ranks = gather_numbers([float(self.trainer.last_loss), float(norm)], self.trainer.heartbeat)
        bad = not all(math.isfinite(value) for pair in ranks for value in pair)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if bad else 0
        if self.skipped_in_a_row > (FP16_PATIENCE if args.fp16 else 0):
            raise self._explain(state.global_step + 1, ranks)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Check the loss after each forward pass. DeepSpeed needs it, because it steps within its backward pass."""
        ranks = gather_numbers([float(loss), 0.0], self.trainer.heartbeat)
        if not all(math.isfinite(value) for value, _ in ranks):
            raise self._explain(self.trainer.state.global_step + 1, ranks)

    def _explain(self, step: int, ranks: list[list[float]]) -> RunError:
        """Return the error with which every rank ends. The main rank writes the rows of the step to a file."""
        rows = gather_objects((self.trainer.last_rows, self.trainer.rows_not_finite()), self.trainer.heartbeat)
        details = [
            {"rank": n, "loss": loss, "gradient_norm": norm, "row_ids": ids, "rows_not_finite": suspects}
            for n, ((loss, norm), (ids, suspects)) in enumerate(zip(ranks, rows, strict=True))
        ]
        if log.is_main():
            write_text(self._path, json.dumps({"step": step, "ranks": details}, indent=1) + "\n")
        # A loss belongs to one rank. Gradients are the same on all ranks once they are averaged.
        bad_ranks = ", ".join(str(n) for n, (loss, _) in enumerate(ranks) if not math.isfinite(loss))
        what = f"the {'loss' if bad_ranks else 'gradient'} of step {step} is not finite"
        what += f" on rank {bad_ranks}" if bad_ranks else ""
        if suspects := [row for _, not_finite in rows for row in not_finite]:
            what += f"; rows that are not finite alone: {', '.join(map(str, suspects[:SHOWN_ROWS]))}"
        return RunError(
            what,
            where=str(self._path),
            fix="inspect the step's rows, which this file lists (`make inspect`), or lower train.learning_rate; the "
            "last checkpoint was written before this step",
        )


class StopWithoutProgress(EarlyStoppingCallback):
    """transformers' early stopping, with a count that a resume continues. Its own starts again at zero."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        self.early_stopping_patience_counter = saved.get("early_stopping_patience_counter", 0)


def gather_numbers(numbers: Sequence[float], heartbeat: Heartbeat | None = None) -> list[list[float]]:
    """Gather a few numbers, as `gather_objects` does, in fp64: one collective, and nothing is pickled."""
    if log.world_size() == 1:
        return [list(numbers)]
    device = "cuda" if "nccl" in torch.distributed.get_backend() else "cpu"
    local = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks = local.new_empty(log.world_size() * len(numbers))
    with heartbeat.within("communication") if heartbeat else nullcontext():
        torch.distributed.all_gather_into_tensor(ranks, local)
        gathered: list[list[float]] = ranks.view(-1, len(numbers)).tolist()
    return gathered
