"""Measured peaks of a few steps as straight lines over tokens, which take the place of the estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

TOLERANCE = 0.05
"""A third point may be this share off the line through the other two; the allocator rounds, but by far less."""


@dataclass(frozen=True)
class Point:
    """Peaks of one micro-batch size in the steady state of training."""

    rows: int
    tokens: int
    peaks_bytes: Mapping[str, int]  # by phase of a step, as `forecast.Footprint` names them
    reserved_bytes: int | None = None  # the most that torch's allocator held, cached blocks with it; None without one
    seconds: float = 0.0  # of one optimizer step

    @property
    def peak_phase(self) -> str:
        return max(self.peaks_bytes, key=lambda phase: self.peaks_bytes[phase])

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks_bytes.values())


@dataclass(frozen=True)
class MemoryLine:
    """A straight line over tokens."""

    fixed_bytes: float
    bytes_per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed_bytes + self.bytes_per_token * tokens


@dataclass(frozen=True)
class Fit:
    """What was measured, as lines; `at` gives the peak of any number of tokens."""

    lines: Mapping[str, MemoryLine]
    peak_phase: str  # the phase of the measured peaks
    accumulates: bool = True  # True when the measured steps had several micro-batches, as most runs' steps do
    # What the process took on the device outside torch's allocator; None where that cannot be told.
    context_bytes: int | None = None
    points: Sequence[Point] = field(default=())

    def at(self, tokens: int) -> float:
        """The peak in bytes, in whichever phase it lies."""
        return max(line.at(tokens) for line in self.lines.values())

    def reaching(self, tokens: int, floor_bytes: float) -> Fit:
        """The same with a steeper peak line after its last point, by which `tokens` take at least `floor_bytes`."""
        last = self.points[-1]
        slope = (floor_bytes - last.peak_bytes) / max(1, tokens - last.tokens)
        if tokens <= last.tokens or slope <= self.lines[self.peak_phase].bytes_per_token:
            return self
        steep = MemoryLine(last.peak_bytes - slope * last.tokens, slope)
        return replace(self, lines={**self.lines, self.peak_phase: steep})

    def as_dict(self) -> dict[str, Any]:
        """For plan.json."""
        lines = {phase: asdict(line) for phase, line in self.lines.items()}
        return {"peak_phase": self.peak_phase, "lines": lines, "context_bytes": self.context_bytes}


@dataclass(frozen=True)
class NoFit:
    """Why no line can be drawn; the estimate then stays as it is."""

    reason: str


def fit(points: Sequence[Point], slopes: Mapping[str, float] | None = None) -> Fit | NoFit:
    """Draw lines through the two largest points; through one alone with `slopes`, the estimate's, by phase."""
    ordered = sorted({point.tokens: point for point in points}.values(), key=lambda point: point.tokens)
    if not ordered:
        return NoFit("nothing was measured")
    last = ordered[-1]
    if len(ordered) == 1:
        if slopes is None:
            return NoFit(f"only {last.tokens} tokens were measured: one point gives no slope")
        lines = {}
        for phase, peak in last.peaks_bytes.items():
            slope = max(0.0, slopes.get(phase, 0.0))
            lines[phase] = MemoryLine(peak - slope * last.tokens, slope)
        return Fit(lines, last.peak_phase, points=(last,))
    before = ordered[-2]
    if before.peak_phase != last.peak_phase:
        phases = f"the phase {before.peak_phase!r}, that of {last.tokens} in {last.peak_phase!r}"
        return NoFit(f"the peak of {before.tokens} tokens lies in {phases}: no one line goes through both")
    lines = {}
    for phase in (phase for phase in last.peaks_bytes if phase in before.peaks_bytes):
        low, high = before.peaks_bytes[phase], last.peaks_bytes[phase]
        # Of a phase that is not the peak, noise must not make a line that falls.
        slope = max(0.0, (high - low) / (last.tokens - before.tokens))
        lines[phase] = MemoryLine(high - slope * last.tokens, slope)
    top = last.peak_phase
    if last.peaks_bytes[top] < before.peaks_bytes[top]:
        return NoFit(f"{last.tokens} tokens took less than {before.tokens} did")
    if lines[top].fixed_bytes < 0:
        return NoFit("the peaks grow faster than the tokens do")
    for point in ordered[:-2]:
        off = lines[top].at(point.tokens) / point.peaks_bytes[top] - 1
        if point.peak_phase == top and abs(off) > TOLERANCE:
            return NoFit(f"the peak of {point.tokens} tokens is {off:+.0%} off the line through the other two")
    return Fit(lines, top, points=tuple(ordered))
