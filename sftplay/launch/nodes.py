"""Nodes of a run: they meet over TCP, compare their reports and join one run."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError, error_from_json
from sftplay.launch.command import Scale
from sftplay.launch.follow import NodeLost
from sftplay.launch.run_folder import RunFolder

TOKEN = "SFTPLAY_RUN_TOKEN"
"""The variable with the run's secret, the same on all nodes. A job of SLURM makes one; without it anybody may join."""

SEND_S = 60.0  # how long the other side may take nothing of what is sent to it
SILENT_S = 3600.0
"""How long the other side may say nothing: node 0 sizes the run and measures a GPU meanwhile. The kernel notices a
machine without power much sooner."""

MAX_LINE_BYTES = 2**24  # a peer that sends a longer line is no run of this kit


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
    challenge: str = field(default_factory=partial(secrets.token_hex, 16))
    """A random text that the other side must prove to know the run's token with."""

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


TIMEOUT_S = 120.0  # how long nodes wait for each other: users may start them by hand, in one terminal after another
ANSWER_S = 5.0  # How long node 0 may take to answer. Another program on that port never sends our answer.
POLL_S = 0.1
WELCOME, HOST = "sftplay", "host"


class RendezvousEnded(Exception):
    """Node 0 has ended the rendezvous with the run's exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Rendezvous:
    """The connection of the nodes of one run, a context manager on each node. Node 0 is the host at `master_addr`."""

    def __init__(self, scale: Scale, *, timeout_s: float = TIMEOUT_S) -> None:
        self.scale, self.timeout_s = scale, timeout_s
        self.is_host = scale.node_rank == 0
        self._peers: dict[int, Peer] = {}
        self._has_ended = False

    def __enter__(self) -> Rendezvous:
        """Wait until all nodes are connected.

        Raises MachineError if a node did not come in time, node 0 was not found, or node 0 cannot listen on its port;
        ConfigError if two nodes have the same number, or a number is too high.
        """
        try:
            self._await_nodes() if self.is_host else self._connect_to_host()
        except SftplayError as error:
            self._close(error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._close(error)

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send this node's message and return those of all nodes, in the order of the nodes. Every node must call it.

        Raises RunError if a node died; SftplayError if node 0 has ended with this error; RendezvousEnded if node 0
        has ended without an error.
        """
        if not self.is_host:
            self._peers[0].send({"message": message})
            return self._read_host()["messages"]
        messages = [message]
        for node, peer in sorted(self._peers.items()):
            try:
                messages.append(peer.read()["message"])
            except (EOFError, LookupError, TimeoutError) as error:
                raise _lost_error(node, error) from None
        self._send_all({"messages": messages})
        return messages

    def end(self, code: int, cause: str = "") -> int:
        """The run's exit code, which is that of node 0. Other nodes send `code` and `cause`, then wait for node 0."""
        if self.is_host:
            self._send_all({"code": code})
            self._has_ended = True
            return code
        self._peers[0].send({"ended": {"code": code, "cause": cause}})
        try:
            self._read_host(None)  # node 0 may evaluate and save for hours
        except RendezvousEnded as end:
            return end.code
        raise AssertionError("node 0 gathers no more messages")

    def endings(self) -> dict[int, str]:
        """Node -> why it failed, for the failures known now. Nodes other than 0 report any end of node 0."""
        for peer in self._peers.values():
            peer.poll()
        if not self.is_host:
            host = self._peers[0]
            return {0: "has ended"} if host.has_gone or host.messages else {}
        failures = {}
        for node, peer in sorted(self._peers.items()):
            end = next((message["ended"] for message in peer.messages if "ended" in message), None)
            if end and end["code"]:
                failures[node] = end["cause"] or f"has ended with code {end['code']}"
            elif not end and peer.has_gone:
                failures[node] = "has gone"
        return failures

    def own_address(self) -> str:
        """This node's address in the network to node 0. On node 0: the address that the others use."""
        if not self._peers:
            return self.scale.master_addr
        address = str(next(iter(self._peers.values())).connection.getsockname()[0])
        return address.removeprefix("::ffff:")

    def _await_nodes(self) -> None:
        deadline, pending = time.monotonic() + self.timeout_s, list[Peer]()
        expected = set(range(1, self.scale.nnodes))
        with _listen(self.scale) as listener:
            listener.settimeout(POLL_S)
            while missing := expected - set(self._peers):
                if time.monotonic() > deadline:
                    nodes = ", ".join(f"node {node}" for node in sorted(missing))
                    fix = "start every node with the same MASTER_ADDR, MASTER_PORT and NNODES, and its own NODE_RANK"
                    raise MachineError(f"{nodes} did not come within {self.timeout_s:.0f} s", where="nodes", fix=fix)
                with suppress(TimeoutError):
                    pending.append(Peer(listener.accept()[0]))
                pending = [peer for peer in pending if self._is_pending(peer)]
        for peer in pending:
            peer.close()

    def _is_pending(self, peer: Peer) -> bool:
        """Answer a connection whose node is not known yet. False when the node is known now, or has gone."""
        peer.poll()
        while peer.messages:
            message = peer.messages.popleft()
            node = message.get("node") if isinstance(message, dict) else None
            if not isinstance(node, int):
                peer.has_gone = True
            elif "is_here" not in message:
                proof = prove(str(message.get("challenge")), HOST)
                peer.send({"welcome": WELCOME, "proof": proof, "challenge": peer.challenge})
            elif is_proof(message.get("proof"), challenge=peer.challenge, subject=str(node)):
                self._admit(node, peer)  # it has read the welcome; a node that did not get it in time connects again
                return False
            else:
                peer.has_gone = True
        if peer.has_gone:
            peer.close()
        return not peer.has_gone

    def _admit(self, node: int, peer: Peer) -> None:
        earlier = self._peers.get(node)
        if earlier:
            earlier.poll()
        if (earlier and not earlier.has_gone) or not 0 < node < self.scale.nnodes:
            problem = "is given twice" if earlier else f"is not among 0..{self.scale.nnodes - 1}"
            fix = "number the nodes from 0, each number once"
            error = ConfigError(f"node rank {node} {problem}", where="--node-rank", fix=fix)
            peer.send({"error": error.as_json()})
            peer.close()
            raise error
        if earlier:
            earlier.close()
        self._peers[node] = peer

    def _connect_to_host(self) -> None:
        deadline, node = time.monotonic() + self.timeout_s, self.scale.node_rank
        address, reason = (self.scale.master_addr, self.scale.master_port), "nobody answered"
        while time.monotonic() < deadline:
            try:
                peer = Peer(socket.create_connection(address, timeout=ANSWER_S))
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                peer.send({"node": node, "challenge": peer.challenge})
                answer: Any = None
                with suppress(TimeoutError, EOFError):
                    answer = peer.read(ANSWER_S)
                if not isinstance(answer, dict) or answer.get("welcome") != WELCOME:
                    reason = "the program on that port is no run of this kit"
                elif not is_proof(answer.get("proof"), challenge=peer.challenge, subject=HOST):
                    reason = f"the run at that port has another {TOKEN}"
                else:
                    proof = prove(str(answer.get("challenge")), str(node))
                    peer.send({"node": node, "is_here": True, "proof": proof})
                    self._peers[0] = peer
                    return
                peer.close()
            time.sleep(POLL_S)
        what = f"node 0 was not found at {address[0]}:{address[1]} within {self.timeout_s:.0f} s ({reason})"
        fix = "start node 0 with the same MASTER_ADDR and MASTER_PORT, and open that port in the firewall"
        raise MachineError(what, where=f"node {node}", fix=fix)

    def _read_host(self, limit_s: float | None = SILENT_S) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._peers[0].read(limit_s)
        except (EOFError, TimeoutError) as lost:
            raise _lost_error(0, lost) from None
        if error := message.get("error"):
            raise error_from_json(error)
        if "code" in message:
            raise RendezvousEnded(int(message["code"]))
        return message

    def _send_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            peer.send(message)

    def _close(self, error: BaseException | None) -> None:
        if self.is_host and not self._has_ended and error is not None:
            if not isinstance(error, SftplayError):
                error = RunError(f"node 0: {type(error).__name__}", fix="find the reason on that node")
            self._send_all({"error": error.as_json()})
        while self._peers:
            self._peers.popitem()[1].close()


