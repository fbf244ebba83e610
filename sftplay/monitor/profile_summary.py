"""What a profile says in a few lines: which phases and operators took the time, and what held the memory.

It reads a stopped `torch.profiler.profile` and writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sftplay.units import format_bytes

STEP_MARK, PHASE_MARK = "ProfilerStep#", "phase: "
"""How ranges of a step and of a phase begin; the first is torch's own, which other tools look for."""

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's names for what keeps a GPU busy (torch/csrc/profiler, libkineto ActivityType)."""

TOP = 5

Span = tuple[int, int]
"""Begin and end in nanoseconds."""


@dataclass
class PersistentBytes:
    """Bytes of what lives longer than a step, on this rank."""

    allocated_bytes: int = 0
    """All a GPU held when the profile began."""

    weights_bytes: int = 0
    optimizer_bytes: int = 0
    gradients_bytes: int = 0

    def look_at_start(self, model: Any, optimizer: Any) -> None:
        """Before the first profiled step's forward pass."""
        tensors = [*model.parameters(), *model.buffers()]
        states = (each for state in optimizer.state.values() for each in state.values())
        self.weights_bytes = sum(int(each.nbytes) for each in tensors)
        self.optimizer_bytes = sum(int(each.nbytes) for each in states if hasattr(each, "nbytes"))

    def look_at_gradients(self, model: Any) -> None:
        """When they are complete."""
        self.gradients_bytes = sum(int(p.grad.nbytes) for p in model.parameters() if p.grad is not None)


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
        lines += [_memory_line(changes, spans, holders), _allocation_line(operators, on_gpu=on_gpu)]
    return lines


def idle_share(work: Iterable[Span], wall: Span) -> float:
    """The share of `wall` in which none of the overlapping spans of `work` lies."""
    busy, reached = 0, wall[0]
    for begin, end in sorted(work):
        begin, end = max(begin, reached), min(end, wall[1])
        if end > begin:
            busy, reached = busy + end - begin, end
    return 1 - busy / max(1, wall[1] - wall[0])


def highest(changes: Iterable[tuple[int, int]]) -> tuple[int, int]:
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


def _memory_line(changes: list[tuple[int, int]], spans: list[tuple[int, int, str]], holders: PersistentBytes) -> str:
    at, above = highest(changes)
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
    # A kernel has a row of its own, and its time stands in its operator's row as well.
    return bool(row.device_type.name == "CPU")
