"""Profiles chosen optimizer steps: a trace on each rank for a viewer, and a summary of a few lines in the log.

Active from the moment the first chosen step waits for its data until the last one ends; a run that chose none has none
of this.
"""

from __future__ import annotations

import errno
import gzip
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sftplay import log
from sftplay.config.schema.run import ProfileConfig
from sftplay.heartbeat import Heartbeat
from sftplay.units import format_bytes

HISTORY_EVENTS = 100_000
"""Allocations that a GPU's snapshot records; each takes about a KiB in the file."""

TAG = "profile"

STEP_MARK, PHASE_MARK = "ProfilerStep#", "phase: "
"""How the names of a step's and a phase's range begin; the first is torch's own, which other tools look for."""

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's names for what keeps a GPU busy (torch/csrc/profiler, libkineto ActivityType)."""

TOP = 5

Span = tuple[int, int]
"""Begin and end in nanoseconds."""


@dataclass
class PersistentBytes:
    """Bytes on this rank of what exists longer than a step."""

    allocated_bytes: int = 0
    """Allocated on the GPU when the profile began."""

    weights_bytes: int = 0
    optimizer_bytes: int = 0
    gradients_bytes: int = 0

    def count_weights(self, model: Any, optimizer: Any) -> None:
        """Called before the forward pass of the first profiled step."""
        tensors = [*model.parameters(), *model.buffers()]
        states = (each for state in optimizer.state.values() for each in state.values())
        self.weights_bytes = sum(int(each.nbytes) for each in tensors)
        self.optimizer_bytes = sum(int(each.nbytes) for each in states if hasattr(each, "nbytes"))

    def count_gradients(self, model: Any) -> None:
        """Called when they are complete."""
        self.gradients_bytes = sum(int(p.grad.nbytes) for p in model.parameters() if p.grad is not None)


class ProfileSteps(TrainerCallback):
    """Profiles steps `wanted.start` and following into `folder`; `heartbeat` tells where each phase begins.

    It ends early before an evaluation, which would hide the steps. A full disk ends the profile, not the run.
    """

    def __init__(self, wanted: ProfileConfig, folder: Path, *, heartbeat: Heartbeat) -> None:
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
            self._holders.count_weights(more["model"], more["optimizer"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._profile is not None:
            self._holders.count_gradients(more["model"])

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
            torch.cuda.synchronize()  # work that the step before left in the queue does not belong to this one
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
        # The trace can be saved once, and has its events only until then.
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
        OSError: not all of it could be written.
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
        for each in (plain, unfinished, packed):  # on a full disk they would take a checkpoint's room
            each.unlink(missing_ok=True)


def summarise(profile: Any, holders: PersistentBytes, *, memory: bool) -> list[str]:
    """At most six lines about a stopped profile. Shares are of the wall time from its first to its last range."""
    events = list(profile.profiler.kineto_results.events())
    on_gpu = torch.cuda.is_available()
    phases = [each for each in events if each.name().startswith(PHASE_MARK) and _is_on_host(each)]
    if not phases:
        return []
    wall: Span = (min(each.start_ns() for each in phases), max(each.end_ns() for each in phases))
    operators = [each for each in profile.key_averages() if not each.is_user_annotation and _is_host_row(each)]
    lines = [_phase_line(phases, wall), _operator_line(operators, wall, on_gpu=on_gpu)]
    if on_gpu:
        work = [(each.start_ns(), each.end_ns()) for each in events if each.activity_type() in GPU_WORK]
        lines.append(f"the GPU was idle for {idle_share(work, wall):.0%} of the time")
    if memory:
        kind = "CUDA" if on_gpu else "CPU"
        changes = [
            (each.start_ns(), each.nbytes())
            for each in events
            if each.name() == "[memory]" and each.device_type().name == kind
        ]
        spans = [(each.start_ns(), each.end_ns(), each.name().removeprefix(PHASE_MARK)) for each in phases]
        lines += [_memory_line(changes, spans, holders=holders), _allocation_line(operators, on_gpu=on_gpu)]
    return lines


def idle_share(work: Iterable[Span], wall: Span) -> float:
    """The share of `wall` in which none of the overlapping spans of `work` lies."""
    busy, reached = 0, wall[0]
    for begin, end in sorted(work):
        begin, end = max(begin, reached), min(end, wall[1])
        if end > begin:
            busy, reached = busy + end - begin, end
    return 1 - busy / max(1, wall[1] - wall[0])


def highest_point(changes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Nanosecond and height of the highest point of a sum of (nanosecond, bytes more or fewer); (0, 0) without one."""
    held, peak = 0, (0, 0)
    for at, n_bytes in sorted(changes, key=lambda change: change[0]):
        held += n_bytes
        if held > peak[1]:
            peak = (at, held)
    return peak


def _phase_line(phases: list[Any], wall: Span) -> str:
    spent: Counter[str] = Counter()
    for each in phases:
        spent[each.name().removeprefix(PHASE_MARK)] += each.duration_ns()
    return f"{(wall[1] - wall[0]) / 1e9:.3g} s in all: {_shares(spent, wall)}"


def _operator_line(operators: list[Any], wall: Span, *, on_gpu: bool) -> str:
    kind = "device" if on_gpu else "cpu"
    spent = Counter({each.key: round(1000 * getattr(each, f"self_{kind}_time_total")) for each in operators})
    rest = max(0.0, 1 - spent.total() / (wall[1] - wall[0]))
    outside = "" if on_gpu else f"; outside operators (Python, waiting) {rest:.0%}"
    return f"operators on the {'GPU' if on_gpu else 'CPU'}: {_shares(spent, wall)}{outside}"


def _shares(spent: Counter[str], wall: Span) -> str:
    return ", ".join(f"{name} {took / (wall[1] - wall[0]):.0%}" for name, took in spent.most_common(TOP) if took > 0)


def _memory_line(changes: list[tuple[int, int]], spans: list[tuple[int, int, str]], *, holders: PersistentBytes) -> str:
    at, above = highest_point(changes)
    lasting = holders.weights_bytes + holders.optimizer_bytes
    peak = above + (holders.allocated_bytes or lasting)
    phase = next((name for begin, end, name in spans if begin <= at <= end), "between phases")
    return (
        f"memory of tensors at most {format_bytes(peak)}, in {phase}: weights {format_bytes(holders.weights_bytes)},"
        f" optimizer {format_bytes(holders.optimizer_bytes)}, activations and all else"
        f" {format_bytes(max(0, peak - lasting))} (gradients reach {format_bytes(holders.gradients_bytes)})"
    )


def _allocation_line(operators: list[Any], *, on_gpu: bool) -> str:
    kind = "device" if on_gpu else "cpu"
    taken = Counter({each.key: getattr(each, f"self_{kind}_memory_usage") for each in operators})
    top = [f"{name} {format_bytes(n_bytes)}" for name, n_bytes in taken.most_common(TOP) if n_bytes > 0]
    return f"allocated in all, by operator: {', '.join(top)}"


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")


def _is_host_row(row: Any) -> bool:
    # A kernel has a row of its own, and its time is in its operator's row as well.
    return bool(row.device_type.name == "CPU")
