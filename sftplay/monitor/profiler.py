"""Profiles chosen optimizer steps: a trace for a viewer on each rank, and a summary of a few lines in the log.

Active from the first chosen step's wait for data to the last one's end, and not there at all in a run that chose none.
It judges nothing; what its figures say is in `profile_summary`.
"""

from __future__ import annotations

import errno
import gzip
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sftplay import log
from sftplay.config.schema.run import ProfileConfig
from sftplay.heartbeat import Heartbeat
from sftplay.monitor.profile_summary import PHASE_MARK, STEP_MARK, PersistentBytes, summarise
from sftplay.units import format_bytes

HISTORY_EVENTS = 100_000
"""Allocations a GPU's snapshot remembers; each takes about a KiB in the file."""

TAG = "profile"


class ProfileSteps(TrainerCallback):
    """Profiles steps `wanted.start` and following into `folder`; `heartbeat` tells where each phase begins.

    Ends early before an evaluation, which would bury the steps. A disk that takes no more costs the profile, not the
    run.
    """

    def __init__(self, wanted: ProfileConfig, folder: Path, heartbeat: Heartbeat) -> None:
        self.wanted, self.folder, self.heartbeat = wanted, folder, heartbeat
        self._profile: Any = None
        self._ranges: dict[str, Any] = {}
        self._now = (0, "")
        self._holders = PersistentBytes()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.wanted.start:
            log.say(f"nothing is profiled: the run goes on behind step {self.wanted.start}", TAG)
        elif state.max_steps < self.wanted.start:
            log.say(f"nothing is profiled: the run ends with step {state.max_steps}, before {self.wanted.start}", TAG)
        else:
            self.heartbeat.listener = self._hear

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._profile is not None and not self._holders.weights_bytes:
            self._holders.look_at_start(more["model"], more["optimizer"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._profile is not None:
            self._holders.look_at_gradients(more["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._profile is None:
            return
        is_last = state.global_step >= self.wanted.start + self.wanted.steps - 1
        if is_last or control.should_training_stop or control.should_evaluate:
            self.heartbeat.listener = None
            with self.heartbeat.within("save"):
                self._end(state.global_step)

    def _hear(self, phase: str, step: int) -> None:
        if self._profile is None:
            if step < self.wanted.start:
                return
            self._begin()
        if self._now == (step, phase):
            return
        self._leave(PHASE_MARK)
        if self._now[0] != step:
            self._leave(STEP_MARK)
            self._enter(STEP_MARK, str(step))
        self._enter(PHASE_MARK, phase)
        self._now = (step, phase)

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the step before has left in the queue is not of this one
            self._holders.allocated_bytes = torch.cuda.memory_allocated()
            if self.wanted.memory:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)
        self._profile = torch.profiler.profile(profile_memory=self.wanted.memory)
        self._profile.start()

    def _enter(self, mark: str, what: str) -> None:
        self._ranges[mark] = torch.profiler.record_function(mark + what)
        self._ranges[mark].__enter__()

    def _leave(self, mark: str) -> None:
        if mark in self._ranges:
            self._ranges.pop(mark).__exit__(None, None, None)

    def _end(self, step: int) -> None:
        self._leave(PHASE_MARK)
        self._leave(STEP_MARK)
        profile, self._profile = self._profile, None
        profile.stop()
        # The trace can be saved once, and holds on to its events only until then.
        lines = summarise(profile, self._holders, memory=self.wanted.memory) if log.is_main() else []
        trace = self.folder / f"rank{log.rank()}.trace.json.gz"
        snapshot = self.folder / f"rank{log.rank()}.memory.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_trace(profile, trace)
            lines.append(f"{trace} ({format_bytes(trace.stat().st_size)}): open it in Perfetto")
            if torch.cuda.is_available() and self.wanted.memory:
                torch.cuda.memory._dump_snapshot(str(snapshot))
                lines.append(f"{snapshot}: open it in PyTorch's memory viewer")
        except OSError as error:
            log.say(f"the profile could not be written, the run goes on: {error}", TAG)
        finally:
            if torch.cuda.is_available() and self.wanted.memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        log.say("\n".join([f"steps {self.wanted.start} to {step}:", *(f"  {line}" for line in lines)]), TAG)


def write_trace(profile: Any, target: Path) -> None:
    """Write the gzipped Chrome trace of a stopped `torch.profiler.profile`, whole or not at all.

    Raises:
        OSError: the disk took not all of it.
    """
    plain, packed = target.with_name(f".{target.stem}"), target.with_name(f".{target.name}")
    unfinished = plain.with_name(f"{plain.name}.tmp")
    try:
        profile.export_chrome_trace(str(plain))
        if not plain.exists():  # its writer, in C++, raises nothing
            raise OSError(errno.EIO, "torch could not write the trace and says why in the rank's log", str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as out:
            shutil.copyfileobj(source, out)
        packed.replace(target)
    finally:
        for each in (plain, unfinished, packed):  # on a full disk they would take the room of a checkpoint
            each.unlink(missing_ok=True)
