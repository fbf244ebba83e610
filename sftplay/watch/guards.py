"""Ends a run in good order: on a signal with a full checkpoint, on a step that is not finite without one.

Recovery from running out of memory is not here.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from sftplay import log
from sftplay.errors import RunError
from sftplay.watch.meters import gather

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

TORCH_WRITE_FAILED = ("PytorchStreamWriter", "unexpected pos", "iostream error")
"""What torch.save's errors say when the disk takes no more (caffe2/serialize/inline_container.cc)."""

FP16_PATIENCE = 16
"""Steps in a row an fp16 run may skip: the gradient scaler halves its first scale, 2^16, once a step."""


class StopOnSignal(TrainerCallback):
    """After SIGTERM, SIGINT or SIGUSR1: finishes the step, writes a checkpoint, ends. A second one ends at once.

    Ranks agree at the step's edge, so that none waits in a collective for one that has left.
    """

    def __init__(self) -> None:
        self.received = 0
        self._came_here = False

    def install(self) -> None:
        """Take over the three signals of this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._came_here:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        # Not `received`: the others may have told of the first signal before it arrived here.
        self._came_here = True
        self.received = number
        log.say(f"{signal.Signals(number).name}: the step is finished, a checkpoint is written, then the run ends")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        agreed = max(gather(self.received))
        if agreed:  # never set back to 0: a signal may have come while the ranks were agreeing
            self.received = agreed
            control.should_log = True  # what was trained since the last line would be counted nowhere
            control.should_save = True
            control.should_training_stop = True
        return control


class StopOnBadStep(TrainerCallback):
    """Ends the run before the optimizer takes a step whose loss or gradient is not finite on some rank.

    Looks in on_pre_optimizer_step, where all ranks meet, so all stop together and none waits in a collective; a check
    on logs would come after the weights are spoilt. In fp16 the gradient scaler skips such steps by itself and lowers
    its scale; there only a run of them that no scale can cure is an end.
    """

    def __init__(self) -> None:
        self.window: Any = None
        self._in_a_row = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        ranks = gather((float(self.window.last_loss), _gradient_norm(model)))
        bad = [(rank, pair) for rank, pair in enumerate(ranks) if not all(map(math.isfinite, pair))]
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if self._in_a_row > (FP16_PATIENCE if args.fp16 else 0):
            rank, (loss, _norm) = bad[0]
            raise RunError(
                f"the {'gradient' if math.isfinite(loss) else 'loss'} of step {state.global_step + 1} is not finite"
                f" on rank {rank}",
                where="training",
                fix="lower train.learning_rate, or look at the rows of this step; the last checkpoint is from before",
            )


def _gradient_norm(model: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn a write that fails into a RunError with its remedy.

    A full disk has three faces: OSError, safetensors' own error, and a RuntimeError of torch.save.

    Raises:
        RunError: something below `folder` could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in TORCH_WRITE_FAILED):
            raise
        raise RunError(
            f"writing failed ({str(error).splitlines()[0]})",
            where=str(folder),
            fix="make room, then continue with `make resume`; the last complete checkpoint is untouched",
        ) from error
