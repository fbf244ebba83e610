"""Finds ports of this machine on which nothing listens."""

from __future__ import annotations

import socket
from contextlib import suppress

from sftplay.errors import MachineError

HOST = "127.0.0.1"
PORTS_TRIED = 50


def free_port(first: int) -> int:
    """The first port from `first` on which nothing listens; any free one for 0.

    Raises:
        MachineError: none of the next ones is free.
    """
    for port in range(first, first + PORTS_TRIED) if first else [0]:
        if number := bound_port(port):
            return number
    raise MachineError(f"no free port in {first}..{first + PORTS_TRIED - 1}", where=HOST, fix="give another with PORT=")


def bound_port(port: int) -> int | None:
    """The port's number if a program can listen on it now, None if not. For 0 the system chooses a free port."""
    with socket.socket() as probe, suppress(OSError, OverflowError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return int(probe.getsockname()[1])
    return None
