"""The time limit of a run. The run stops early enough to write a checkpoint, as after SIGUSR1.

A step that takes longer than the time left is not interrupted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import read_object
from sftplay.errors import ConfigError
from sftplay.train.disk import checkpoint_bytes
from sftplay.train.guards import StopOnSignal
from sftplay.train.observer import Observer, StepTrainer
from sftplay.units import format_seconds, parse_seconds

JOB_END = "SLURM_JOB_END_TIME"
"""When SLURM will end the job, in seconds of the epoch. SLURM sets it since 23.02 (its CHANGELOG/slurm-23.02.md)."""

MARGIN = 2.0
"""Factor on the longest step and checkpoint so far. The next ones may take longer on a shared disk or card."""

LEAST_S, LEAST_SHARE = 60.0, 0.1
"""The time that is always kept free: a minute, or a tenth of the whole time when that is less."""

SLOW_DISK_BYTES_PER_S = 100e6
"""Assumed for the first checkpoint: the speed of a shared disk that others write to as well."""


@dataclass(frozen=True)
class Deadline:
    """The time by which a run must have ended."""

    at_s: float  # seconds of the epoch
    origin: str  # the setting that it comes from


def find_deadline(
    limit: str | int | None, environment: Mapping[str, str], *, started_s: float, now_s: float
) -> Deadline | None:
    """Return the earlier of `train.time_limit`, counted from `started_s`, and the SLURM job's end; None without both.

    Raises:
        ConfigError: the deadline has passed.
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


def process_start_s() -> float:
    """Return when this process began, in seconds of the epoch; the present time when the system does not say.

    Source: proc_pid_stat(5), field 22, in ticks since the machine was started.
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.time()
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


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

    def attach(self, trainer: StepTrainer) -> None:
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
            self._estimated_save_s = size / SLOW_DISK_BYTES_PER_S
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
