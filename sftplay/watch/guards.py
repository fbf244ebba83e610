"""Ends a run in good order: on a signal with a full checkpoint, on a step that is not finite without one.

Recovery from running out of memory is not here.
"""

from __future__ import annotations

import math
import signal
from typing import Any

from transformers import TrainerCallback

from sftplay import log
from sftplay.errors import RunError
from sftplay.watch.meters import gather

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopOnSignal(TrainerCallback):
    """After SIGTERM, SIGINT or SIGUSR1: finishes the step, writes a checkpoint, ends. A second one ends at once.

    Ranks agree at the step's edge, so that none waits in a collective for one that has left.
    """

    def __init__(self) -> None:
        self.received = 0

    def install(self) -> None:
        """Take over the three signals of this process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number
        log.say(f"{signal.Signals(number).name}: the step is finished, a checkpoint is written, then the run ends")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.received = max(gather(self.received))
        if self.received:
            control.should_save = True
            control.should_training_stop = True
        return control


class StopOnBadStep(TrainerCallback):
    """Ends the run before the optimizer takes a step whose loss is not finite on some rank.

    Looks in on_pre_optimizer_step, where all ranks meet, so all stop together and none waits in a collective; a check
    on logs would come after the weights are spoilt.
    """

    def __init__(self) -> None:
        self.window: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.fp16:
            return  # the gradient scaler skips such steps by itself and lowers its scale
        losses = gather(float(self.window.last_loss))
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            raise RunError(
                f"the loss of step {state.global_step + 1} is not finite on rank {bad[0]}",
                where="training",
                fix="lower train.learning_rate, or look at the rows of this step; the last checkpoint is from before",
            )
