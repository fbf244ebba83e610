"""Notices that a run stands still: which rank does not go on, in which phase of a step, and where in its code.

It looks from outside, from the launch's parent, so that nothing a rank does can keep it from seeing. It judges the
ranks of this node only; it ends nothing unless asked to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sftplay.config.load import load_config
from sftplay.errors import RunError
from sftplay.heartbeat import PHASES, Beat, read_heartbeats
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.processes import descends_from, end_launch, rank_of, state_of
from sftplay.launch.supervise.stacks import Stack, ask_for_stacks, stacks_path

LOOKS = 60
"""How often it looks within the time that a phase may last."""

GAP_S = 10.0
"""A parent that was away for longer (stopped by Ctrl-Z, suspended with its machine, held up by its terminal) judges no
rank by what happened meanwhile: a rank may have waited for the parent."""

EVERYBODY_WAITS = 1.1
"""With no culprit on this node its times are this much longer: the node that has one shall be the one to name it."""

SHOWN_LINES = 5

SILENCE = {
    "T": "it is stopped by a signal",
    "t": "a debugger holds it",
    "D": "it waits inside the kernel, for a disk, a network file system or a device",
}
"""Why a process gives no stack, by the letter of its state (proc(5))."""


class Stall(RunError):
    """The run stands still."""

    def __init__(self, what: str, *, where: str, fix: str, stack: Sequence[str] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.stack = list(stack)
        """The culprit's innermost calls, or why they are not known; a line each."""


def timeout_of(folder: RunFolder) -> float:
    """Seconds that a phase of this run may last, 0 without a limit: for each launch what all its ranks read."""
    return load_config(folder.resolved).train.stall_timeout if folder.resolved.exists() else 0


