"""A rank's heartbeat: the phase it is in, the optimizer step, and the time when the phase began.

The rank writes it and its parent reads it. The heartbeat also adds up the time that each phase took.

It is a small file that is mapped into memory: a beat costs a microsecond, and the last beat stays readable whatever
happens to the process. This module does not judge whether a rank hangs.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "idle", "data", "generation", "reward", "forward", "backward", "communication", "optimizer", "evaluation", "save",
)  # fmt: skip
"""In the order of a step. A rank is `idle` before its first step and after its last; nobody waits for it then."""

_LAYOUT = struct.Struct("=qqqd")
"""Process id, step, index in PHASES, and the monotonic clock's second at which the phase began."""


@dataclass(frozen=True)
class Beat:
    """The last beat of one rank."""

    rank: int
    pid: int
    step: int
    """The optimizer step it works on, from 1."""

    phase: str
    since_s: float
    """When the phase began, on the clock of `time.monotonic`. All processes of a machine share this clock."""


class Heartbeat:
    """Written by one rank. Without a file it only adds up times."""

    def __init__(self, path: Path | None = None, *, pid: int = 0) -> None:
        self.step = 0
        self.phase = "idle"
        self.listener: Callable[[str, int], None] | None = None
        """Called with each phase and its step when the phase begins."""
        self._pid, self._since_s = pid, time.monotonic()
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        self._map: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(bytes(_LAYOUT.size))
            with path.open("r+b") as handle:
                self._map = mmap.mmap(handle.fileno(), _LAYOUT.size)
            self._beat()

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Begin a phase, which ends the phase before it."""
        now = time.monotonic()
        self._spent_s[self.phase] += now - self._since_s
        self.phase, self._since_s = phase, now
        if step is not None:
            self.step = step
        self._beat()
        if self.listener is not None:
            self.listener(phase, self.step)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase inside another phase. The outer one goes on at the end of the block."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def recount(self, seconds: float, phase: str, *, truly: str) -> None:
        """Move `seconds` of the time that was counted for `phase` to the phase `truly`."""
        moved = min(seconds, self._spent_s[phase])
        self._spent_s[phase] -= moved
        self._spent_s[truly] += moved

    def take_seconds(self) -> dict[str, float]:
        """Phase -> seconds since the last call. The present phase counts up to now."""
        self.enter(self.phase)
        taken, self._spent_s = self._spent_s, dict.fromkeys(PHASES, 0.0)
        return taken

    def _beat(self) -> None:
        if self._map is not None:
            _LAYOUT.pack_into(self._map, 0, self._pid, self.step, PHASES.index(self.phase), self._since_s)


def heartbeat_path(logs: Path, rank: int) -> Path:
    """Where rank `rank` of a run writes its heartbeat; `logs` is the run's folder of logs."""
    return logs / f"rank{rank}.heartbeat"


def read_heartbeats(logs: Path) -> list[Beat]:
    """The last beats of all ranks that have a heartbeat, in rank order."""
    beats = []
    for path in logs.glob("rank*.heartbeat"):
        content = path.read_bytes()
        if len(content) == _LAYOUT.size:
            pid, step, index, since_s = _LAYOUT.unpack(content)
            rank = path.stem.removeprefix("rank")
            if rank.isdecimal() and 0 <= index < len(PHASES):
                beats.append(Beat(int(rank), pid, step, PHASES[index], since_s))
    return sorted(beats, key=lambda beat: beat.rank)
