"""Profiles chosen optimizer steps: each rank writes a trace for a viewer, and the log gets a summary of a few lines.

The profile begins when the first chosen step waits for its data, and ends with the last one. Without chosen steps
nothing here is used.
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
from sftplay.config.run import ProfileConfig
from sftplay.heartbeat import Heartbeat
from sftplay.units import format_bytes

HISTORY_EVENTS = 100_000  # allocations that a GPU's snapshot records; each takes about a KiB in the file

TAG = "profile"

STEP_MARK, PHASE_MARK = "ProfilerStep#", "phase: "
"""Beginnings of the names of the ranges of a step and a phase. The first is torch's own, which other tools know."""

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's names for the work of a GPU (torch/csrc/profiler, libkineto ActivityType)."""

TOP = 5

Span = tuple[int, int]
"""Begin and end in nanoseconds."""


@dataclass
class PersistentBytes:
    """Bytes on this rank of tensors that live longer than a step."""

    allocated_bytes: int = 0  # everything that was allocated on the GPU when the profile began
    weights_bytes: int = 0
    optimizer_bytes: int = 0
    gradients_bytes: int = 0


class ProfileSteps(TrainerCallback):
    """Profiles the steps of `config` into `folder`. `heartbeat` says when each phase begins.

    The profile ends early before an evaluation, which would hide the steps. A full disk ends the profile, not the run.
    """

    def __init__(self, config: ProfileConfig, folder: Path, *, heartbeat: Heartbeat) -> None:
        self.config, self.folder, self.heartbeat = config, folder, heartbeat
        self._profile: Any = None
        self._ranges: dict[str, Any] = {}
        self._current = (0, "")  # the step and phase whose ranges are open
        self._persistent = PersistentBytes()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.config.start:
            log.say(f"nothing is profiled: the run continues after step {self.config.start}", TAG)
        elif state.max_steps < self.config.start:
            log.say(f"nothing is profiled: the run ends with step {state.max_steps}, before {self.config.start}", TAG)
        else:
            self.heartbeat.listener = self._on_phase

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._profile is not None and not self._persistent.weights_bytes:
            tensors = (*more["model"].parameters(), *more["model"].buffers())
            states = (value for state in more["optimizer"].state.values() for value in state.values())
            self._persistent.weights_bytes = sum(int(tensor.nbytes) for tensor in tensors)
            self._persistent.optimizer_bytes = sum(int(value.nbytes) for value in states if hasattr(value, "nbytes"))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._profile is not None:
            gradients = (p.grad for p in more["model"].parameters() if p.grad is not None)
            self._persistent.gradients_bytes = sum(int(gradient.nbytes) for gradient in gradients)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._profile is None:
            return
        is_last = state.global_step >= self.config.start + self.config.steps - 1
        if is_last or control.should_training_stop or control.should_evaluate:
            self.heartbeat.listener = None
            with self.heartbeat.within("save"):
                self._end(state.global_step)

    def _on_phase(self, phase: str, step: int) -> None:
        if self._profile is None:
            if step < self.config.start:
                return
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # kernels of the step before may still be in the queue
                self._persistent.allocated_bytes = torch.cuda.memory_allocated()
                if self.config.memory:
                    torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)
            self._profile = torch.profiler.profile(profile_memory=self.config.memory)
            self._profile.start()
        if self._current == (step, phase):
            return
        is_new_step = self._current[0] != step
        self._leave(*((PHASE_MARK, STEP_MARK) if is_new_step else (PHASE_MARK,)))
        for mark, name in ((STEP_MARK, str(step)), (PHASE_MARK, phase)) if is_new_step else ((PHASE_MARK, phase),):
            self._ranges[mark] = torch.profiler.record_function(mark + name)
            self._ranges[mark].__enter__()
        self._current = (step, phase)

    def _leave(self, *marks: str) -> None:
        for mark in marks:
            if mark in self._ranges:
                self._ranges.pop(mark).__exit__(None, None, None)

    def _end(self, step: int) -> None:
        self._leave(PHASE_MARK, STEP_MARK)
        profile, self._profile = self._profile, None
        profile.stop()
        # The trace can be saved only once, and then its events are gone.
        lines = summarise(profile, self._persistent, memory=self.config.memory) if log.is_main() else []
        trace = self.folder / f"rank{log.rank()}.trace.json.gz"
        snapshot = self.folder / f"rank{log.rank()}.memory.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_trace(profile, trace)
            lines.append(f"{trace} ({format_bytes(trace.stat().st_size)}): open it in Perfetto")
            if torch.cuda.is_available() and self.config.memory:
                torch.cuda.memory._dump_snapshot(str(snapshot))
                lines.append(f"{snapshot}: open it in PyTorch's memory viewer")
        except OSError as error:
            log.say(f"the profile could not be written, the run goes on: {error}", TAG)
        finally:
            if torch.cuda.is_available() and self.config.memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        log.say("\n".join([f"steps {self.config.start} to {step}:", *(f"  {line}" for line in lines)]), TAG)


