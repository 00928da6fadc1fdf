"""The control connection: signatures, message numbers, and broken connections."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.control import transport
from jobentry.control.loop import Lines
from jobentry.control.transport import Channel, ControlError, Link, Message, Stream

KEY = transport.secret(b"-----BEGIN-----\nsecret of the job\n")
JSON = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(), max_size=3)


@given(
    st.text(),
    st.dictionaries(st.text().filter(lambda name: name not in ("word", "kind", "values")), JSON),
)
def test_a_message_is_read_as_it_was_written(kind: str, values: dict[str, object]):
    line = transport.dump(kind, **values)

    assert line.count(b"\n") == 1
    assert transport.load(line) == Message(kind, values)


@given(st.lists(st.binary(max_size=5).map(lambda line: line.replace(b"\n", b""))), st.data())
def test_lines_are_reassembled_however_the_stream_is_split(lines: list[bytes], data: st.DataObject):
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    together = Lines()
    complete: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)]):
        complete += together.feed(stream[start:end])

    assert complete == lines
    assert together.feed(b"\n") == [b"rest"]


def channels() -> tuple[Channel, Channel]:
    """Return both ends of a connection."""
    return Channel(KEY, "head", "worker", "transcript"), Channel(
        KEY, "worker", "head", "transcript"
    )


@given(st.lists(st.binary(max_size=50).map(lambda line: line.replace(b"\n", b""))))
def test_a_sealed_line_is_opened_by_the_other_side(lines: list[bytes]):
    head, worker = channels()

    assert [worker.open(head.seal(line)[:-1]) for line in lines] == lines


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda first, second: [second], id="left out"),
        pytest.param(lambda first, second: [first, first], id="repeated"),
        pytest.param(lambda first, second: [first[:-1] + b"x"], id="changed"),
        pytest.param(lambda first, second: [first[32:]], id="unsigned"),
        pytest.param(lambda first, second: [b""], id="nothing"),
    ],
)
def test_a_line_that_was_changed_in_transit_is_refused(
    spoil: Callable[[bytes, bytes], list[bytes]],
):
    head, worker = channels()
    lines = spoil(head.seal(b"one")[:-1], head.seal(b"two")[:-1])

    for line in lines[:-1]:
        worker.open(line)
    with pytest.raises(ControlError):
        worker.open(lines[-1])


def test_a_line_cannot_be_reflected_to_its_sender():
    head, _ = channels()

    with pytest.raises(ControlError):
        head.open(head.seal(b"one")[:-1])


# -- links --------------------------------------------------------------------------------------


def ignore(data: object) -> None:
    """Do nothing."""


class Ends:
    """Both ends of a link in one loop, and the TCP connection between them."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.numbers: dict[str, list[object]] = {"head": [], "worker": []}
        self.breaks: dict[str, list[str]] = {"head": [], "worker": []}
        self.head = self._link("head")
        self.worker = self._link("worker")
        self.sockets: list[socket.socket] = []
        self.connections = 0

    def _link(self, side: str) -> Link:
        return Link(
            lambda message: self.numbers[side].append(message.values["number"]),
            self.breaks[side].append,
        )

    def connect(self) -> None:
        """Connect both ends by a new connection, as their handshake does."""
        self.connections += 1
        transcript = str(self.connections)
        self.sockets = list(socket.socketpair())
        streams = [Stream(self.selector, one, ignore, ignore) for one in self.sockets]
        # Both are read first, as the handshake exchanges the numbers of received messages.
        of_head, of_worker = self.head.received, self.worker.received
        self.head.attach(streams[0], Channel(KEY, "head", "worker", transcript), of_worker)
        self.worker.attach(streams[1], Channel(KEY, "worker", "head", transcript), of_head)

    def cut(self, side: str) -> None:
        """Break the connection; messages in transit are lost."""
        (self.head if side == "head" else self.worker).detach()
        self.step()
        (self.worker if side == "head" else self.head).detach()

    def step(self) -> None:
        """Handle the received messages."""
        if self.selector.get_map():
            for key, _ in self.selector.select(0):
                key.data()

    def until(self, claim: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not claim():
            assert time.monotonic() < deadline, self.numbers
            self.step()

    def close(self) -> None:
        self.head.detach()
        self.worker.detach()
        self.selector.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A link whose ends are not connected yet."""
    ends = Ends()
    yield ends
    ends.close()


def test_messages_wait_for_the_first_connection(ends: Ends):
    ends.worker.send("m", number=1)
    ends.head.send("m", number=2)

    ends.connect()

    ends.until(lambda: ends.numbers == {"head": [1], "worker": [2]})


@given(st.lists(st.sampled_from(["head", "worker", "step", "cut head", "cut worker"]), max_size=60))
def test_every_message_arrives_once_whenever_connections_break(actions: list[str]):
    ends = Ends()
    sent: dict[str, list[object]] = {"head": [], "worker": []}
    try:
        ends.connect()
        for number, action in enumerate(actions):
            if action in sent:
                sent[action].append(number)
                (ends.head if action == "head" else ends.worker).send("m", number=number)
            elif action == "step":
                ends.step()
            else:
                ends.cut(action[4:])
                ends.connect()
        expected = {"head": sent["worker"], "worker": sent["head"]}
        ends.until(lambda: ends.numbers == expected)
        ends.head.beat()
        ends.worker.beat()
        ends.until(lambda: not (ends.head._unacknowledged or ends.worker._unacknowledged))
    finally:
        ends.close()


def test_a_closed_connection_is_reported_to_the_other_side(ends: Ends):
    ends.connect()
    ends.worker.detach()

    ends.until(lambda: ends.breaks["head"] == [transport.Break.CLOSED])
    assert ends.breaks["worker"] == []
    assert not ends.head.is_attached


def test_a_forged_line_breaks_the_connection_and_not_the_link(ends: Ends):
    ends.connect()
    ends.sockets[0].send(b"0" * 32 + b"1 0 {}\n")

    ends.until(lambda: ends.breaks["worker"])
    ends.head.detach()
    ends.connect()
    ends.head.send("m", number=7)

    ends.until(lambda: ends.numbers["worker"] == [7])


def test_both_sides_send_heartbeats_before_they_count_as_silent(ends: Ends):
    ends.connect()
    for _ in range(10):
        ends.head.tick(1.0)
        ends.worker.tick(1.0)
        ends.step()

    assert ends.head.silent_s < transport.SILENT_S / 2
    for _ in range(20):
        ends.head.tick(1.0)
    assert ends.head.silent_s >= transport.SILENT_S
