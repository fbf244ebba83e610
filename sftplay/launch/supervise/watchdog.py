"""Notices that a run stands still: which rank makes no progress, in which phase of a step, and where in its code.

It runs in the launch's parent, where no rank can block it. It judges only the ranks of this node. It ends a launch only
when it is told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sftplay.config.load import load_config
from sftplay.errors import RunError
from sftplay.heartbeat import PHASES, Beat, read_heartbeats
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.processes import (
    Stack,
    ask_for_stacks,
    descends_from,
    end_launch,
    read_rank,
    read_state,
    stacks_path,
)

CHECKS = 60  # number of checks within the time that a phase may last
GAP_S = 10.0
"""After a longer pause of the parent (Ctrl-Z, a suspended machine, a blocked terminal) all ages start anew: a rank may
have waited for the parent."""

EVERYBODY_WAITS = 1.1
"""Factor on the timeout when all ranks of this node wait. The node with the culprit then reports first."""

SHOWN_LINES = 5

NO_STACK_REASONS = {
    "T": "it is stopped by a signal",
    "t": "a debugger holds it",
    "D": "it waits inside the kernel, for a disk, a network file system or a device",
}
"""State of a process (proc(5)) -> why it writes no stack."""


class Stall(RunError):
    """The run stands still."""

    def __init__(self, what: str, *, where: str, fix: str, stack: Sequence[str] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.stack = list(stack)
        """The culprit's innermost calls, one a line, or why they are not known."""


def read_timeout(folder: RunFolder) -> float:
    """Seconds that a phase of this run may last; 0 means no limit. All ranks of a launch read the same value."""
    return load_config(folder.resolved).train.stall_timeout if folder.resolved.exists() else 0


class Watchdog:
    """Watches the heartbeats of one launch. Create it before the launch starts. With a timeout of 0 it does nothing."""

    def __init__(self, folder: RunFolder, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.timeout_s, self.clock = folder, timeout_s, clock
        self._launcher = 0
        self._is_of_launch: dict[tuple[int, int], bool] = {}
        """(rank, pid) -> whether it is a process of this launch. The nodes of a run share its folder."""
        self._start_s = self._awake_since_s = self._last_call_s = self._next_check_s = clock()

    def attach(self, launcher_pid: int) -> None:
        """Set the process that is the only rank or the ancestor of all ranks."""
        self._launcher = launcher_pid

    def check(self) -> None:
        """Raise Stall if a rank makes no progress. Call it about once a second; most calls return at once."""
        now = self.clock()
        if now - self._last_call_s > GAP_S:
            self._awake_since_s = now
        self._last_call_s = now
        if not (self.timeout_s and self._launcher) or now < self._next_check_s:
            return
        self._next_check_s = now + self.timeout_s / CHECKS
        with suppress(OSError):  # a run must not end because a shared file system does not answer for a moment
            beats = self._local_beats(now)
            if any(self._age_s(beat, now) > self.timeout_s for beat in beats if beat.phase != "idle"):
                self._next_check_s = now + self.timeout_s / 4  # ask for stacks rarely while no rank is to blame
                self._raise_stall(beats)

    def end(self) -> list[int]:
        """Kill all processes of the launch; the pids of those that cannot be killed."""
        return end_launch(self._launcher)

    def _local_beats(self, now: float) -> list[Beat]:
        beats = []
        for beat in read_heartbeats(self.folder.logs):
            # Older heartbeats are those of an earlier launch. The system may have given its pids to other processes.
            if not self._start_s <= beat.since_s <= now:
                continue
            key = (beat.rank, beat.pid)
            if key not in self._is_of_launch:  # in containers, ranks of two nodes may have the same pid
                is_below = descends_from(beat.pid, self._launcher)
                self._is_of_launch[key] = is_below and read_rank(beat.pid) in (None, beat.rank)
            beats += [beat] if self._is_of_launch[key] else []
        return beats

    def _age_s(self, beat: Beat, now: float) -> float:
        return now - max(beat.since_s, self._awake_since_s)

    def _raise_stall(self, beats: Sequence[Beat]) -> None:
        """Raise Stall if a rank is to blame, by the stacks of all ranks and their heartbeats afterwards."""
        stacks = ask_for_stacks(self.folder.logs, {beat.rank: beat.pid for beat in beats if read_state(beat.pid)})
        now = self.clock()
        fresh = [beat for beat in self._local_beats(now) if beat.phase != "idle"]
        if not all(read_state(beat.pid) for beat in fresh):
            return  # a rank has died: the launcher notices that and ends the others
        culprits = find_culprits(fresh, stacks)
        limit_s = self.timeout_s * (1 if culprits else EVERYBODY_WAITS)
        # A rank that entered its phase a short time ago is no culprit, and the others wait for it rightly. The same
        # holds for a rank that made progress while the stacks were written.
        suspects = culprits or fresh
        if not suspects or any(beat not in beats or self._age_s(beat, now) <= limit_s for beat in suspects):
            return
        first, waiting = suspects[0], [beat for beat in fresh if beat not in culprits]
        what = f"all ranks here wait for others: {describe_heartbeats(waiting, now)}"
        traces = f"{self.folder.logs / 'rank*.stacks'} and at the network between the processes"
        if culprits:
            what, traces = describe_heartbeats(culprits, now), str(stacks_path(self.folder.logs, first.rank))
        if culprits and waiting:
            phases = ", ".join(sorted({beat.phase for beat in waiting}, key=PHASES.index))
            verb, pronoun = "waits" if len(waiting) == 1 else "wait", "it" if len(culprits) == 1 else "them"
            what += f"; {_rank_names(waiting)} {verb} for {pronoun} ({phases})"
        stack = list(stacks.get(first.rank, Stack()).lines[:SHOWN_LINES])
        if not stack:
            reason = NO_STACK_REASONS.get(read_state(first.pid), "it did not answer")
            stack = [f"  process {first.pid} gives no stack: {reason}"]
        raise Stall(
            what,
            where=str(self.folder.path),
            fix=f"look at {traces}; if the run was only slow, raise train.stall_timeout ({self.timeout_s:g} s); "
            "`make resume` continues from the last complete checkpoint",
            stack=[f"rank {first.rank}, innermost call first:", *stack],
        )


def find_culprits(beats: Sequence[Beat], stacks: Mapping[int, Stack]) -> list[Beat]:
    """The ranks furthest behind among those that do not wait in a collective; empty when all ranks wait."""
    working = [
        beat for beat in beats if beat.phase != "communication" and not stacks.get(beat.rank, Stack()).is_in_collective
    ]

    def progress(beat: Beat) -> tuple[int, int, bool]:
        return beat.step, PHASES.index(beat.phase), stacks.get(beat.rank, Stack()).may_be_in_collective

    least = min(map(progress, working), default=None)
    return [beat for beat in working if progress(beat) == least]


def describe_heartbeats(beats: Sequence[Beat], now: float) -> str:
    """For each phase and step: which ranks are in it, and for how long."""
    parts = []
    for step, phase in sorted({(beat.step, beat.phase) for beat in beats}):
        group = [beat for beat in beats if (beat.step, beat.phase) == (step, phase)]
        age_s = now - max(beat.since_s for beat in group)
        verb = "has" if len(group) == 1 else "have"
        parts.append(f"{_rank_names(group)} {verb} been in {phase} for {age_s:.0f} s at step {step}")
    return ", ".join(parts)


def _rank_names(beats: Sequence[Beat]) -> str:
    numbers = [str(beat.rank) for beat in beats]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
