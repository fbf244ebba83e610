"""A connection between the parents of two nodes: JSON lines over TCP, and the proof that both belong to one run.

The proof is an HMAC (RFC 2104) by the run's token over a random text of the other side, so that no token is sent.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

TOKEN = "SFTPLAY_RUN_TOKEN"
"""The variable with the run's secret, the same on all nodes. A job of SLURM makes one; without it anybody may join."""

SEND_S = 60.0
"""How long the other side may take nothing of what is sent to it."""

SILENT_S = 3600.0
"""How long the other side may say nothing: node 0 sizes the run and measures a GPU meanwhile. The kernel notices a
machine without power much sooner."""

MAX_LINE_BYTES = 2**24
"""A peer that sends a longer line is no run of this kit."""


def new_challenge() -> str:
    """A random text that the other side must prove to know the token with."""
    return secrets.token_hex(16)


def prove(challenge: str, subject: str) -> str:
    """The proof that this process has the run's token; `subject` says who it is: `host`, or the node's number."""
    token = os.environ.get(TOKEN, "")
    return hmac.new(token.encode(), f"{subject} {challenge}".encode(), "sha256").hexdigest()


def is_proof(given: object, *, challenge: str, subject: str) -> bool:
    """True when the other side has this process's token."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), prove(challenge, subject).encode())


@dataclass
class Peer:
    """A connection between the parents of two nodes. `messages` have been received but not read."""

    connection: socket.socket
    messages: deque[Any] = field(default_factory=deque)
    has_gone: bool = False
    challenge: str = field(default_factory=new_challenge)
    """What the other side must prove the run's token with."""

    _rest: bytes = b""

    def __post_init__(self) -> None:
        # A node without power sends nothing. The kernel probes the connection and ends it after a minute.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
            if hasattr(socket, name):
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict[str, Any]) -> None:
        """Send the message. If the other side has gone, nothing happens; `read` and `poll` notice that.

        A side that takes nothing for SEND_S has gone too: half a message would make the next one unreadable.
        """
        self.connection.settimeout(SEND_S)
        try:
            self.connection.sendall(json.dumps(message, default=str).encode() + b"\n")
        except TimeoutError:
            self.has_gone = True
        except OSError:
            pass

    def read(self, limit_s: float | None = SILENT_S) -> Any:
        """The next message. EOFError if the other side has gone, TimeoutError after `limit_s` seconds."""
        self.connection.settimeout(limit_s)
        while not self.messages:
            if self.has_gone:
                raise EOFError
            self._receive()
        return self.messages.popleft()

    def poll(self) -> None:
        """Receive what has arrived, and notice if the other side has gone. It never waits."""
        self.connection.settimeout(0)
        with suppress(BlockingIOError):
            while not self.has_gone:
                self._receive()

    def _receive(self) -> None:
        try:
            received = self.connection.recv(2**16)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError:
            received = b""
        *lines, self._rest = (self._rest + received).split(b"\n")
        self.has_gone = received == b"" or len(self._rest) > MAX_LINE_BYTES
        try:
            self.messages += [json.loads(line) for line in lines]
        except ValueError:  # no run of this kit
            self.has_gone = True

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()
