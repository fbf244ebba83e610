"""Start a launch and wait for its end: its lines, its signals, its exit code; and notice when it stands still."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sftplay.atomic import write_text
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, RunError, SftplayError
from sftplay.heartbeat import PHASES, Beat, read_heartbeats
from sftplay.launch.command import Launch
from sftplay.launch.processes import (
    ENDING_S,
    Death,
    Stack,
    ask_for_stacks,
    cause_of_death,
    descends_from,
    end_launch,
    find_death,
    follows_from_death,
    read_rank,
    read_state,
    signal_name,
    stacks_path,
)
from sftplay.launch.run_folder import PARENT, PASSED_ON, RunFolder
from sftplay.log import Console, new_console, show_marked
from sftplay.signals import Echoes, Forwarder, popen_tied

CHECKS = 60  # number of checks within the time that a phase may last
GAP_S = 10.0
"""After a longer pause of the parent (Ctrl-Z, a suspended machine, a blocked terminal) all ages start anew: a rank may
have waited for the parent."""

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
        # Where all ranks of this node wait, the node with the culprit reports first.
        limit_s = self.timeout_s * (1 if culprits else 1.1)
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


LAST_LINES = 20
"""How many of the launcher's last lines are shown when it ends without a message. logs/launch.log has all of them."""

WORKER_CODES = (2, 3, 4, 5)  # exit codes that only a worker of ours has


class FolderGone(RunError):
    """The run's folder has been removed or moved while it runs: neither checkpoints nor a result could be kept."""


class NodeLost(RunError):
    """Another node of the run has ended. The processes of this node would wait for it."""


def follow(launch: Launch, folder: RunFolder, *, node: int = 0, check_nodes: Callable[[], None] | None = None) -> int:
    """Run the launch to its end. Returns the run's exit code (docs/interfaces.md), not the launcher's.

    A run that stands still for `train.stall_timeout` of its resolved config is ended. Only node 0 decides how the run
    ended. Other nodes return the launcher's exit code, or that of a stop signal. `check_nodes` is called every half
    second and may raise NodeLost or Death. Raises FolderGone if somebody has removed or moved the run's folder. Nothing
    is written where it was.
    """
    console = new_console()
    console.status("[train] the worker imports its libraries")
    forwarder = Forwarder(partial(_forward, folder=folder), at_second=_kill_group, is_echo=Echoes(of_make=True).is_echo)
    watchdog, check_folder = Watchdog(folder, read_timeout(folder)), watch_folder(folder)
    attempts = len(folder.read_json("status.json").get("attempts", []))
    for path, text in launch.files.items():
        write_text(Path(path), text)
    # Opened before anything runs that could remove its folder.
    with forwarder.installed(), (folder.logs / log_name(node)).open("ab", buffering=0) as log:
        env = {**launch.env, PARENT: str(os.getpid()), PASSED_ON: " ".join(launch.env)}
        process = popen_tied(launch.argv, output=subprocess.PIPE, env=env)
        forwarder.attach(process)
        watchdog.attach(process.pid)
        try:
            checks = [watchdog.check, check_folder, *([check_nodes] if check_nodes else [])]
            unmarked = _show_lines(process, console, log=log, checks=checks)
        except (Stall, NodeLost, Death) as error:
            # Killed before anything is recorded: a rank still alive might record another error.
            alive = _kill_launch(watchdog, process)
            recorded = folder.read_json("status.json").get("exit_code")
            if recorded is None:  # otherwise one rank had recorded why it ended, and another rank was stuck
                record_end(folder, error.what, state="failed", exit_code=error.exit_code, error=error.as_json())
            console.line("\n".join([str(error), *(error.stack if isinstance(error, Stall) else [])]))
            if alive:
                pids = ", ".join(map(str, alive))
                console.line(f"these processes wait inside the kernel and cannot be killed: {pids}")
            return error.exit_code if recorded is None else int(recorded)
        except FolderGone:
            _kill_launch(watchdog, process)
            raise
        code = process.wait()
    check_folder()
    received = forwarder.received[0] if forwarder.received else 0
    if node:
        if death := find_death(unmarked):
            _print_end(folder, death, unmarked=unmarked)
        return 128 + received if received else code
    return final_exit_code(folder, code, received=received, unmarked=unmarked, attempts_before=attempts)


def _forward(process: subprocess.Popen[bytes], number: int, *, folder: RunFolder) -> None:
    """Send the signal to the ranks of this node: torchrun itself dies of SIGUSR1. Before they are known: to it."""
    pids = [rank["pid"] for rank in folder.read_json("status.json").get("ranks") or []]
    # The list includes ranks of other nodes. On this node another process, even a rank's helper, may have that pid.
    local = [n for n, pid in enumerate(pids) if descends_from(pid, process.pid) and read_rank(pid) in (None, n)]
    for pid in [pids[n] for n in local] or [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks die with it


def watch_folder(folder: RunFolder) -> Callable[[], None]:
    """A function that raises FolderGone when the run's resolved config is no longer there. Only the parent writes it;
    everything else the workers may have made anew."""
    if not folder.resolved.exists():
        return lambda: None
    present = {path.name for path in folder.path.iterdir()}

    def look() -> None:
        with suppress(OSError):  # a shared file system that does not answer just now is no reason to end a run
            for _ in range(2):  # nor is one that forgets a file for a moment
                if folder.resolved.exists():
                    return
                time.sleep(0.3)
            left = {path.name for path in folder.path.iterdir()} if folder.path.exists() else set()
            gone = ", ".join(sorted(present - left)) if left else "the whole folder"
            raise FolderGone(
                f"removed or moved while the run was going on: {gone}",
                where=str(folder.path),
                fix="move it back, then `make resume`; what was removed is lost: start again with `make train`",
            )

    return look


def log_name(node: int) -> str:
    """The name of the file in a run's logs/ with the lines of a node's launcher."""
    return f"launch-node{node}.log" if node else "launch.log"


def _kill_launch(watchdog: Watchdog, process: subprocess.Popen[bytes]) -> list[int]:
    """Kill all processes of the launch; the pids of those that cannot be killed."""
    alive = watchdog.end()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S if process.pid not in alive else 0)
    return alive


