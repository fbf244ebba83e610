"""A rank's heartbeat: what it is doing, at which step, since when.

The rank writes it and its parent reads it. On the way it adds up the time that each phase took.

It lies in a small file that is mapped into memory, so that a beat costs a microsecond and is there whatever happens to
the process. It judges nothing.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PHASES = ("idle", "data", "forward", "backward", "communication", "optimizer", "evaluation", "save")
"""In the order of a step. In `idle`, before the first step and behind the last, nobody is waited for."""

_LAYOUT = struct.Struct("=qqqd")
"""Process id, step, place in PHASES, and the second of the monotonic clock at which the phase began."""


@dataclass(frozen=True)
class Beat:
    """What a rank was doing when it last said so."""

    rank: int
    pid: int
    step: int
    """The optimizer step it works on, from 1."""

    phase: str
    since_s: float
    """On the clock of `time.monotonic`, which all processes of a machine share."""


class Heartbeat:
    """Written by one rank. Without a file it only adds up times."""

    def __init__(self, path: Path | None = None, *, pid: int = 0) -> None:
        self.step = 0
        self.phase = "idle"
        self.listener: Callable[[str, int], None] | None = None
        """Told each phase, with its step, when it begins."""
        self._pid, self._since_s = pid, time.monotonic()
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        self._map: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(bytes(_LAYOUT.size))
            with path.open("r+b") as handle:
                self._map = mmap.mmap(handle.fileno(), _LAYOUT.size)
            self._beat()

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """From here on this is what the rank does."""
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
        """A phase inside another one, to which the rank returns."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def recount(self, seconds: float, phase: str, *, truly: str) -> None:
        """So much of the time that `phase` took so far was `truly`'s."""
        moved = min(seconds, self._spent_s[phase])
        self._spent_s[phase] -= moved
        self._spent_s[truly] += moved

    def take_seconds(self) -> dict[str, float]:
        """Phase -> seconds since the last call, the present phase's up to now."""
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
    """The heartbeats of all ranks that have one, in rank order."""
    beats = []
    for path in logs.glob("rank*.heartbeat"):
        content = path.read_bytes()
        if len(content) == _LAYOUT.size:
            pid, step, place, since_s = _LAYOUT.unpack(content)
            beats.append(Beat(int(path.stem.removeprefix("rank")), pid, step, PHASES[place], since_s))
    return sorted(beats, key=lambda beat: beat.rank)
