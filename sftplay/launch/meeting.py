"""Where the nodes of a run meet before any of its processes starts: each tells what it has to say, all hear all of it.

Plain TCP and JSON lines between the nodes' parents, at the address and port that the processes use afterwards. What is
said means nothing here; only who is missing or has gone is an error of its own.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError
from sftplay.launch.command import Scale

PATIENCE_S = 120.0
"""How long nodes wait for each other to come: they may be started by hand, in one terminal after another."""

ANSWER_S = 5.0
"""How long a welcome may take where somebody listens; a stranger on that port never gives one."""

LOOK_S = 0.2
WELCOME = "sftplay"
LONGEST_BYTES = 2**24
KINDS = {kind.code: kind for kind in (ConfigError, MachineError, DataError, RunError)}


@dataclass
class Peer:
    """A connection over which one line at a time is sent and read."""

    connection: socket.socket
    lines: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        # A node that loses its power says nothing: the kernel asks after it.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.lines = self.connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(message, default=str).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """The next message; EOFError where the other side has gone."""
        line = self.lines.readline(LONGEST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    def is_closed(self) -> bool:
        """True when the other side has gone; what it has said stays to be read."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with suppress(OSError):
            self.lines.close()
            self.connection.close()


class Meeting:
    """The nodes of one run. Enter it on each node; node 0 is the host, at `scale.master_addr`."""

    def __init__(self, scale: Scale, *, patience_s: float = PATIENCE_S) -> None:
        self.scale, self.patience_s = scale, patience_s
        self.is_host = scale.node_rank == 0
        self._peers: dict[int, Peer] = {}
        self._is_over = False

    def __enter__(self) -> Meeting:
        """Wait until all nodes are there.

        Raises:
            MachineError: one has not come in time, or a node's number is given twice.
        """
        try:
            self._await_guests() if self.is_host else self._find_host()
        except SftplayError as error:
            self._part(error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._part(error)

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What each node has said, by node number; every node must ask.

        Raises:
            RunError: a node has gone.
            SftplayError: node 0 has ended with this error.
        """
        if not self.is_host:
            self._to_host({"said": mine})
            heard: list[dict[str, Any]] = self._from_host()["all"]
            return heard
        said = [mine]
        for node in sorted(self._peers):
            try:
                said.append(self._peers[node].read()["said"])
            except (OSError, EOFError):
                raise RunError(f"node {node} has gone", where="nodes", fix="look there for why") from None
        self._tell({"all": said})
        return said

    def end(self, code: int) -> int:
        """End it with the run's exit code, which is that of node 0; it waits for node 0 elsewhere."""
        if not self.is_host:
            return int(self._from_host()["code"])
        self._tell({"code": code})
        self._is_over = True
        return code

    def lost(self) -> list[int]:
        """On node 0: the other nodes whose parents have gone."""
        return [node for node, peer in sorted(self._peers.items()) if peer.is_closed()]

    def own_address(self) -> str:
        """This node's address on the network over which node 0 is reached; of node 0, the one it is reached at."""
        if not self._peers:
            return self.scale.master_addr
        return str(next(iter(self._peers.values())).connection.getsockname()[0])

    def _await_guests(self) -> None:
        deadline = time.monotonic() + self.patience_s
        expected = set(range(1, self.scale.nnodes))
        with _listen(self.scale) as listener:
            while missing := expected - set(self._peers):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise _absent(missing, self.patience_s)
                listener.settimeout(left_s)
                with suppress(TimeoutError):
                    self._welcome(listener.accept()[0])

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_S)
        peer = Peer(connection)
        try:
            node = int(peer.read()["node"])
            peer.send({"welcome": WELCOME})
        except (OSError, EOFError, ValueError, LookupError, TypeError):  # somebody else, who looks which ports are open
            peer.close()
            return
        connection.settimeout(None)
        if node in self._peers or not 0 < node < self.scale.nnodes:
            taken = "is given twice" if 0 <= node < self.scale.nnodes else f"is not among 0..{self.scale.nnodes - 1}"
            error = ConfigError(
                f"node rank {node} {taken}", where="--node-rank", fix="number the nodes from 0, each once"
            )
            _send_quietly(peer, {"error": error.as_json()})
            peer.close()
            raise error
        self._peers[node] = peer

    def _find_host(self) -> None:
        deadline = time.monotonic() + self.patience_s
        address, why = (self.scale.master_addr, self.scale.master_port), "nobody answered"
        while time.monotonic() < deadline:
            try:
                connection = socket.create_connection(address, timeout=ANSWER_S)
            except OSError as error:
                why = error.strerror or str(error)
                time.sleep(LOOK_S)
                continue
            peer = Peer(connection)
            try:
                peer.send({"node": self.scale.node_rank})
                if peer.read().get("welcome") == WELCOME:
                    connection.settimeout(None)
                    self._peers[0] = peer
                    return
            except (OSError, EOFError, ValueError, AttributeError):  # a stranger on that port, or an earlier run's
                why = "what listens there is no run of this kit"
            peer.close()
            time.sleep(LOOK_S)
        raise MachineError(
            f"node 0 was not found at {address[0]}:{address[1]} within {self.patience_s:.0f} s ({why})",
            where=f"node {self.scale.node_rank}",
            fix="start node 0 with the same MASTER_ADDR and MASTER_PORT, and let the firewall pass that port",
        )

    def _to_host(self, message: dict[str, Any]) -> None:
        _send_quietly(self._peers[0], message)  # where it has gone, reading tells why

    def _from_host(self) -> dict[str, Any]:
        try:
            message = self._peers[0].read()
        except (OSError, EOFError):
            raise RunError("node 0 has gone", where="nodes", fix="look there for why") from None
        if error := message.get("error"):
            raise error_of(error)
        return message

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            _send_quietly(peer, message)

    def _part(self, error: BaseException | None) -> None:
        if self.is_host and not self._is_over and error is not None:
            known = isinstance(error, SftplayError)
            told = error if known else RunError(f"node 0 has ended: {type(error).__name__}", fix="look there for why")
            self._tell({"error": told.as_json()})  # type: ignore[attr-defined]
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


def error_of(told: dict[str, Any]) -> SftplayError:
    """The error that another node has told of, as `SftplayError.as_json` writes it."""
    kind = KINDS.get(str(told.get("code")), RunError)
    return kind(str(told["what"]), where=str(told.get("where", "")), fix=str(told.get("fix", "")))


def _listen(scale: Scale) -> socket.socket:
    is_here = scale.master_addr in ("localhost", "::1") or scale.master_addr.startswith("127.")
    try:
        if is_here:
            return socket.create_server(("127.0.0.1", scale.master_port))
        # Not only the named address: a host's own name often leads to its loopback.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", scale.master_port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise MachineError(
            f"cannot listen on port {scale.master_port} ({error.strerror})",
            where="--master-port",
            fix="give all nodes another MASTER_PORT",
        ) from None


def _absent(missing: set[int], patience_s: float) -> MachineError:
    names = ", ".join(f"node {node}" for node in sorted(missing))
    return MachineError(
        f"{names} did not come within {patience_s:.0f} s",
        where="nodes",
        fix="start every node with the same MASTER_ADDR, MASTER_PORT and NNODES, and its own NODE_RANK",
    )


def _send_quietly(peer: Peer, message: dict[str, Any]) -> None:
    with suppress(OSError):
        peer.send(message)