def write_trace(profile: Any, target: Path) -> None:
    """Write the gzipped Chrome trace of a stopped `torch.profiler.profile`, whole or not at all. Raise OSError where
    not all of it could be written.
    """
    plain, packed = target.with_name(f".{target.stem}"), target.with_name(f".{target.name}")
    unfinished = plain.with_name(f"{plain.name}.tmp")
    try:
        profile.export_chrome_trace(str(plain))
        if not plain.exists():  # its writer, in C++, raises no error
            raise OSError(errno.EIO, "torch could not write the trace; the rank's log has the reason", str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as out:
            shutil.copyfileobj(source, out)
        packed.replace(target)
    finally:
        for path in (plain, unfinished, packed):  # on a full disk they would take the room of a checkpoint
            path.unlink(missing_ok=True)


def summarise(profile: Any, persistent: PersistentBytes, *, memory: bool) -> list[str]:
    """Return at most six lines about a stopped profile. Shares are of the time between its first and last range."""
    events, on_gpu = list(profile.profiler.kineto_results.events()), torch.cuda.is_available()
    spans = [
        (event.start_ns(), event.end_ns(), event.name().removeprefix(PHASE_MARK))
        for event in events
        if event.name().startswith(PHASE_MARK) and event.device_type().name == "CPU"
    ]
    if not spans:
        return []
    wall: Span = (min(begin for begin, _, _ in spans), max(end for _, end, _ in spans))
    wall_ns = wall[1] - wall[0]
    phases, kind = Counter[str](), "device" if on_gpu else "cpu"
    for begin, end, name in spans:
        phases[name] += end - begin
    # A kernel's own row is left out: its time is in the row of its operator as well.
    operators = [row for row in profile.key_averages() if not row.is_user_annotation and row.device_type.name == "CPU"]
    spent = Counter({row.key: round(1000 * getattr(row, f"self_{kind}_time_total")) for row in operators})
    others = "" if on_gpu else f"; outside operators (Python, waiting) {max(0.0, 1 - spent.total() / wall_ns):.0%}"
    lines = [
        f"{wall_ns / 1e9:.3g} s in all: {_list_shares(phases, wall_ns)}",
        f"operators on the {'GPU' if on_gpu else 'CPU'}: {_list_shares(spent, wall_ns)}{others}",
    ]
    if on_gpu:
        work = [(event.start_ns(), event.end_ns()) for event in events if event.activity_type() in GPU_WORK]
        lines.append(f"the GPU was idle for {idle_share(work, wall):.0%} of the time")
    if memory:
        changes = [
            (event.start_ns(), event.nbytes())
            for event in events
            if event.name() == "[memory]" and event.device_type().name == ("CUDA" if on_gpu else "CPU")
        ]
        allocated = Counter({row.key: getattr(row, f"self_{kind}_memory_usage") for row in operators})
        top = [f"{name} {format_bytes(n_bytes)}" for name, n_bytes in allocated.most_common(TOP) if n_bytes > 0]
        time_ns, above = highest_point(changes)
        lasting = persistent.weights_bytes + persistent.optimizer_bytes
        peak = above + (persistent.allocated_bytes or lasting)
        phase = next((name for begin, end, name in spans if begin <= time_ns <= end), "between phases")
        lines.append(
            f"memory of tensors at most {format_bytes(peak)}, in {phase}:"
            f" weights {format_bytes(persistent.weights_bytes)}, optimizer {format_bytes(persistent.optimizer_bytes)},"
            f" activations and the rest {format_bytes(max(0, peak - lasting))}"
            f" (gradients reach {format_bytes(persistent.gradients_bytes)})"
        )
        lines.append(f"allocated in all, by operator: {', '.join(top)}")
    return lines


def idle_share(work: Iterable[Span], wall: Span) -> float:
    """Return the share of `wall` that no span of `work` covers. The spans may overlap."""
    busy, reached = 0, wall[0]
    for begin, end in sorted(work):
        begin, end = max(begin, reached), min(end, wall[1])
        if end > begin:
            busy, reached = busy + end - begin, end
    return 1 - busy / max(1, wall[1] - wall[0])


def highest_point(changes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return time in nanoseconds and height of the peak of a sum of changes (time, bytes); (0, 0) without a peak."""
    held, peak = 0, (0, 0)
    for time_ns, n_bytes in sorted(changes, key=lambda change: change[0]):
        held += n_bytes
        if held > peak[1]:
            peak = (time_ns, held)
    return peak


def _list_shares(spent: Counter[str], wall_ns: int) -> str:
    return ", ".join(f"{name} {time_ns / wall_ns:.0%}" for name, time_ns in spent.most_common(TOP) if time_ns > 0)
