"""The user's screen while a run goes on: its lines, and a changing line of progress. It starts and reads nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from sftplay.log import screen

SIGN_OF_LIFE_S = 9.0
"""Longest silence on the screen; users take ten quiet seconds for a hang."""


class Screen:
    """Writes for the user until nobody reads it any more; the run goes on without."""

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
