"""End a run in good order: at a signal, its time limit or a bad step, and before the disk is full."""

from __future__ import annotations

import errno
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import EarlyStoppingCallback, TrainerCallback

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.errors import ConfigError, RunError
from sftplay.heartbeat import Heartbeat
from sftplay.launch.checkpoints import is_marked, list_checkpoints, list_marked
from sftplay.model.out_of_memory import gather_objects
from sftplay.signals import Echoes, StopAtOnce, catch_signals
from sftplay.train.exact_batch import rough_gradient_norm
from sftplay.train.metrics import Observer
from sftplay.units import format_seconds, parse_seconds

WRITE_FAILED = ("while serializing", "PytorchStreamWriter", "unexpected pos", "iostream error")
"""Texts in errors when a file cannot be written: of safetensors, whose errors of reading have another text, and of
torch.save (caffe2/serialize/inline_container.cc)."""

SMALL_FILES_BYTES = 1 << 16  # room for status.json, metrics.jsonl and logs next to a checkpoint

FIX = "make room, then continue with `make resume`; the last complete checkpoint is untouched"


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def checkpoint_bytes(checkpoints: Path, model: Any, *, optimizer: Any) -> int:
    """Return the size of the next checkpoint: that of the newest complete one; without one, the size of its tensors."""
    if complete := list_marked(checkpoints):
        return folder_bytes(complete[-1])
    states = (value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes"))
    return trained_bytes(model) + sum(int(state.nbytes) for state in states)


def trained_bytes(model: Any) -> int:
    return sum(int(weight.nbytes) for weight in model.parameters() if weight.requires_grad)


def check_room(checkpoints: Path, size_bytes: int) -> None:
    """Raise RunError where there is no room for a checkpoint of this size and the small files next to it."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(checkpoints).free, size_bytes + SMALL_FILES_BYTES
    if free < needed:
        raise RunError(
            f"the disk is too full for the next checkpoint: {needed:,} bytes needed, {free:,} free",
            where=str(checkpoints),
            fix=FIX,
        )


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn a failed write into a RunError with its remedy, and remove half-written files in the run's `folder`.

    A full disk raises one of three errors: OSError, safetensors' own error, and a RuntimeError of torch.save.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not isinstance(error, OSError) and not any(sign in str(error) for sign in WRITE_FAILED):
            raise
        room = ""
        if not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            checkpoints = folder / "checkpoints"
            room = f"{shutil.disk_usage(folder).free:,} bytes free"
            if complete := list_marked(checkpoints):
                room = f"a checkpoint needs {folder_bytes(complete[-1]):,} bytes, {room}"
            unmarked = [checkpoint for checkpoint in list_checkpoints(checkpoints) if not is_marked(checkpoint)]
            for unfinished in (*unmarked, folder / ".adapter.part", folder / ".model.part"):
                shutil.rmtree(unfinished, ignore_errors=True)
        where = getattr(error, "filename", None) or folder
        what = f"writing failed ({str(error).splitlines()[0]}){f': {room}' if room else ''}"
        raise RunError(what, where=str(where), fix=FIX) from error


class WarnOfFullDisk(TrainerCallback):
    """Warns once, while there is time, that the disk will be full before the end of the run.

    The prediction counts the `limit` checkpoints that are kept, the result, and the other files on the disk, which go
    on growing at the rate since the first prediction. It is made after the first step, when the optimizer's states
    exist, and after each checkpoint, behind the callback that removes old ones.
    """

    def __init__(self, checkpoints: Path, limit: int) -> None:
        self.checkpoints, self.limit = checkpoints, limit
        self._first: tuple[int, int] | None = None
        """Step of the first prediction, and the bytes that were free then or held by checkpoints."""

        self._warned = False

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._first is None and not control.should_save:
            self._predict(state, more["model"], optimizer=more["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._predict(state, more["model"], optimizer=more["optimizer"])

    def _predict(self, state: Any, model: Any, *, optimizer: Any) -> None:
        if self._warned or not log.is_main():
            return
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        free, held = shutil.disk_usage(self.checkpoints).free, folder_bytes(self.checkpoints)
        step, steps_left = state.global_step, state.max_steps - state.global_step
        self._first = self._first or (step, free + held)
        others = max(0, self._first[1] - free - held) * steps_left // max(1, step - self._first[0])
        size = checkpoint_bytes(self.checkpoints, model, optimizer=optimizer)
        kept = len(list_marked(self.checkpoints))
        saves = math.ceil(steps_left / state.save_steps)
        # A new checkpoint is complete before an old one is removed.
        growth = size * max(min(saves, self.limit + 1 - kept), min(saves, 1))
        result = trained_bytes(model)
        needed = growth + result + others + SMALL_FILES_BYTES
        if free < needed:
            self._warned = True
            log.say(
                f"warning: the disk will be full before step {state.max_steps}: {free:,} bytes free, {needed:,} needed"
                f" (checkpoints {growth:,} at {size:,} each, result {result:,}, growth of other files {others:,});"
                f" make room on {self.checkpoints}, or lower train.save_total_limit"
            )


FP16_PATIENCE = 16
"""Steps in a row that an fp16 run may skip. The gradient scaler begins at 2^16 and halves its scale once a step."""


class StopOnSignal(Observer):
    """After a stop signal the run finishes the step, writes a checkpoint and ends. A second signal ends it at once.

    Ranks agree at the end of a step. `outside` handles signals before the first step and after the last; without it no
    handler is installed.
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

    It checks in on_pre_optimizer_step, which all ranks reach, so that none waits for another. In fp16 the gradient
    scaler skips such steps and lowers its scale: there the run ends after so many of them that no scale can help.
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
            what += f"; rows that are not finite alone: {', '.join(map(str, suspects[:8]))}"
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


def gather_numbers(numbers: Sequence[float], heartbeat: Heartbeat) -> list[list[float]]:
    """Gather a few numbers, as `gather_objects` does, in fp64: one collective, and nothing is pickled."""
    if log.world_size() == 1:
        return [list(numbers)]
    device = "cuda" if "nccl" in torch.distributed.get_backend() else "cpu"
    local = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks = local.new_empty(log.world_size() * len(numbers))
    with heartbeat.within("communication"):
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

    The main rank decides before the end of the step, where all ranks ask `stop`. It comes after the callback that marks
    checkpoints complete. The first checkpoint's time is estimated from its bytes.
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
