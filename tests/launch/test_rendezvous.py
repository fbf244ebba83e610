"""The rendezvous of nodes: all receive all messages, and every node names a missing, doubled, lost or failed one."""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from processes import HANG_S, wait_until

from sftplay.errors import ConfigError, DataError, MachineError, SftplayError
from sftplay.launch import nodes as meeting
from sftplay.launch.command import Scale
from sftplay.launch.nodes import Rendezvous
from sftplay.machine.ports import free_port

Body = Callable[[Rendezvous], Any]


def run_nodes(
    *bodies: Body,
    nodes: int | None = None,
    ranks: list[int] | None = None,
    timeout_s: float = HANG_S,
    address: str = "127.0.0.1",
) -> list[Any]:
    """Run each body as a node in a thread of its own. Returns the result or the error of each."""
    port, ends = free_port(0), [None] * len(bodies)
    ranks = ranks or [*range(len(bodies))]

    def live(place: int, body: Body) -> None:
        scale = Scale(1, nodes or len(bodies), ranks[place], address, port)
        try:
            with Rendezvous(scale, timeout_s=timeout_s) as rendezvous:
                ends[place] = body(rendezvous)
        except SftplayError as error:
            ends[place] = error

    threads = [threading.Thread(target=live, args=pair) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads)
    return ends


def exchange(what: str) -> Body:
    return lambda rendezvous: [each["say"] for each in rendezvous.gather({"say": what})]


def test_every_node_receives_the_messages_of_all_in_the_order_of_nodes():
    assert run_nodes(exchange("zero"), exchange("one"), exchange("two")) == [["zero", "one", "two"]] * 3


def test_an_error_of_node_0_is_raised_on_all_nodes_with_its_kind_and_remedy():
    def fail(_rendezvous: Rendezvous) -> None:
        raise DataError("no rows", where="a.jsonl", fix="write some")

    ends = run_nodes(fail, exchange("one"), exchange("two"))
    assert [str(end) for end in ends] == ["a.jsonl: no rows\n  fix: write some"] * 3
    assert {type(end) for end in ends} == {DataError}


def test_a_node_that_does_not_come_is_named_to_those_that_did(monkeypatch: pytest.MonkeyPatch):
    now, admit = [100.0], Rendezvous._admit

    def come(self: Rendezvous, node: int, peer: Any) -> None:
        admit(self, node, peer)
        now[0] += 61  # from here on nobody comes in time

    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(Rendezvous, "_admit", come)
    for end in run_nodes(exchange("zero"), exchange("two"), nodes=3, ranks=[0, 2], timeout_s=60):
        assert isinstance(end, MachineError)
        assert "node 1 did not come within 60 s" in str(end)


def test_the_same_number_for_two_nodes_is_an_error_on_all():
    ends = run_nodes(exchange("zero"), exchange("one"), exchange("one too"), ranks=[0, 1, 1])
    assert {type(end) for end in ends} == {ConfigError}
    assert all("node rank 1 is given twice" in str(end) for end in ends)


def test_node_0_sees_the_failures_of_other_nodes_and_a_normal_end_is_none():
    def watch(rendezvous: Rendezvous) -> dict[int, str]:
        exchange("zero")(rendezvous)
        before = rendezvous.endings()
        wait_until(lambda: len(rendezvous.endings()) == 2)
        assert before.keys() <= {2, 3}
        seen = rendezvous.endings()
        rendezvous.end(5)
        return seen

    def end(code: int, cause: str = "") -> Body:
        def body(rendezvous: Rendezvous) -> Any:
            exchange("other")(rendezvous)
            return rendezvous.end(code, cause)

        return body

    ends = run_nodes(watch, end(0), end(1, "rank 2 was killed by SIGKILL"), exchange("three"))
    assert ends[0] == {2: "rank 2 was killed by SIGKILL", 3: "has gone"}
    assert ends[1:3] == [5, 5]


def host(nodes: int) -> tuple[threading.Thread, int, list[Any]]:
    """Node 0 of this many nodes, which gathers once in a thread; its port, and the list for what it receives."""
    port, received = free_port(0), list[Any]()

    def live() -> None:
        with Rendezvous(Scale(1, nodes, 0, "127.0.0.1", port), timeout_s=HANG_S) as rendezvous:
            received.append(exchange("zero")(rendezvous))

    thread = threading.Thread(target=live)
    thread.start()
    return thread, port, received


def connect(port: int) -> socket.socket:
    """A connection to the port, as soon as a program listens there."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_strangers_at_the_port_neither_join_nor_hinder():
    thread, port, ends = host(2)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b'{"node": "x"}\n', b"[]\n", b""):
        with connect(port) as stranger:
            stranger.sendall(noise)
    with Rendezvous(Scale(1, 2, 1, "127.0.0.1", port), timeout_s=HANG_S) as rendezvous:
        assert exchange("one")(rendezvous) == ["zero", "one"]
    thread.join(HANG_S)
    assert ends == [["zero", "one"]]


def test_only_a_node_with_the_runs_token_may_join(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SFTPLAY_RUN_TOKEN", "the run's")
    thread, port, ends = host(2)
    with connect(port) as stranger, stranger.makefile() as lines:
        stranger.sendall(b'{"node": 1, "challenge": "x"}\n')
        challenge = json.loads(lines.readline())["challenge"]
        proof = hmac.new(b"another", f"1 {challenge}".encode(), "sha256").hexdigest()
        stranger.sendall(json.dumps({"node": 1, "is_here": True, "proof": proof}).encode() + b"\n")
        assert lines.read() == ""  # node 0 has closed the connection, and waits on
    with Rendezvous(Scale(1, 2, 1, "127.0.0.1", port), timeout_s=HANG_S) as rendezvous:
        assert exchange("one")(rendezvous) == ["zero", "one"]
    thread.join(HANG_S)
    assert ends == [["zero", "one"]]


def test_a_node_does_not_join_a_run_that_has_another_token():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def welcome_all() -> None:
            with suppress(OSError):  # at the end of the test
                while True:
                    with other.accept()[0] as connection:
                        connection.recv(2**16)
                        connection.sendall(b'{"welcome": "sftplay", "proof": "guessed", "challenge": "x"}\n')

        threading.Thread(target=welcome_all, daemon=True).start()
        with pytest.raises(MachineError, match="the run at that port has another SFTPLAY_RUN_TOKEN"):
            Rendezvous(Scale(1, 2, 1, "127.0.0.1", other.getsockname()[1]), timeout_s=0.3).__enter__()


@pytest.mark.parametrize(
    ("named", "bound"),
    [("192.0.2.7", "192.0.2.7"), ("127.0.1.1", ""), ("198.51.100.9", "")],
    ids=["its own", "a name that leads to the loopback", "one that another machine passes on"],
)
def test_node_0_listens_on_the_address_that_is_named_where_it_is_its_own(
    named: str, bound: str, monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []

    def listen(address: tuple[str, int], **_: Any) -> str:
        tried.append(address[0])
        if address[0] == "198.51.100.9":
            raise OSError(99, "Cannot assign requested address")
        return address[0]

    info = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (named, 29511))]
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *_args, **_named: info)
    monkeypatch.setattr(meeting.socket, "create_server", listen)
    assert meeting._listen(Scale(1, 2, 0, "head", 29511)) == bound
    assert tried[-1] == bound
