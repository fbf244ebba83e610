"""Nodes that meet before a run: all hear all; who is missing, doubled, gone or in trouble is named on every node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import wait_until

from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError
from sftplay.launch.command.command import Scale
from sftplay.launch.nodes.rendezvous import Rendezvous, RendezvousEnded
from sftplay.machine.ports import free_port

Work = Callable[[Rendezvous], Any]


def meet(
    *works: Work,
    nodes: int | None = None,
    ranks: list[int] | None = None,
    timeout_s: float = 20,
    address: str = "127.0.0.1",
) -> list[Any]:
    """Let each work be a node's, all at once in threads; what each returned, or the error it ended with."""
    port, ends = free_port(0), [None] * len(works)
    ranks = ranks or [*range(len(works))]

    def live(place: int, work: Work) -> None:
        scale = Scale(1, nodes or len(works), ranks[place], address, port)
        try:
            with Rendezvous(scale, timeout_s=timeout_s) as rendezvous:
                ends[place] = work(rendezvous)
        except SftplayError as error:
            ends[place] = error

    threads = [threading.Thread(target=live, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    return ends


def tell(what: str) -> Work:
    return lambda rendezvous: [each["say"] for each in rendezvous.gather({"say": what})]


def test_every_node_hears_what_all_have_said_in_the_order_of_nodes():
    assert meet(tell("zero"), tell("one"), tell("two")) == [["zero", "one", "two"]] * 3


def test_the_exit_code_of_node_0_is_everybodys():
    assert meet(lambda rendezvous: rendezvous.end(143), lambda rendezvous: rendezvous.end(0)) == [143, 143]


def test_an_error_of_node_0_is_raised_on_all_nodes_with_its_kind_and_remedy():
    def fail(_rendezvous: Rendezvous) -> None:
        raise DataError("no rows", where="a.jsonl", fix="write some")

    ends = meet(fail, tell("one"), tell("two"))
    assert [str(end) for end in ends] == ["a.jsonl: no rows\n  fix: write some"] * 3
    assert {type(end) for end in ends} == {DataError}


def test_a_node_that_does_not_come_is_named_to_those_that_did():
    for end in meet(tell("zero"), tell("two"), nodes=3, ranks=[0, 2], timeout_s=1):
        assert isinstance(end, MachineError)
        assert "node 1 did not come within 1 s" in str(end)


def test_a_node_without_a_node_0_says_where_it_looked():
    (end,) = meet(tell("one"), nodes=2, ranks=[1], timeout_s=0.5)
    assert isinstance(end, MachineError)
    assert "node 0 was not found at 127.0.0.1:" in str(end)


def test_a_number_that_two_nodes_have_is_an_error_on_all():
    ends = meet(tell("zero"), tell("one"), tell("one too"), ranks=[0, 1, 1])
    assert {type(end) for end in ends} == {ConfigError}
    assert all("node rank 1 is given twice" in str(end) for end in ends)


def test_node_0_sees_how_others_have_ended_and_what_well_ended_is_no_trouble():
    def watch(rendezvous: Rendezvous) -> dict[int, str]:
        tell("zero")(rendezvous)
        before = rendezvous.endings()
        wait_until(lambda: len(rendezvous.endings()) == 2)
        assert before.keys() <= {2, 3}
        seen = rendezvous.endings()
        rendezvous.end(5)
        return seen

    def end(code: int, cause: str = "") -> Work:
        def work(rendezvous: Rendezvous) -> Any:
            tell("other")(rendezvous)
            return rendezvous.end(code, cause)

        return work

    ends = meet(watch, end(0), end(1, "rank 2 was killed by SIGKILL"), tell("three"))
    assert ends[0] == {2: "rank 2 was killed by SIGKILL", 3: "has gone"}
    assert ends[1:3] == [5, 5]


def test_other_nodes_see_that_node_0_has_ended():
    def work(rendezvous: Rendezvous) -> bool:
        assert rendezvous.endings() == {}
        tell("one")(rendezvous)
        wait_until(rendezvous.endings)
        return rendezvous.end(0) == 4

    assert meet(lambda rendezvous: (tell("zero")(rendezvous), rendezvous.end(4)), work)[1] is True


def test_node_that_waits_for_more_hears_the_code_where_node_0_has_nothing_more_to_do():
    def work(rendezvous: Rendezvous) -> int:
        with pytest.raises(RendezvousEnded) as over:
            rendezvous.gather({})
        return over.value.code

    assert meet(lambda rendezvous: rendezvous.end(0), work)[1] == 0


def test_a_node_that_leaves_is_named_on_the_others():
    ends = meet(tell("zero"), lambda _rendezvous: "left", tell("two"))
    assert ends[1] == "left"
    assert [type(ends[0]), type(ends[2])] == [RunError, RunError]
    assert all("node 1 has gone" in str(end) for end in (ends[0], ends[2]))


def host(nodes: int) -> tuple[threading.Thread, int, list[Any]]:
    """Node 0 of so many nodes, which gathers once, in a thread; its port, and where what it heard will lie."""
    port, heard = free_port(0), list[Any]()

    def live() -> None:
        with Rendezvous(Scale(1, nodes, 0, "127.0.0.1", port), timeout_s=120) as rendezvous:
            heard.append(tell("zero")(rendezvous))

    thread = threading.Thread(target=live)
    thread.start()
    return thread, port, heard


def knock(port: int) -> socket.socket:
    """A connection to whoever listens there, as soon as somebody does."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=120)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_strangers_at_the_port_neither_join_nor_hinder():
    thread, port, ends = host(2)
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b'{"node": "x"}\n', b"[]\n", b""):
        with knock(port) as stranger:
            stranger.sendall(noise)
    with Rendezvous(Scale(1, 2, 1, "127.0.0.1", port), timeout_s=120) as rendezvous:
        assert tell("one")(rendezvous) == ["zero", "one"]
    thread.join(240)
    assert ends == [["zero", "one"]]


def test_a_port_that_is_taken_on_node_0_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MachineError, match=f"cannot listen on port {port}"):
            Rendezvous(Scale(1, 2, 0, "127.0.0.1", port)).__enter__()


def test_what_listens_at_the_port_and_is_none_of_ours_is_not_taken_for_node_0():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def talk() -> None:
            for _ in range(2):
                connection, _address = other.accept()
                connection.sendall(b"220 mail\r\n")
                connection.close()

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(MachineError, match=r"no run of this kit|nobody answered|timed out"):
            Rendezvous(Scale(1, 2, 1, "127.0.0.1", other.getsockname()[1]), timeout_s=0.3).__enter__()


def test_node_that_is_started_again_while_others_are_awaited_takes_its_own_place():
    thread, port, ends = host(3)

    def join(node: int) -> Rendezvous:
        return Rendezvous(Scale(1, 3, node, "127.0.0.1", port), timeout_s=120).__enter__()

    first = join(1)
    first._peers[0].send({"message": {"say": "what is never read"}})
    first.__exit__(None, None, None)
    again, other = join(1), join(2)
    for rendezvous, say in ((again, "one"), (other, "two")):
        rendezvous._peers[0].send({"message": {"say": say}})
    thread.join(240)
    assert ends == [["zero", "one", "two"]]
    for rendezvous in (again, other):
        rendezvous.__exit__(None, None, None)


def test_silent_strangers_do_not_keep_a_node_waiting():
    thread, port, ends = host(2)
    silent = [knock(port) for _ in range(3)]
    with Rendezvous(Scale(1, 2, 1, "127.0.0.1", port), timeout_s=4) as rendezvous:
        assert tell("one")(rendezvous) == ["zero", "one"]
    thread.join(240)
    for each in silent:
        each.close()
    assert ends == [["zero", "one"]]


@pytest.mark.parametrize("address", ["127.0.0.2", "localhost"])
def test_nodes_of_one_machine_meet_at_any_of_its_own_addresses(address: str):
    assert meet(tell("zero"), tell("one"), address=address) == [["zero", "one"]] * 2