def _listen(scale: Scale) -> socket.socket:
    address = "127.0.0.1" if scale.master_addr == "localhost" else scale.master_addr
    try:
        if address == "::1" or address.startswith("127."):
            family = socket.AF_INET6 if address == "::1" else socket.AF_INET
            return socket.create_server((address, scale.master_port), family=family)
        named = socket.getaddrinfo(address, scale.master_port, type=socket.SOCK_STREAM)
        for family, *_, there in named:
            if not ip_address(str(there[0]).partition("%")[0]).is_loopback:
                with suppress(OSError):  # an address that another machine passes on to this one
                    return socket.create_server(there[:2], family=family)
        # Then on all addresses: a host's own name often leads to its loopback, where no other node arrives.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", scale.master_port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", scale.master_port))
    except OSError as error:
        what = f"cannot listen on port {scale.master_port} ({error.strerror})"
        raise MachineError(what, where="--master-port", fix="give all nodes another MASTER_PORT") from None


def _lost_error(node: int, error: Exception) -> RunError:
    silent = f"has said nothing for {SILENT_S / 60:.0f} minutes"
    what = f"node {node} {silent if isinstance(error, TimeoutError) else 'has gone'}"
    return RunError(what, where="nodes", fix="find the reason on that node")


SHOWN = 12  # how many differences an error lists
MISSING = "missing"

FIXES = {
    "config": "give every node the same config file, command line and NNODES, NPROC",
    "data": "give every node the same files, or one folder that all share",
    "machine": "make the nodes alike (`make install` by the same requirements.lock, the same commit of the kit)",
}
SECTIONS = {"launch": "config", "config": "config", "files": "data", "versions": "machine", "gpus": "machine"}
"""Part of a report -> the kind of error for a difference in it. The error text has this order."""


