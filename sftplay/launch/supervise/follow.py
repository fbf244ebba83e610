"""Starts a launch and stays its parent: shows the run's lines, passes signals on, and gives back the run's own code."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import write_text
from sftplay.errors import ConfigError, RunError, SftplayError
from sftplay.launch.command.command import PARENT, Launch
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.console import Console, Screen
from sftplay.launch.supervise.exit_cause import Death, cause_of_death, find_death, follows_from_death, signal_name
from sftplay.launch.supervise.processes import ENDING_S, descends_from, rank_of
from sftplay.launch.supervise.watchdog import Stall, Watchdog, timeout_of
from sftplay.log import LINE, STATUS, screen
from sftplay.signals import catch_signals, popen_tied

LAST_LINES = 20
"""Lines of a launcher that are shown when it ends without a word; all of them are in logs/launch.log."""

KEPT_LINES = 1000
"""Lines of a launcher that are looked through for a death: torchrun spends six on each rank that failed."""

WORKERS_OWN = (2, 3, 4, 5)
"""Exit codes by which only a worker of ours ends."""

ECHO_S = 2.0
"""How long a SIGTERM may take that make passes on to its recipe (commands.c, fatal_error_signal)."""


class NodeLost(RunError):
    """Another node of the run has ended, and the processes here would wait for it."""


def follow(launch: Launch, folder: RunFolder, *, node: int = 0, check_nodes: Callable[[], None] | None = None) -> int:
    """Run the launch to its end; the exit code of docs/interfaces.md, whatever the launcher made of it.

    A run that stands still is ended, as `train.stall_timeout` in the folder's resolved config says. How it ended is
    settled on node 0 only; elsewhere the launcher's code comes back, or the one of a stop signal. `check_nodes` is
    called every half second and may raise NodeLost.
    """
    console = Console(Screen(), is_tty=screen().isatty() and "NO_COLOR" not in os.environ)
    forwarder, watchdog = Forwarder(folder), Watchdog(folder, timeout_of(folder))
    attempts = len(folder.read_json("status.json").get("attempts", []))
    own = {PARENT: str(os.getpid())}
    for path, text in launch.files.items():
        write_text(Path(path), text)
    with forwarder.installed():
        process = popen_tied(launch.argv, output=subprocess.PIPE, env={**launch.env, **own})
        forwarder.attach(process)
        watchdog.attach(process.pid)
        lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        try:
            looks = [watchdog.look, *([check_nodes] if check_nodes else [])]
            unmarked = _show(lines, console, log=folder.logs / log_name(node), looks=looks)
        except (Stall, NodeLost) as why:
            return _end_launch(why, watchdog, process=process, console=console)
        code = process.wait()
    if node:
        if death := find_death(unmarked):
            _say_end(folder, death, unmarked=unmarked)
        return 128 + forwarder.received if forwarder.received else code
    return final_exit_code(folder, code, received=forwarder.received, unmarked=unmarked, attempts_before=attempts)


def log_name(node: int) -> str:
    """The file in a run's logs/ for what a node's launcher says."""
    return f"launch-node{node}.log" if node else "launch.log"


def _end_launch(
    why: Stall | NodeLost, watchdog: Watchdog, *, process: subprocess.Popen[bytes], console: Console
) -> int:
    """End all that the launch has started, then say and note why: a rank still alive might note something else."""
    left = watchdog.end()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S if process.pid not in left else 0)
    told = watchdog.folder.read_json("status.json").get("exit_code")
    if told is None:  # else a rank had ended and said why, and another one came no further
        _note(watchdog.folder, why.what, state="failed", exit_code=why.exit_code, error=why.as_json())
    console.line("\n".join([str(why), *(why.stack if isinstance(why, Stall) else [])]))
    if left:
        console.line(f"processes that cannot be killed, as they wait inside the kernel: {', '.join(map(str, left))}")
    return why.exit_code if told is None else int(told)


def final_exit_code(
    folder: RunFolder, code: int, *, received: int, unmarked: Sequence[str], attempts_before: int = 0
) -> int:
    """The run's own exit code from status.json; a death the worker could not report is written there.

    `code` is the launcher's, `received` the stop signal that was passed on (0 for none), `attempts_before` the number
    of attempts that the run had had when the launch began.
    """
    status = folder.read_json("status.json")
    is_own, told = len(status.get("attempts", [])) > attempts_before, status.get("exit_code")
    if not received and follows_from_death(status) and (death := find_death(unmarked)):
        return _note_death(folder, death, unmarked=(), again=is_own)
    # A rank that loses another one behind a stop signal tells of no death that anybody should outlive.
    if told is not None and not (received and cause_of_death(folder)):
        return int(told)
    if code == ConfigError.exit_code and status.get("pid", code) is None and unmarked:
        return _note_refusal(folder, unmarked)
    if code in WORKERS_OWN:  # a disk too full even for status.json
        return code
    if received:
        name = signal.Signals(received).name
        _note(folder, name, again=is_own, state="stopped", exit_code=128 + received, signal=name, error=None)
        return 128 + received
    # Where torchrun's account is not understood, that the ranks had met tells a rank that was killed from a bug.
    cause = f"killed by {signal_name(-code)}" if code < 0 else f"ended with code {code} without a word"
    if code < 0 or status.get("ranks"):
        return _note_death(folder, cause, unmarked=unmarked)
    _note(folder, cause, state="failed", exit_code=SftplayError.exit_code)
    _say_end(folder, f"the run was {cause}", unmarked=unmarked)
    return SftplayError.exit_code


def _note_death(folder: RunFolder, cause: str, *, unmarked: Sequence[str], again: bool = False) -> int:
    death = Death(cause, where=str(folder.path), fix=f"look at {folder.logs}, then `make resume`")
    ending = {"state": "failed", "exit_code": death.exit_code, "signal": None, "error": death.as_json()}
    _note(folder, cause, again=again, **ending)
    hint = " (memory may have run out)" if signal.SIGKILL.name in cause else ""
    _say_end(
        folder,
        f"{cause}{hint}" if cause.startswith(("rank", "a rank")) else f"the run was {cause}{hint}",
        unmarked=unmarked,
    )
    return death.exit_code


def _note_refusal(folder: RunFolder, unmarked: Sequence[str]) -> int:
    """No worker has begun, and argparse ends with this code: the launcher was told what it does not know."""
    error = ConfigError(unmarked[-1], where="the launcher", fix="change what stands behind `--`")
    _note(folder, error.what, state="failed", exit_code=error.exit_code, error=error.as_json())
    sys.stderr.write(f"{error}\n")
    return error.exit_code


def _say_end(folder: RunFolder, what: str, *, unmarked: Sequence[str]) -> None:
    for line in [*unmarked][-LAST_LINES:]:
        sys.stderr.write(line + "\n")
    sys.stderr.write(f"{folder.path}: {what}\n  fix: look at {folder.logs}, then `make resume`\n")


def _note(folder: RunFolder, cause: str, *, again: bool = False, **ending: Any) -> None:
    try:
        folder.update_status(**ending)
        folder.close_attempt(cause, again=again)
    except OSError as error:
        sys.stderr.write(f"{folder.path}: status.json cannot be written ({error.strerror})\n")


class Forwarder:
    """Passes the first stop signal on to the workers, and ends them all at the second."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.received = folder, 0
        self.process: subprocess.Popen[bytes] | None = None
        self._echo_until = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take over the stop signals, and give them back at the end."""
        before = catch_signals(self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """From here on this process gets the signals, one that came before it was there too."""
        self.process = process
        if self.received:
            self._pass_on(self.received)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._is_echo(number):
            return
        again, self.received = self.received, self.received or number
        if self.process is None:
            return
        if again:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # torchrun's ranks die with it
        else:
            self._pass_on(number)

    def _is_echo(self, number: int) -> bool:
        """True for the one SIGTERM more that make sends its recipe after both had got the first, as a group does."""
        now, until = time.monotonic(), self._echo_until
        if number == signal.SIGTERM and "MAKELEVEL" in os.environ:
            self._echo_until = 0.0 if self.received else now + ECHO_S
        return number == signal.SIGTERM and now < until

    def _pass_on(self, number: int) -> None:
        for pid in self._workers():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _workers(self) -> list[int]:
        # torchrun itself dies of SIGUSR1, so signals go to the ranks; before they are known, to what was started.
        assert self.process is not None
        own = self.process.pid
        ranks = [rank["pid"] for rank in self.folder.read_json("status.json").get("ranks") or []]
        # Ranks of other nodes are listed too; on this node their pids are somebody else's, perhaps a rank's helper's.
        ours = [pid for rank, pid in enumerate(ranks) if descends_from(pid, own) and rank_of(pid) in (None, rank)]
        return ours or [own]


def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for raw in stream:
            lines.put(raw)
    lines.put(None)


def _show(
    lines: queue.Queue[bytes | None], console: Console, *, log: Path, looks: Sequence[Callable[[], None]]
) -> deque[str]:
    unmarked: deque[str] = deque(maxlen=KEPT_LINES)
    with log.open("ab", buffering=0) as handle:
        while True:
            for look in looks:
                look()
            try:
                raw = lines.get(timeout=0.5)
            except queue.Empty:
                console.tick(time.monotonic())
                continue
            if raw is None:
                return unmarked
            text = raw.decode("utf-8", "replace").rstrip("\n")
            if text.startswith(LINE):
                console.line(text[1:])
            elif text.startswith(STATUS):
                console.status(text[1:])
            else:
                unmarked.append(text)
                with suppress(OSError):  # a full disk is the run's affair, which ends with its own code
                    handle.write((text + "\n").encode())
            console.tick(time.monotonic())
