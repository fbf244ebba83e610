"""Looking at processes from outside: waiting for something to happen, and whether a pid still lives."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HANG_S = 600.0
"""A process of a test that has not ended by then hangs. Far above what a busy machine needs."""


def wait_until(condition: Callable[[], Any], limit_s: float = HANG_S) -> None:
    """Return once `condition` holds; fail the test when it does not within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """True for a process that has not ended; a zombie has, once its last thread has closed what they had open."""
    process = Path(f"/proc/{pid}")
    try:
        is_zombie = (process / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        return not is_zombie or len(list((process / "task").iterdir())) > 1
    except OSError:
        return False


@contextmanager
def ends_soon(cpu_s: float) -> Iterator[None]:
    """Fail the test where what is done inside takes `cpu_s` seconds of the processor, or waits until it hangs.

    A busy machine takes no more of the processor, but may let everything wait for long.
    """

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before, began = signal.signal(signal.SIGALRM, hangs), time.process_time()
    signal.alarm(int(HANG_S))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - began < cpu_s
