"""The user's screen during a run: its lines and one changing line of progress. It starts and reads nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from sftplay.log import screen

SIGN_OF_LIFE_S = 9.0
"""Longest time without output on the screen. After ten quiet seconds users think that the program hangs."""


class Screen:
    """Writes for the user until nobody reads the screen any more. The run goes on without it."""

    def __init__(self) -> None:
        self.is_read = True

    def __call__(self, text: str) -> None:
        if not self.is_read:
            return
        stream = screen()
        try:
            stream.write(text)
            stream.flush()
        except OSError:  # BrokenPipeError behind `head`, EIO when the terminal was closed
            self.is_read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Console:
    """Lines, and progress: one changing line on a terminal, elsewhere a new line from time to time."""

    def __init__(self, write: Callable[[str], Any], *, is_tty: bool) -> None:
        self.write, self.is_tty = write, is_tty
        self._written_at = time.monotonic()
        self._pending, self._on_line = "", False

    def line(self, text: str) -> None:
        self.write(("\r\x1b[K" if self._on_line else "") + text + "\n")
        self._written_at, self._on_line, self._pending = time.monotonic(), False, ""

    def status(self, text: str) -> None:
        self._pending = text
        if self.is_tty:
            self.write("\r\x1b[K" + text)
            self._written_at, self._on_line = time.monotonic(), True

    def tick(self, now: float) -> None:
        """After a long time without output, write the newest progress or a sign of life."""
        quiet_s = now - self._written_at
        if quiet_s < SIGN_OF_LIFE_S:
            return
        if self._pending:
            self.line(self._pending)
        elif self.is_tty:
            self.status(f"[train] working ({quiet_s:.0f} s)")
            self._pending = ""
        else:
            self.line("[train] working")
