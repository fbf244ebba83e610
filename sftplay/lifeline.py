"""Ties a worker's life to its parent's, so that a killed launcher leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere nothing happens.

    `parent` is the parent's pid, None when it cannot have died before this call.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)
