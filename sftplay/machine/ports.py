"""Finds ports of this machine on which nothing listens."""

from __future__ import annotations

import socket

from sftplay.errors import MachineError

HOST = "127.0.0.1"
PORTS_TRIED = 50


def free_port(first: int) -> int:
    """The first port from `first` on which nothing listens; any free one for 0.

    Raises:
        MachineError: none of the next ones is free.
    """
    for port in range(first, first + PORTS_TRIED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, 0 if first == 0 else port))
            except (OSError, OverflowError):
                continue
            return int(probe.getsockname()[1])
    raise MachineError(f"no free port in {first}..{first + PORTS_TRIED - 1}", where=HOST, fix="give another with PORT=")
