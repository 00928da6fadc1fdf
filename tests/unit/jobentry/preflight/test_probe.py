"""The probe on the loopback, and what each kind of failure looks like."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from jobentry.contract.preflight import Endpoint, Reach
from jobentry.control.handshake import listen
from jobentry.preflight import probe
from jobentry.preflight.probe import Server, Target, greeting, reach, transfer
from tests.support.polling import poll

KEY = b"key of the job"
# Long, for a busy machine; only what does not answer takes it.
LIMIT_S = 30.0
SHORT_S = 0.3


@pytest.fixture
def server() -> Iterator[Server]:
    """The probe of node 1 on the loopback."""
    server = Server(KEY, 1, listen(0, "127.0.0.1"))
    yield server
    server.close()


def at(port: int, address: str = "127.0.0.1", node: int = 1) -> Target:
    return Target(node, 0, Endpoint("lo", address, port))


def outcome(target: Target, limit_s: float = LIMIT_S, addresses: tuple[str, ...] = ()) -> Reach:
    (result,) = reach([target], KEY, 0, addresses, limit_s)
    assert (result.to, result.endpoint) == (target.node, target.number)
    return result.reach


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nothing listens, and that no other program gets."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_node_is_reached_and_its_round_trip_is_measured(server: Server):
    (result,) = reach([at(server.port)], KEY, 0, (), LIMIT_S)

    assert result.reach is Reach.WORKS
    assert result.round_trip_us > 0


def test_many_nodes_are_reached_at_once(server: Server):
    results = reach([at(server.port)] * 100, KEY, 0, (), LIMIT_S)

    assert {result.reach for result in results} == {Reach.WORKS}


def test_a_refused_connection_is_told_from_one_that_leads_back(closed_port: int):
    assert outcome(at(closed_port)) is Reach.REFUSED
    assert outcome(at(closed_port), addresses=("127.0.0.1",)) is Reach.ITSELF


def test_an_address_at_which_another_node_answers_is_not_that_node(server: Server):
    assert outcome(at(server.port, node=2)) is Reach.ITSELF


@pytest.mark.parametrize("address", ["", "no address", "256.1.1.1", "::ffff:999"])
def test_an_endpoint_that_is_no_address_cannot_be_reached(address: str):
    assert outcome(at(1, address)) in (Reach.NO_ROUTE, Reach.SILENT, Reach.REFUSED)


def test_a_port_that_is_none_cannot_be_reached():
    assert outcome(at(70_000)).is_broken


def test_a_node_that_is_too_busy_to_answer_counts_as_slow_and_not_as_broken():
    """Its kernel accepts and acknowledges, its program does nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        port = listening.getsockname()[1]

        assert outcome(at(port), SHORT_S) is Reach.SLOW


def test_a_node_that_closes_the_connection_counts_as_slow():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)

        def close_one() -> None:
            listening.accept()[0].close()

        thread = threading.Thread(target=close_one)
        thread.start()
        assert outcome(at(listening.getsockname()[1])) is Reach.SLOW
        thread.join()


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        greeting(b"another key", 0, 1),
        greeting(KEY, 0, 1).replace(b" 0 ", b" 2 "),
        b"cloudjob-preflight " + b"9" * 60 + b" 1 x\n",
        b"x" * 4096,
        b"\n",
    ],
)
def test_a_stranger_gets_no_answer(server: Server, line: bytes):
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        try:
            answer = stranger.recv(100)
        except ConnectionResetError:
            answer = b""

    assert answer == b""
    assert outcome(at(server.port)) is Reach.WORKS


def test_connections_beyond_a_limit_are_closed(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "_MAX_CONNECTIONS", 2)
    held = [socket.create_connection(("127.0.0.1", server.port), LIMIT_S) for _ in range(2)]
    try:
        poll(lambda: len(server._connections) == 2, "two connections", LIMIT_S)

        assert outcome(at(server.port)) is Reach.SLOW
    finally:
        for each in held:
            each.close()
    poll(lambda: not server._connections, "no connection", LIMIT_S)
    assert outcome(at(server.port)) is Reach.WORKS


def test_a_connection_that_stays_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "_MAX_S", 0.1)
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as idle:
        assert idle.recv(1) == b""


def test_a_closed_probe_refuses_connections():
    server = Server(KEY, 1, listen(0, "127.0.0.1"))
    server.close()

    assert outcome(at(server.port)) is Reach.REFUSED


def test_a_transfer_is_measured(server: Server):
    assert transfer(at(server.port), KEY, 0, 0.1) > 0


def test_a_transfer_that_fails_has_no_speed(server: Server, closed_port: int):
    assert transfer(at(server.port, node=2), KEY, 0, 0.1) == 0
    assert transfer(at(closed_port), KEY, 0, 0.1) == 0