def final_exit_code(
    folder: RunFolder, code: int, *, received: int, unmarked: Sequence[str], attempts_before: int = 0
) -> int:
    """The run's own exit code from status.json. A death that no worker could report is recorded there.

    `code` is the launcher's, `received` the stop signal that was forwarded (0 for none), `unmarked` the lines of
    launcher and libraries, `attempts_before` the number of attempts before this launch.
    """
    status = folder.read_json("status.json")
    has_attempt, recorded = len(status.get("attempts", [])) > attempts_before, status.get("exit_code")
    said = cause_of_death(folder)
    if not received and follows_from_death(status) and (death := find_death(unmarked, said=said)):
        return _record_death(folder, death, unmarked=(), again=has_attempt)
    # After a stop signal, a rank that loses another one is no death that calls for a restart.
    if recorded is not None and not (received and said):
        return int(recorded)
    if code == ConfigError.exit_code and status.get("pid", code) is None and unmarked:
        # The launcher's argparse has refused an option of the user: it ends with this code before a worker starts.
        error = ConfigError(unmarked[-1], where="the launcher", fix="change the options after `--`")
        record_end(folder, error.what, state="failed", exit_code=error.exit_code, error=error.as_json())
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if code in WORKER_CODES:  # the disk is too full even for status.json
        return code
    if received:
        name, code = signal.Signals(received).name, 128 + received
        record_end(folder, name, again=has_attempt, state="stopped", exit_code=code, signal=name, error=None)
        return code
    # torchrun's list of failed ranks may be unreadable. If the ranks had met, one was killed; if not, it was a bug.
    cause = f"killed by {signal_name(-code)}" if code < 0 else f"ended with code {code} and no message"
    if code < 0 or status.get("ranks"):
        return _record_death(folder, cause, unmarked=unmarked)
    record_end(folder, cause, state="failed", exit_code=SftplayError.exit_code)
    _print_end(folder, f"the run {cause}", unmarked=unmarked)
    return SftplayError.exit_code


def _record_death(folder: RunFolder, cause: str, *, unmarked: Sequence[str], again: bool = False) -> int:
    death = Death(cause, where=str(folder.path), fix=f"look at {folder.logs}, then `make resume`")
    end = {"state": "failed", "exit_code": death.exit_code, "signal": None, "error": death.as_json()}
    record_end(folder, cause, again=again, **end)
    hint = " (memory may have run out)" if signal.SIGKILL.name in cause else ""
    subject = {"killed": "the run was ", "ended": "the run "}.get(cause.split()[0], "")
    _print_end(folder, f"{subject}{cause}{hint}", unmarked=unmarked)
    return death.exit_code


def _print_end(folder: RunFolder, what: str, *, unmarked: Sequence[str]) -> None:
    for line in [*unmarked][-LAST_LINES:]:
        sys.stderr.write(line + "\n")
    sys.stderr.write(f"{folder.path}: {what}\n  fix: look at {folder.logs}, then `make resume`\n")


def record_end(folder: RunFolder, cause: str, *, again: bool = False, **changes: Any) -> None:
    """Write how the run has ended into status.json, and close its attempt with the cause."""
    try:
        folder.update_status(**changes)
        folder.close_attempt(cause, again=again)
    except OSError as error:
        sys.stderr.write(f"{folder.path}: status.json cannot be written ({error.strerror})\n")


def _show_lines(
    process: subprocess.Popen[bytes], console: Console, *, log: BinaryIO, checks: Sequence[Callable[[], None]]
) -> deque[str]:
    """Show the run's own lines and write all others to `log`, until there are no more; the last of these others."""
    # Enough to find a death in: torchrun writes six lines for each rank that failed.
    unmarked: deque[str] = deque(maxlen=1000)
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read_lines() -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for raw in stream:
                lines.put(raw)
        lines.put(None)

    threading.Thread(target=read_lines, daemon=True).start()
    while True:
        for check in checks:
            check()
        try:
            raw = lines.get(timeout=0.5)
        except queue.Empty:
            console.tick(time.monotonic())
            continue
        if raw is None:
            console.close()
            return unmarked
        text = raw.decode("utf-8", "replace").rstrip("\n")
        if not show_marked(text, console=console):
            unmarked.append(text)
            with suppress(OSError):  # on a full disk the run itself ends, with its own exit code
                log.write((text + "\n").encode())
        console.tick(time.monotonic())
