"""One end of a connection between the parents of two nodes: JSON lines, read with or without waiting."""

from __future__ import annotations

import json
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LONGEST_BYTES = 2**24
"""Of a line; who sends a longer one is none of ours."""


@dataclass
class Peer:
    """A connection over which JSON lines are sent and read; `messages` have come and wait to be read."""

    connection: socket.socket
    messages: deque[Any] = field(default_factory=deque)
    has_gone: bool = False
    _rest: bytes = b""

    def __post_init__(self) -> None:
        # A node that loses its power says nothing: the kernel asks after it, and gives it up after a minute.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
            if hasattr(socket, name):
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict[str, Any]) -> None:
        """Say it; where nobody is there any more, nothing happens, and reading tells."""
        self.connection.settimeout(None)
        with suppress(OSError):
            self.connection.sendall(json.dumps(message, default=str).encode() + b"\n")

    def read(self, limit_s: float | None = None) -> Any:
        """The next message; EOFError where the other side has gone, TimeoutError after `limit_s` seconds."""
        self.connection.settimeout(limit_s)
        while not self.messages:
            if self.has_gone:
                raise EOFError
            self._receive()
        return self.messages.popleft()

    def poll(self) -> None:
        """Take in what has come, and notice when the other side has gone; never waits."""
        self.connection.settimeout(0)
        with suppress(BlockingIOError):
            while not self.has_gone:
                self._receive()

    def _receive(self) -> None:
        try:
            came = self.connection.recv(2**16)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError:
            came = b""
        *lines, self._rest = (self._rest + came).split(b"\n")
        self.has_gone = came == b"" or len(self._rest) > LONGEST_BYTES
        try:
            self.messages += [json.loads(line) for line in lines]
        except ValueError:  # no run of this kit
            self.has_gone = True

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()
