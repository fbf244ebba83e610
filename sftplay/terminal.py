"""The terminal: its colours, closed streams, and a line that is written over."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

YELLOW, RED = "\x1b[33m", "\x1b[31m"
PLAIN = "\x1b[0m"


def is_terminal(stream: TextIO) -> bool:
    """True where a line can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """True on a terminal that nobody asked to leave plain (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def painted(text: str, colour: str, *, stream: TextIO) -> str:
    """The text in a colour where the stream shows colours."""
    return f"{colour}{text}{PLAIN}" if has_colours(stream) else text


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""What a write says where nothing can be written: a full disk, a device that is none."""


def open_closed() -> None:
    """Put the null device where a stream is closed: Python has None there, and the next file would get its number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def drop(fd: int) -> None:
    """Send what is still to be written to a stream into nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def is_unwritable(error: OSError) -> bool:
    """True for the error of a stream that takes nothing, which names no file."""
    return error.filename is None and error.errno in UNWRITABLE


SIGN_OF_LIFE_S = 9.0
"""Longest time without output in a file or a pipe. After ten seconds users think that the run hangs."""

CLEAR = "\r\x1b[K"

WARNING = re.compile(r"(\[[\w-]+\] )?(note|warning|out of memory|restart \d+)\b")
"""How a line begins that the user should not overlook."""

NARROWEST, WIDEST = 40, 140
"""Columns of the live line."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a piece of work is."""

    tag: str
    what: str
    """What is counted: `step`, `rows`."""

    done: int
    total: int | None = None
    """None where nobody knows it yet."""

    text: str = ""
    """More figures."""


class Screen:
    """Writes for the user until nobody reads the screen any more. The run goes on without it."""

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self.is_read = True
        self.failure: OSError | None = None
        """Why nothing can be written, where it is not that the reader has gone."""

        self._stream = stream

    def __call__(self, text: str) -> None:
        if not self.is_read:
            return
        stream = self._stream()
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:  # BrokenPipeError behind `head`, EIO when the terminal was closed
            self.is_read = False
            self.failure = None if isinstance(error, BrokenPipeError) else error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Console:
    """Lines, and progress: one live line on a terminal, elsewhere a new line from time to time."""

    def __init__(self, write: Callable[[str], Any], *, is_tty: bool, has_colours: bool = False) -> None:
        self.write, self.is_tty, self.has_colours = write, is_tty, has_colours
        self._written_at = self._since = time.monotonic()
        self._pending, self._on_line = "", False
        self._status = ""
        self._progress: Progress | None = None
        self._began: tuple[str, float, int] = ("", 0.0, 0)

    def line(self, text: str) -> None:
        """A line that stays; the live line goes on below it."""
        if self.has_colours and WARNING.match(text):
            text = f"{YELLOW}{text}{PLAIN}"
        self.write((CLEAR if self._on_line else "") + text + "\n")
        self._written_at = self._since = time.monotonic()
        self._pending, self._on_line, self._status = "", False, ""
        if self._progress and self.is_tty:
            self._draw()

    def status(self, text: str) -> None:
        """What is being done, until the next line."""
        self._pending, self._progress, self._status, self._since = text, None, text, time.monotonic()
        self._draw()

    def progress(self, progress: Progress) -> None:
        """How far the work is. A count that is not the one before begins anew."""
        now, (what, _, done) = time.monotonic(), self._began
        if what != f"{progress.tag} {progress.what}" or progress.done < done:
            self._began = (f"{progress.tag} {progress.what}", now, progress.done)
        self._progress, self._pending = progress, self._as_text(progress, now)
        self._draw()
        if progress.done == progress.total:
            self._progress = None

    def close(self) -> None:
        """Clear the live line."""
        self._progress, self._status = None, ""
        if self._on_line:
            self.write(CLEAR)
            self._on_line = False

    def tick(self, now: float) -> None:
        """Let the live line's clock go on; elsewhere end a long time without output by the newest progress."""
        if self.is_tty:
            if self._progress or now - self._since >= 1:
                self._draw()
        elif now - self._written_at >= SIGN_OF_LIFE_S:
            status, since = self._status, self._since
            self.line(self._pending or f"{status or '[train] working'} ({now - since:.0f} s)")
            self._status, self._since = status, since

    def _draw(self) -> None:
        if not self.is_tty:
            return
        now = time.monotonic()
        quiet_s = now - self._since
        text = self._as_bar(self._progress, now) if self._progress else self._status or "[train] working"
        if not self._progress and quiet_s >= 1:
            text += f" ({quiet_s:.0f} s)"
        self.write(CLEAR + text)
        self._on_line = True

    def _as_bar(self, progress: Progress, now: float) -> str:
        from tqdm import tqdm

        _, began, first = self._began
        figures = f"  {progress.text}" if progress.text else ""
        clock = "{elapsed}<{remaining}" if progress.total else "{elapsed}"
        count = "{n_fmt}/{total_fmt} {bar:24}" if progress.total else "{n_fmt}"
        return str(
            tqdm.format_meter(
                progress.done,
                progress.total,
                now - began,
                initial=first,
                ncols=min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns - 1)),
                prefix=f"[{progress.tag}] {progress.what}",
                bar_format=f"{{desc}} {count}{figures.replace('{', '(').replace('}', ')')}  {clock}",
            )
        ).rstrip()

    def _as_text(self, progress: Progress, now: float) -> str:
        _, began, first = self._began
        of = f"/{progress.total}" if progress.total else ""
        parts = [f"[{progress.tag}] {progress.what} {progress.done}{of}", *([progress.text] if progress.text else [])]
        fresh = progress.done - first
        if progress.total and fresh > 0:
            from tqdm import tqdm

            left = (now - began) / fresh * (progress.total - progress.done)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        return "  ".join(parts)