def find_differences(reports: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    """Node, kind of error and description of every value that differs from the most frequent one.

    If no value is the most frequent, that of node 0 counts. `reports` are in the order of the nodes. Each has `host`
    and, for each of SECTIONS, a mapping of names to values. A node that could not read its config has not all sections.
    A missing section is compared among the other nodes.
    """
    differences = []
    for section, kind in SECTIONS.items():
        parts = {node: report[section] for node, report in enumerate(reports) if section in report}
        for name in sorted({name for part in parts.values() for name in part}):
            values = {node: str(part.get(name, MISSING)) for node, part in parts.items()}
            counts = Counter(values.values())
            usual = max(counts, key=lambda value: (counts[value], value == values[min(values)]))
            usual_nodes = [node for node in values if values[node] == usual]
            others = f"node {usual_nodes[0]}" if len(usual_nodes) == 1 else f"nodes {', '.join(map(str, usual_nodes))}"
            for node, value in values.items():
                what = f"{name} is {value}, on {others} it is {usual}"
                if section == "files" and MISSING in (value, usual):
                    here, there = ("is missing", "exists") if value == MISSING else ("exists", "is missing")
                    what = f"the path in {name} {here}, on {others} it {there}"
                elif section == "files":
                    what = f"the path in {name} has other content than on {others}"
                differences += [(node, kind, what)] if value != usual else []
    return differences


def check_nodes_match(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error, the same on every node, that names every node that differs or reports an error."""
    names = [f"node {node} ({report['host']})" for node, report in enumerate(reports)]
    errors = {node: error_from_json(report["error"]) for node, report in enumerate(reports) if report.get("error")}
    if errors:
        first = next(iter(errors.values()))
        problems = [
            f"{names[node]}: {error.where + ': ' if error.where else ''}{error.what}" for node, error in errors.items()
        ]
        raise type(first)("; ".join(problems), where="nodes", fix=first.fix)
    if differences := find_differences(reports):
        lines = [f"{names[node]}: {what}" for node, _, what in differences]
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        kinds = list(dict.fromkeys(kind for _, kind, _ in differences))
        error_class: type[SftplayError] = {"config": ConfigError, "data": DataError}.get(kinds[0], MachineError)
        raise error_class("; ".join(lines[:SHOWN]) + more, where="nodes", fix="; ".join(FIXES[kind] for kind in kinds))


def announce_run(rendezvous: Rendezvous, folder: RunFolder) -> None:
    """On node 0: send the run's folder, which is complete now, to the other nodes."""
    rendezvous.gather({"folder": str(folder.path), "resolved": _hash_config(folder)})


def join_run(rendezvous: Rendezvous) -> tuple[RunFolder, str]:
    """On another node: wait for the run's folder. It, and the digest of its config; or raise node 0's error."""
    message = rendezvous.gather({})[0]
    return RunFolder(Path(message["folder"])), message["resolved"]


def await_ready(rendezvous: Rendezvous, error: SftplayError | None = None) -> None:
    """Wait until every node is ready to start its processes. An `error` of one node is raised on all."""
    report = {"host": socket.gethostname(), **({"error": error.as_json()} if error else {})}
    check_nodes_match(rendezvous.gather(report))


def watch_nodes(rendezvous: Rendezvous, folder: RunFolder) -> Callable[[], None]:
    """A function that raises NodeLost when another node has ended before the run's processes here.

    After the ranks have met, a rank notices itself that another one is lost, and node 0 may continue alone to save the
    result. Before that, and on other nodes after the end of node 0, nothing else would end the processes soon.
    """
    ended_at: float | None = None

    def check() -> None:
        nonlocal ended_at
        if not (endings := rendezvous.endings()):
            return
        ended_at = ended_at or time.monotonic()
        # The ranks here may take so long to end: after a rank of another node has written its error, or after node 0's.
        is_due = time.monotonic() > ended_at + (5.0 if rendezvous.is_host else 30.0)
        if is_due and not (rendezvous.is_host and folder.read_json("status.json").get("ranks")):
            what = "; ".join(f"node {node}: {cause}" for node, cause in endings.items())
            raise NodeLost(what, where=str(folder.path), fix="find the reason there, then start all nodes again")

    return check


def check_folder(folder: RunFolder, digest: str) -> None:
    """Raise MachineError if this node does not see node 0's folder, that is, a resolved config with this `digest`."""
    deadline = time.monotonic() + 10.0  # for a shared file system to show the folder (NFS caches attributes for 3 s)
    while time.monotonic() < deadline:
        with suppress(OSError):
            if _hash_config(folder) == digest:
                return
        time.sleep(0.2)
    what = f"{folder.path.absolute()} is not the folder that node 0 has created"
    fix = "give output_dir a folder that all nodes share, as an absolute path"
    raise MachineError(what, where="output_dir", fix=fix)


def _hash_config(folder: RunFolder) -> str:
    return hashlib.sha256(folder.resolved.read_bytes()).hexdigest()
