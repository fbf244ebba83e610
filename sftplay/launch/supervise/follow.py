"""Starts a launch and waits for its end: shows the run's lines, forwards signals, returns the run's own exit code."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sftplay.atomic import write_text
from sftplay.errors import ConfigError, RunError, SftplayError
from sftplay.launch.command.command import Launch
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.exit_cause import Death, cause_of_death, find_death, follows_from_death, signal_name
from sftplay.launch.supervise.processes import ENDING_S, descends_from, read_rank
from sftplay.launch.supervise.watchdog import Stall, Watchdog, read_timeout
from sftplay.launch.variables import PARENT, PASSED_ON
from sftplay.log import Console, new_console, show_marked
from sftplay.signals import Echoes, Forwarder, popen_tied

LAST_LINES = 20
"""How many of the launcher's last lines are shown when it ends without a message. logs/launch.log has all of them."""

KEPT_LINES = 1000
"""How many of the launcher's lines are searched for a death. torchrun writes six for each rank that failed."""

WORKER_CODES = (2, 3, 4, 5)  # exit codes that only a worker of ours has
ECHO_S = 20.0
"""make forwards a SIGTERM to its recipe (commands.c, fatal_error_signal). The second one arrives within this time, on a
busy machine too: taken for a signal of the user it would kill the workers while they write their last checkpoint. Only
one signal counts as an echo."""


class FolderGone(RunError):
    """The run's folder has been removed or moved while it runs: neither checkpoints nor a result could be kept."""


class NodeLost(RunError):
    """Another node of the run has ended. The processes of this node would wait for it."""


def follow(launch: Launch, folder: RunFolder, *, node: int = 0, check_nodes: Callable[[], None] | None = None) -> int:
    """Run the launch to its end. Returns the run's exit code (docs/interfaces.md), not the launcher's.

    A run that stands still for `train.stall_timeout` of its resolved config is ended. Only node 0 decides how the run
    ended. Other nodes return the launcher's exit code, or that of a stop signal. `check_nodes` is called every half
    second and may raise NodeLost. Raises FolderGone if somebody has removed or moved the run's folder. Nothing is
    written where it was.
    """
    console = new_console()
    console.status("[train] the worker imports its libraries")
    forwarder = Forwarder(partial(_forward, folder=folder), at_second=_kill_group, is_echo=find_echoes())
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
        except (Stall, NodeLost) as error:
            return _end_launch(error, watchdog, process=process, console=console)
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


def find_echoes() -> Callable[[int], bool]:
    """A function that is called once for each stop signal, and says whether it is an echo of the first.

    Echoes come from SLURM, and from make: it forwards a SIGTERM after the whole process group, this process included,
    has got it.
    """
    echoes, until, is_first = Echoes(), 0.0, True

    def is_echo(number: int) -> bool:
        nonlocal until, is_first
        if echoes.is_echo():
            return True
        now, is_of_make = time.monotonic(), number == signal.SIGTERM and time.monotonic() < until
        if number == signal.SIGTERM and "MAKELEVEL" in os.environ:
            until = now + ECHO_S if is_first else 0.0
        is_first = False
        return is_of_make

    return is_echo


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


def _end_launch(
    error: Stall | NodeLost, watchdog: Watchdog, *, process: subprocess.Popen[bytes], console: Console
) -> int:
    """Kill all processes of the launch, then record and show the error. A rank still alive might record another one."""
    alive = _kill_launch(watchdog, process)
    recorded = watchdog.folder.read_json("status.json").get("exit_code")
    if recorded is None:  # otherwise one rank had recorded why it ended, and another rank was stuck
        _record_end(watchdog.folder, error.what, state="failed", exit_code=error.exit_code, error=error.as_json())
    console.line("\n".join([str(error), *(error.stack if isinstance(error, Stall) else [])]))
    if alive:
        console.line(f"these processes wait inside the kernel and cannot be killed: {', '.join(map(str, alive))}")
    return error.exit_code if recorded is None else int(recorded)


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
        _record_end(folder, error.what, state="failed", exit_code=error.exit_code, error=error.as_json())
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if code in WORKER_CODES:  # the disk is too full even for status.json
        return code
    if received:
        name, code = signal.Signals(received).name, 128 + received
        _record_end(folder, name, again=has_attempt, state="stopped", exit_code=code, signal=name, error=None)
        return code
    # torchrun's list of failed ranks may be unreadable. If the ranks had met, one was killed; if not, it was a bug.
    cause = f"killed by {signal_name(-code)}" if code < 0 else f"ended with code {code} and no message"
    if code < 0 or status.get("ranks"):
        return _record_death(folder, cause, unmarked=unmarked)
    _record_end(folder, cause, state="failed", exit_code=SftplayError.exit_code)
    _print_end(folder, f"the run {cause}", unmarked=unmarked)
    return SftplayError.exit_code


def _record_death(folder: RunFolder, cause: str, *, unmarked: Sequence[str], again: bool = False) -> int:
    death = Death(cause, where=str(folder.path), fix=f"look at {folder.logs}, then `make resume`")
    end = {"state": "failed", "exit_code": death.exit_code, "signal": None, "error": death.as_json()}
    _record_end(folder, cause, again=again, **end)
    hint = " (memory may have run out)" if signal.SIGKILL.name in cause else ""
    subject = {"killed": "the run was ", "ended": "the run "}.get(cause.split()[0], "")
    _print_end(folder, f"{subject}{cause}{hint}", unmarked=unmarked)
    return death.exit_code


def _print_end(folder: RunFolder, what: str, *, unmarked: Sequence[str]) -> None:
    for line in [*unmarked][-LAST_LINES:]:
        sys.stderr.write(line + "\n")
    sys.stderr.write(f"{folder.path}: {what}\n  fix: look at {folder.logs}, then `make resume`\n")


def _record_end(folder: RunFolder, cause: str, *, again: bool = False, **changes: Any) -> None:
    try:
        folder.update_status(**changes)
        folder.close_attempt(cause, again=again)
    except OSError as error:
        sys.stderr.write(f"{folder.path}: status.json cannot be written ({error.strerror})\n")


def _show_lines(
    process: subprocess.Popen[bytes], console: Console, *, log: BinaryIO, checks: Sequence[Callable[[], None]]
) -> deque[str]:
    """Show the run's own lines and write all others to `log`, until there are no more; the last of these others."""
    unmarked: deque[str] = deque(maxlen=KEPT_LINES)
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
