"""Where the nodes of a run meet before any of its processes starts: each sends a message, and all get all messages.

Plain TCP and JSON lines between the nodes' parents, at the address and port that the processes use afterwards. The
content of a message means nothing here. A node that is missing or has gone is an error.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sftplay.errors import ConfigError, MachineError, RunError, SftplayError, error_from_json
from sftplay.launch.command.command import Scale

PATIENCE_S = 120.0
"""How long nodes wait for each other: they may be started by hand, in one terminal after another."""

ANSWER_S = 5.0
"""How long node 0 may take to answer. Another program on that port never gives our answer."""

LONGEST_BYTES = 2**24
"""Of a line. Who sends a longer one is no run of this kit."""

LOOK_S = 0.1
LOOPBACKS = {False: socket.AF_INET, True: socket.AF_INET6}
WELCOME = "sftplay"


@dataclass
class Peer:
    """A connection between the parents of two nodes. `messages` were received and are not read yet."""

    connection: socket.socket
    messages: deque[Any] = field(default_factory=deque)
    has_gone: bool = False
    _rest: bytes = b""

    def __post_init__(self) -> None:
        # A node that loses its power sends nothing: the kernel probes it, and gives it up after a minute.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
            if hasattr(socket, name):
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: dict[str, Any]) -> None:
        """Send it. Where the other side has gone nothing happens; reading notices that."""
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
        """Receive what has come, and notice when the other side has gone. It never waits."""
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


class Over(Exception):
    """Node 0 has ended the rendezvous with the run's exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Rendezvous:
    """The nodes of one run. Enter it on each node; node 0 is the host, at `scale.master_addr`."""

    def __init__(self, scale: Scale, *, patience_s: float = PATIENCE_S) -> None:
        self.scale, self.patience_s = scale, patience_s
        self.is_host = scale.node_rank == 0
        self._peers: dict[int, Peer] = {}
        self._is_over = False

    def __enter__(self) -> Rendezvous:
        """Wait until all nodes are there.

        Raises:
            MachineError: one has not come in time, or nobody can come to node 0.
            ConfigError: a node's number is given twice.
        """
        try:
            self._await_nodes() if self.is_host else self._find_host()
        except SftplayError as error:
            self._close(error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._close(error)

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all nodes, by node number. Every node must call it.

        Raises:
            RunError: a node has gone.
            SftplayError: node 0 has ended with this error.
            Over: node 0 has ended without one.
        """
        if not self.is_host:
            self._peers[0].send({"said": mine})
            heard: list[dict[str, Any]] = self._read_host()["all"]
            return heard
        said = [mine]
        for node, peer in sorted(self._peers.items()):
            try:
                said.append(peer.read()["said"])
            except (EOFError, LookupError):
                raise RunError(f"node {node} has gone", where="nodes", fix="look there for why") from None
        self._send_all({"all": said})
        return said

    def end(self, code: int, cause: str = "") -> int:
        """The run's exit code, which is that of node 0. Other nodes send `code` and `cause`, and wait for node 0."""
        if self.is_host:
            self._send_all({"code": code})
            self._is_over = True
            return code
        self._peers[0].send({"ended": {"code": code, "cause": cause}})
        try:
            self._read_host()
        except Over as over:
            return over.code
        raise AssertionError("node 0 gathers nothing more")

    def endings(self) -> dict[int, str]:
        """Node -> why it failed, for the nodes that are known to have failed by now.

        On other nodes than node 0 it knows of node 0 only, and reports its end whether it failed or not.
        """
        for peer in self._peers.values():
            peer.poll()
        if not self.is_host:
            host = self._peers[0]
            return {0: "has ended"} if host.has_gone or host.messages else {}
        found = {}
        for node, peer in sorted(self._peers.items()):
            ended = next((each["ended"] for each in peer.messages if "ended" in each), None)
            if ended and ended["code"]:
                found[node] = ended["cause"] or f"has ended with code {ended['code']}"
            elif not ended and peer.has_gone:
                found[node] = "has gone"
        return found

    def own_address(self) -> str:
        """This node's address in the network that leads to node 0; on node 0 the address that others use."""
        if not self._peers:
            return self.scale.master_addr
        address = str(next(iter(self._peers.values())).connection.getsockname()[0])
        return address.removeprefix("::ffff:")

    def _await_nodes(self) -> None:
        deadline, pending = time.monotonic() + self.patience_s, list[Peer]()
        expected = set(range(1, self.scale.nnodes))
        with _listen(self.scale) as listener:
            listener.settimeout(LOOK_S)
            while missing := expected - set(self._peers):
                if time.monotonic() > deadline:
                    raise _missing_error(missing, self.patience_s)
                with suppress(TimeoutError):
                    pending.append(Peer(listener.accept()[0]))
                pending = [peer for peer in pending if self._is_pending(peer)]
        for peer in pending:
            peer.close()

    def _is_pending(self, peer: Peer) -> bool:
        """Answer a connection that is no known node yet; False once it is a known node, or has gone."""
        peer.poll()
        while peer.messages:
            message = peer.messages.popleft()
            node = message.get("node") if isinstance(message, dict) else None
            if not isinstance(node, int):
                peer.has_gone = True
            elif "is_here" not in message:
                peer.send({"welcome": WELCOME})
            else:  # it has read the welcome; a node that gave up waiting for it connects again
                self._admit(node, peer)
                return False
        if peer.has_gone:
            peer.close()
        return not peer.has_gone

    def _admit(self, node: int, peer: Peer) -> None:
        before = self._peers.get(node)
        if before:
            before.poll()
        if (before and not before.has_gone) or not 0 < node < self.scale.nnodes:
            taken = "is given twice" if 0 <= node < self.scale.nnodes else f"is not among 0..{self.scale.nnodes - 1}"
            fix = "number the nodes from 0, each once"
            error = ConfigError(f"node rank {node} {taken}", where="--node-rank", fix=fix)
            peer.send({"error": error.as_json()})
            peer.close()
            raise error
        if before:
            before.close()
        self._peers[node] = peer

    def _find_host(self) -> None:
        deadline = time.monotonic() + self.patience_s
        address, why = (self.scale.master_addr, self.scale.master_port), "nobody answered"
        while time.monotonic() < deadline:
            try:
                peer = Peer(socket.create_connection(address, timeout=ANSWER_S))
            except OSError as error:
                why = error.strerror or str(error)
            else:
                peer.send({"node": self.scale.node_rank})
                with suppress(TimeoutError, EOFError):  # another program on that port, or an earlier run
                    if peer.read(ANSWER_S) == {"welcome": WELCOME}:
                        peer.send({"node": self.scale.node_rank, "is_here": True})
                        self._peers[0] = peer
                        return
                why = "what listens there is no run of this kit"
                peer.close()
            time.sleep(LOOK_S)
        raise MachineError(
            f"node 0 was not found at {address[0]}:{address[1]} within {self.patience_s:.0f} s ({why})",
            where=f"node {self.scale.node_rank}",
            fix="start node 0 with the same MASTER_ADDR and MASTER_PORT, and let the firewall pass that port",
        )

    def _read_host(self) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._peers[0].read()
        except EOFError:
            raise RunError("node 0 has gone", where="nodes", fix="look there for why") from None
        if error := message.get("error"):
            raise error_from_json(error)
        if "code" in message:
            raise Over(int(message["code"]))
        return message

    def _send_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            peer.send(message)

    def _close(self, error: BaseException | None) -> None:
        if self.is_host and not self._is_over and error is not None:
            fix = "look there for why"
            told = error if isinstance(error, SftplayError) else RunError(f"node 0: {type(error).__name__}", fix=fix)
            self._send_all({"error": told.as_json()})
        while self._peers:
            self._peers.popitem()[1].close()


def _listen(scale: Scale) -> socket.socket:
    here = "127.0.0.1" if scale.master_addr == "localhost" else scale.master_addr
    try:
        if here == "::1" or here.startswith("127."):
            return socket.create_server((here, scale.master_port), family=LOOPBACKS[here == "::1"])
        # Not only the named address: a host's own name often leads to its loopback.
        family = socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET
        return socket.create_server(("", scale.master_port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise MachineError(
            f"cannot listen on port {scale.master_port} ({error.strerror})",
            where="--master-port",
            fix="give all nodes another MASTER_PORT",
        ) from None


def _missing_error(missing: set[int], patience_s: float) -> MachineError:
    return MachineError(
        f"{', '.join(f'node {node}' for node in sorted(missing))} did not come within {patience_s:.0f} s",
        where="nodes",
        fix="start every node with the same MASTER_ADDR, MASTER_PORT and NNODES, and its own NODE_RANK",
    )
