"""Limit the time of a chat template on one row: a template is foreign code, and its loops need not end.

The time is that of the thread's own processor time, so that a busy machine refuses no row that an idle one takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sftplay.errors import DataError

ROW_S = 20.0
"""Processor seconds that rendering one row, or proving a template, may take. A usual row takes a millisecond."""

TICKS = 64  # the clock is read once in this many passes of a loop: reading it takes as long as a short pass


class _Clock(threading.local):
    deadline = 0.0  # in the thread's processor time; 0 while nothing is limited
    n_ticks = 0


_clock = _Clock()


@contextmanager
def limited(seconds: float | None = None) -> Iterator[None]:
    """Make `tick` raise inside the block once this much time is used, ROW_S by default. An outer limit stays in force.

    Raises DataError: the time is used.
    """
    if _clock.deadline:
        check()
        yield
        return
    _clock.deadline = time.thread_time() + (ROW_S if seconds is None else seconds)
    try:
        yield
    finally:
        _clock.deadline = 0.0


def tick() -> str:
    """Called in each pass of a template's loops and in each call of its macros; empty, so it prints nothing."""
    _clock.n_ticks += 1
    if not _clock.n_ticks % TICKS:
        check()
    return ""


def is_used() -> bool:
    """Return True if the time of the limit around this is used."""
    return _clock.deadline > 0 and time.thread_time() > _clock.deadline


def check() -> None:
    """Raise the DataError that ends the work on a row after its time is used."""
    if is_used():
        what = f"takes the chat template longer than {ROW_S:g} s"
        raise DataError(what, fix="cut the row into shorter ones, or leave it out with data.on_bad_row: skip")
