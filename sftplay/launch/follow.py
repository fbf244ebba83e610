"""Starts a launch and stays its parent: shows the run's lines, passes signals on, and gives back the run's own code."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sftplay.launch.command import Launch
from sftplay.launch.folder import RunFolder
from sftplay.log import LINE, STATUS

SIGN_OF_LIFE_S = 9.0
"""Longest silence on the screen; users take ten quiet seconds for a hang."""


class Console:
    """The user's screen: a changing progress line on a terminal, a thinned-out one elsewhere."""

    def __init__(self, write: Callable[[str], Any], *, is_tty: bool) -> None:
        self.write, self.is_tty = write, is_tty
        self._shown_at = time.monotonic()
        self._pending, self._on_line = "", False

    def line(self, text: str) -> None:
        self.write(("\r\x1b[K" if self._on_line else "") + text + "\n")
        self._shown_at, self._on_line, self._pending = time.monotonic(), False, ""

    def status(self, text: str) -> None:
        self._pending = text
        if self.is_tty:
            self.write("\r\x1b[K" + text)
            self._shown_at, self._on_line = time.monotonic(), True

    def tick(self, now: float) -> None:
        """Break a long silence with the newest progress, or with a sign of life."""
        quiet_s = now - self._shown_at
        if quiet_s < SIGN_OF_LIFE_S:
            return
        if self._pending:
            self.line(self._pending)
        elif self.is_tty:
            self.status(f"[train] working ({quiet_s:.0f} s)")
            self._pending = ""
        else:
            self.line("[train] working")


def follow(launch: Launch, folder: RunFolder) -> int:
    """Run the launch to its end; the exit code of INTERFACES, whatever the launcher made of it."""
    console = Console(_write_out, is_tty=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    env = {**os.environ, **launch.env}
    process = subprocess.Popen(
        launch.argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    forwarder = Forwarder(process, folder)
    forwarder.install()
    lines: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    unmarked = _show(lines, console, folder)
    code = process.wait()
    return settle(folder, code, forwarder, unmarked)


def settle(folder: RunFolder, code: int, forwarder: Forwarder, unmarked: list[str]) -> int:
    """The run's own exit code from status.json; a death the worker could not report is written there."""
    status = folder.read_json("status.json")
    if status.get("exit_code") is not None:
        return int(status["exit_code"])
    if forwarder.received:
        name = signal.Signals(forwarder.received).name
        folder.update_status(state="stopped", exit_code=128 + forwarder.received, signal=name)
        folder.close_attempt(name)
        return 128 + forwarder.received
    cause = f"killed by signal {-code}" if code < 0 else f"ended with code {code} without a word"
    folder.update_status(state="failed", exit_code=5 if code < 0 else 1)
    folder.close_attempt(cause)
    for line in unmarked[-20:]:
        sys.stderr.write(line + "\n")
    sys.stderr.write(f"{folder.path}: the run was {cause}\n  fix: look at {folder.logs}, then `make resume`\n")
    return 5 if code < 0 else 1


class Forwarder:
    """Passes the first stop signal on to the workers, and ends them all at the second."""

    def __init__(self, process: subprocess.Popen[bytes], folder: RunFolder) -> None:
        self.process, self.folder = process, folder
        self.received = 0

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.received:
            os.killpg(self.process.pid, signal.SIGKILL)
            return
        self.received = number
        for pid in self._workers():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _workers(self) -> list[int]:
        # torchrun itself dies of SIGUSR1, so signals go to the ranks; before they are known, to what was started.
        ranks = self.folder.read_json("status.json").get("ranks") or []
        return [rank["pid"] for rank in ranks] or [self.process.pid]


def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
    assert process.stdout is not None
    for raw in process.stdout:
        lines.put(raw)
    lines.put(None)


def _show(lines: queue.Queue[bytes | None], console: Console, folder: RunFolder) -> list[str]:
    unmarked: list[str] = []
    with (folder.logs / "launch.log").open("a", encoding="utf-8") as handle:
        while True:
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
                handle.write(text + "\n")
                handle.flush()
            console.tick(time.monotonic())


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
