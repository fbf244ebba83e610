"""Looking at processes from outside: waiting for something to happen, and whether a pid still lives."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    """True for a process that has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
