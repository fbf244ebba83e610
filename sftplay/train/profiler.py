"""Profiles chosen optimizer steps: each rank writes a trace for a viewer, and the log gets a summary of a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sftplay import log
from sftplay.config.train import ProfileConfig
from sftplay.heartbeat import Heartbeat
from sftplay.units import format_bytes

HISTORY_EVENTS = 100_000  # allocations that a GPU's snapshot records; each takes about a KiB in the file

TAG, PHASE_MARK, TOP = "profile", "phase: ", 5

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's names for the work of a GPU (torch/csrc/profiler, libkineto ActivityType)."""

Span = tuple[int, int]
"""Begin and end in nanoseconds."""


class ProfileSteps(TrainerCallback):
    """Profiles the steps of `config` into `folder`. `heartbeat` says when each phase begins.

    A step begins when it waits for its data. The profile ends early before an evaluation, which would hide the steps. A
    full disk ends the profile, not the run.
    """

    def __init__(self, config: ProfileConfig, folder: Path, *, heartbeat: Heartbeat) -> None:
        self.config, self.folder, self.heartbeat = config, folder, heartbeat
        self.profile: Any = None
        self._phase: tuple[str, Any] | None = None
        self._last_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        start = self.config.start
        if state.global_step >= start:
            log.say(f"nothing is profiled: the run continues after step {start}", TAG)
        elif state.max_steps < start:
            log.say(f"nothing is profiled: the run ends with step {state.max_steps}, before {start}", TAG)
        else:
            steps = {"skip_first": start - 1, "wait": 0, "warmup": 1, "active": self.config.steps, "repeat": 1}
            self.profile = torch.profiler.profile(
                schedule=torch.profiler.schedule(**steps), profile_memory=self.config.memory, on_trace_ready=self._write
            )
            self.profile.start()
            for step in range(1, state.global_step + 2):  # torch counts from 0 on, in each process
                self._begin(step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.profile is None:
            return
        self._leave_phase()
        self._last_step = state.global_step
        if self.heartbeat.listener and (control.should_training_stop or control.should_evaluate):
            self.profile.stop()
        else:
            self._begin(state.global_step + 1)

    def _begin(self, step: int) -> None:
        if step == self.config.start:
            self.heartbeat.listener = self._on_phase
            if torch.cuda.is_available() and self.config.memory:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)
        self.profile.step()

    def _on_phase(self, phase: str, step: int) -> None:
        if self._phase is None or self._phase[0] != phase:
            self._leave_phase()
            self._phase = (phase, torch.profiler.record_function(PHASE_MARK + phase))
            self._phase[1].__enter__()

    def _leave_phase(self) -> None:
        if self._phase is not None:
            self._phase[1].__exit__(None, None, None)
        self._phase = None

    def _write(self, profile: Any) -> None:
        self.heartbeat.listener = self.profile = None
        with self.heartbeat.within("save"):
            # The trace can be saved only once, and then its events are gone.
            lines = summarise(profile, memory=self.config.memory) if log.is_main() else []
            trace = self.folder / f"rank{log.rank()}.trace.json.gz"
            snapshot, unfinished = self.folder / f"rank{log.rank()}.memory.pickle", trace.with_name(f".{trace.name}")
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(unfinished))
                unfinished.replace(trace)
                lines.append(f"{trace} ({format_bytes(trace.stat().st_size)}): open it in Perfetto")
                if torch.cuda.is_available() and self.config.memory:
                    torch.cuda.memory._dump_snapshot(str(snapshot))
                    lines.append(f"{snapshot}: open it in PyTorch's memory viewer")
            except OSError as error:
                unfinished.unlink(missing_ok=True)
                log.say(f"the profile could not be written, the run goes on: {error}", TAG)
            finally:
                if torch.cuda.is_available() and self.config.memory:
                    torch.cuda.memory._record_memory_history(enabled=None)
            steps = f"steps {self.config.start} to {self._last_step}:"
            log.say("\n".join([steps, *(f"  {line}" for line in lines)]), TAG)


def summarise(profile: Any, *, memory: bool) -> list[str]:
    """Return at most four lines about a stopped profile. Shares are of the time between its first and last phase."""
    events, on_gpu = list(profile.profiler.kineto_results.events()), torch.cuda.is_available()
    spans = [
        (event.start_ns(), event.end_ns(), event.name().removeprefix(PHASE_MARK))
        for event in events
        if event.name().startswith(PHASE_MARK) and event.device_type().name == "CPU"
    ]
    if not spans:
        return []
    wall: Span = (min(begin for begin, _, _ in spans), max(end for _, end, _ in spans))
    phases, wall_ns = Counter[str](), wall[1] - wall[0]
    for begin, end, name in spans:
        phases[name] += end - begin

    def list_shares(spent: Counter[str]) -> str:
        return ", ".join(f"{name} {time_ns / wall_ns:.0%}" for name, time_ns in spent.most_common(TOP) if time_ns > 0)

    # A kernel's own row is left out: its time is in the row of its operator as well.
    operators = [row for row in profile.key_averages() if not row.is_user_annotation and row.device_type.name == "CPU"]
    kind = "device" if on_gpu else "cpu"
    spent = Counter({row.key: round(1000 * getattr(row, f"self_{kind}_time_total")) for row in operators})
    lines = [
        f"{wall_ns / 1e9:.3g} s in all: {list_shares(phases)}",
        f"operators on the {'GPU' if on_gpu else 'CPU'}: {list_shares(spent)}",
    ]
    if on_gpu:
        work = [(event.start_ns(), event.end_ns()) for event in events if event.activity_type() in GPU_WORK]
        lines.append(f"the GPU was idle for {idle_share(work, wall):.0%} of the time")
    if memory:
        allocated = Counter({row.key: getattr(row, f"self_{kind}_memory_usage") for row in operators})
        top = [f"{name} {format_bytes(n_bytes)}" for name, n_bytes in allocated.most_common(TOP) if n_bytes > 0]
        lines.append(f"memory allocated in all, by operator: {', '.join(top)}")
    return lines


def idle_share(work: Iterable[Span], wall: Span) -> float:
    """Return the share of `wall` that no span of `work` covers. The spans may overlap."""
    busy, reached = 0, wall[0]
    for begin, end in sorted(work):
        begin, end = max(begin, reached), min(end, wall[1])
        if end > begin:
            busy, reached = busy + end - begin, end
    return 1 - busy / max(1, wall[1] - wall[0])
