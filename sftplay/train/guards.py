"""End a run in good order: after a signal or at its time limit with a checkpoint, at a bad step without one."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.errors import ConfigError, RunError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.signals import Echoes, StopAtOnce, catch_signals
from sftplay.train.disk import checkpoint_bytes
from sftplay.train.gradients import rough_gradient_norm
from sftplay.train.observer import Observer
from sftplay.units import format_seconds, parse_seconds

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


JOB_END = "SLURM_JOB_END_TIME"
"""When SLURM will end the job, in seconds of the epoch. SLURM sets it since 23.02 (its CHANGELOG/slurm-23.02.md)."""

MARGIN = 2.0
"""Factor on the longest step and checkpoint so far. The next ones may take longer on a shared disk or card."""

LEAST_S, LEAST_SHARE = 60.0, 0.1
"""The time that is always kept free: a minute, or a tenth of the whole time when that is less."""


@dataclass(frozen=True)
class Deadline:
    """The time by which a run must have ended."""

    at_s: float  # seconds of the epoch
    origin: str  # the setting that it comes from


def find_deadline(
    limit: str | int | None, environment: Mapping[str, str], *, started_s: float, now_s: float
) -> Deadline | None:
    """Return the earlier of `train.time_limit`, counted from `started_s`, and the SLURM job's end; None without both.
    Raise ConfigError where the deadline has passed.
    """
    deadlines = []
    if limit is not None:
        deadlines.append(Deadline(started_s + parse_seconds(str(limit)), f"train.time_limit {limit}"))
    end = environment.get(JOB_END, "")
    if end.isdecimal():
        deadlines.append(Deadline(float(end), f"the end of the SLURM job ({JOB_END})"))
    elif end:
        log.say(f"{JOB_END} {end!r} is not a number of seconds: the end of the job is not known")
    deadline = min(deadlines, key=lambda deadline: deadline.at_s, default=None)
    if deadline is not None and deadline.at_s <= now_s:
        over, is_ours = format_seconds(now_s - deadline.at_s), deadline.origin.startswith("train.")
        raise ConfigError(
            f"the time is over: {deadline.origin} was {over} ago, before the first step",
            where="train.time_limit" if is_ours else JOB_END,
            fix="allow more time" if is_ours else f"start it in a job that still runs, or unset {JOB_END}",
        )
    return deadline


class StopInTime(Observer):
    """Sets `stop.received` to SIGUSR1 when another step might leave too little time for the checkpoint after it.

    The main rank decides before the end of the step, where all ranks ask `stop`. This callback comes after the one that
    marks checkpoints complete, because that time belongs to the save. The time of the first checkpoint is estimated
    from its bytes, that of the first evaluation of a resumed run from those that earlier attempts have written down.
    """

    def __init__(self, deadline: Deadline, stop: StopOnSignal, *, clock: Callable[[], float] = time.time) -> None:
        self.deadline, self.stop, self._clock = deadline, stop, clock
        self.longest_s = {"step": 0.0, "evaluation": 0.0, "save": 0.0}
        self._since_s, self._least_s, self._estimated_save_s = clock(), LEAST_S, 0.0
        self._measuring: list[Observer] = []

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        self._measuring = [found for found in trainer.callback_handler.callbacks if isinstance(found, Observer)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since_s = self._clock()
        left = self.deadline.at_s - self._since_s
        self._least_s = min(LEAST_S, LEAST_SHARE * left)
        self.longest_s["evaluation"] = longest_evaluation_s(Path(args.output_dir).parent / "eval", state.log_history)
        log.say(
            f"{self.deadline.origin} leaves {format_seconds(max(0.0, left))}: the run stops in time and can be resumed"
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_measured_by_callback(state.global_step, state):  # before the first step
            self._record("evaluation")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._record("step")
        step = state.global_step + 1  # the Trainer counts it only after this event
        if not log.is_main() or self.stop.received or step >= state.max_steps:
            return
        if not self._estimated_save_s:
            size = checkpoint_bytes(Path(args.output_dir), more["model"], optimizer=more["optimizer"])
            # Assumed for the first checkpoint: the speed of a shared disk that others write to as well.
            self._estimated_save_s = size / 100e6
        # One more step and its checkpoint, with everything that is due before.
        save_s = (self.longest_s["save"] or self._estimated_save_s) * (2 if step % state.save_steps == 0 else 1)
        evaluations = 0
        for number in (step, step + 1):
            is_due = args.eval_strategy == "steps" and number % state.eval_steps == 0
            evaluations += is_due or self._is_measured_by_callback(number, state)
        needed = MARGIN * (self.longest_s["step"] + save_s + evaluations * self.longest_s["evaluation"])
        left = self.deadline.at_s - self._clock()
        if left < max(needed, self._least_s):
            self.stop.received = int(signal.SIGUSR1)
            log.say(
                f"{self.deadline.origin} is {format_seconds(max(0.0, left))} away, and another step with its checkpoint"
                f" may need {format_seconds(needed)}: stopping as after SIGUSR1"
            )

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_epoch_begin(args, state, control)  # a callback that measures asks for a line of metrics behind it

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._record("save")

    def _is_measured_by_callback(self, step: int, state: Any) -> bool:
        return any(callback.measures_at(step, state) for callback in self._measuring)

    def _record(self, part: str) -> None:
        now = self._clock()
        self.longest_s[part] = max(self.longest_s[part], now - self._since_s)
        self._since_s = now


def longest_evaluation_s(folder: Path, log_history: Sequence[Mapping[str, Any]]) -> float:
    """Return the longest evaluation of earlier attempts, by the Trainer's history and the files of eval/; 0 without."""
    seconds = [line.get("eval_runtime") for line in log_history]
    seconds += [read_object(path).get("seconds") for path in folder.glob("step-*.json")]
    return max((float(value) for value in seconds if isinstance(value, int | float)), default=0.0)