class Watchdog:
    """Watches the heartbeats of one launch; make it before the launch starts. A timeout of 0 sees nothing."""

    def __init__(self, folder: RunFolder, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.timeout_s, self.clock = folder, timeout_s, clock
        self._launcher = 0
        self._ours: dict[tuple[int, int], bool] = {}
        """(rank, pid) -> whether it is a process of this launch. Runs of several nodes share a folder."""
        self._began_s = self._awake_since_s = self._called_s = self._next_s = clock()

    def attach(self, launcher_pid: int) -> None:
        """From here on the ranks are this process, or descend from it."""
        self._launcher = launcher_pid

    def look(self) -> None:
        """Look whether the ranks go on; call it every second or so, it looks as often as it needs to.

        Raises:
            Stall: a rank has been in one phase for longer than the timeout.
        """
        now = self.clock()
        if now - self._called_s > GAP_S:
            self._awake_since_s = now
        self._called_s = now
        if not (self.timeout_s and self._launcher) or now < self._next_s:
            return
        self._next_s = now + self.timeout_s / LOOKS
        with suppress(OSError):  # a shared file system that does not answer just now is no reason to end a run
            beats = self._local_beats(now)
            if any(self._age_s(beat, now) > self.timeout_s for beat in beats if beat.phase != "idle"):
                self._next_s = now + self.timeout_s / 4  # if it is none, do not ask for stacks all the time
                self._judge(beats)

    def end(self) -> list[int]:
        """Kill all processes of the launch; the pids of those that cannot be killed."""
        return end_launch(self._launcher)

    def _local_beats(self, now: float) -> list[Beat]:
        # Pulses from before the launch were left by an earlier one, whose pids may have been given out again.
        beats = [beat for beat in read_heartbeats(self.folder.logs) if self._began_s <= beat.since_s <= now]
        return [beat for beat in beats if self._is_ours(beat)]

    def _is_ours(self, beat: Beat) -> bool:
        known = (beat.rank, beat.pid)
        if known not in self._ours:
            # In containers the ranks of two nodes may well have the same pids.
            self._ours[known] = descends_from(beat.pid, self._launcher) and rank_of(beat.pid) in (None, beat.rank)
        return self._ours[known]

    def _age_s(self, beat: Beat, now: float) -> float:
        return now - max(beat.since_s, self._awake_since_s)

    def _judge(self, beats: Sequence[Beat]) -> None:
        stacks = ask_for_stacks(self.folder.logs, {beat.rank: beat.pid for beat in beats if state_of(beat.pid)})
        now = self.clock()
        fresh = [beat for beat in self._local_beats(now) if beat.phase != "idle"]
        if not all(state_of(beat.pid) for beat in fresh):
            return  # a rank has died: the launcher notices, and ends the others
        culprits = find_culprits(fresh, stacks)
        limit_s = self.timeout_s * (1 if culprits else EVERYBODY_WAITS)
        # Whoever still goes on is waited for by right; and who went on while the stacks were written is no culprit.
        to_blame = culprits or fresh
        if to_blame and all(beat in beats and self._age_s(beat, now) > limit_s for beat in to_blame):
            raise self._describe(culprits, [beat for beat in fresh if beat not in culprits], stacks=stacks, now=now)

    def _describe(
        self, culprits: Sequence[Beat], waiting: Sequence[Beat], *, stacks: Mapping[int, Stack], now: float
    ) -> Stall:
        first = (culprits or waiting)[0]
        if culprits:
            what = f"{describe_heartbeats(culprits, now)}{_describe_waiting(waiting, culprits)}"
            look = str(stacks_path(self.folder.logs, first.rank))
        else:
            what = f"all ranks here wait for others: {describe_heartbeats(waiting, now)}"
            look = f"{self.folder.logs / 'rank*.stacks'} and at the network between the processes"
        stack = stacks.get(first.rank, Stack()).lines[:SHOWN_LINES] or [_describe_silence(first)]
        return Stall(
            what,
            where=str(self.folder.path),
            fix=f"look at {look}; if it was only slow, raise train.stall_timeout ({self.timeout_s:g} s); `make resume` "
            "goes on from the last complete checkpoint",
            stack=[f"rank {first.rank}, innermost call first:", *stack],
        )


def find_culprits(beats: Sequence[Beat], stacks: Mapping[int, Stack]) -> list[Beat]:
    """Who is furthest behind among the ranks that do not wait in a rendezvous of ranks; empty when all of them do."""
    at_work = [
        beat for beat in beats if beat.phase != "communication" and not stacks.get(beat.rank, Stack()).is_in_collective
    ]

    def place(beat: Beat) -> tuple[int, int, bool]:
        return beat.step, PHASES.index(beat.phase), stacks.get(beat.rank, Stack()).may_be_in_collective

    last = min(map(place, at_work), default=None)
    return [beat for beat in at_work if place(beat) == last]


def describe_heartbeats(beats: Sequence[Beat], now: float) -> str:
    """Which ranks have been in which phase, for how long, at which step."""
    parts = []
    for step, phase in sorted({(beat.step, beat.phase) for beat in beats}):
        here = [beat for beat in beats if (beat.step, beat.phase) == (step, phase)]
        age_s = now - max(beat.since_s for beat in here)
        verb = "has" if len(here) == 1 else "have"
        parts.append(f"{_name(here)} {verb} been in {phase} for {age_s:.0f} s at step {step}")
    return ", ".join(parts)


def _describe_waiting(beats: Sequence[Beat], culprits: Sequence[Beat]) -> str:
    if not beats:
        return ""
    phases = sorted({beat.phase for beat in beats}, key=PHASES.index)
    verb, whom = "waits" if len(beats) == 1 else "wait", "it" if len(culprits) == 1 else "them"
    return f"; {_name(beats)} {verb} for {whom} ({', '.join(phases)})"


def _describe_silence(beat: Beat) -> str:
    reason = SILENCE.get(state_of(beat.pid), "it did not answer")
    return f"  process {beat.pid} gives no stack: {reason}"


def _name(beats: Sequence[Beat]) -> str:
    numbers = [str(beat.rank) for beat in beats]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
