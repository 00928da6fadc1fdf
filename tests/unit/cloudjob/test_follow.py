"""Every follower of logs yields each line once and complete."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends import follow
from cloudjob.backends.follow import NOTHING_NEW, Lines, Piece, Streams
from cloudjob.errors import Unreachable


@given(st.binary(max_size=200).map(lambda data: data.replace(b"a", b"\n")), st.integers(1, 20))
def test_lines_are_whole_and_complete_however_they_were_read(data: bytes, step: int):
    lines = Lines()

    got = [lines.feed(data[at : at + step]) for at in range(0, len(data), step)]
    rest = lines.finish()

    assert all(piece.endswith(b"\n") for piece in [*got, rest] if piece)
    ended = data if data.endswith(b"\n") or not data else data + b"\n"
    assert b"".join(got) + rest == ended


@pytest.mark.parametrize("end", [b"", b"cut"])
@pytest.mark.parametrize("count", [0, 1, 9, 10, 15, 20, 21, 100])
def test_both_ends_of_a_long_file_are_read_in_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, end: bytes
):
    monkeypatch.setattr(follow, "END_BYTES", 55)
    lines = [b"%04d\n" % number for number in range(count)]
    path = tmp_path / "node-0.log"
    path.write_bytes(b"".join(lines) + end)

    content = b"".join(follow.read_ends(path)).splitlines(keepends=True)

    assert content == (lines if count <= 20 else [*lines[:11], *lines[-10:]])
    assert not list(follow.read_ends(tmp_path / "missing"))


def test_lines_written_just_before_the_end_are_read():
    """A job may write more between the last read and the check whether it has ended."""
    written = [b"one\ntw"]
    has_written: list[bool] = []
    has_ended = chain([False, False], repeat(True))

    def read() -> Iterator[Piece]:
        while written:
            yield 0, written.pop()

    def check_end() -> bool:
        if (ended := next(has_ended)) and not has_written:
            has_written.append(True)
            written.append(b"o\nlast")
        return ended

    pieces = follow.poll(read, check_end, follow=True, pause_s=(0, 0), pause=lambda _: None)

    assert [piece for piece in pieces if piece != NOTHING_NEW] == [
        (0, b"one\n"),
        (0, b"two\n"),
        (0, b"last\n"),
    ]


def test_following_continues_when_a_platform_does_not_answer_for_a_while():
    results = iter([[(0, b"one\n")], Unreachable("asking: no answer"), [(0, b"two\n")], []])

    def read() -> Iterator[Piece]:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        yield from result

    pieces = follow.poll(read, lambda: True, follow=True, pause_s=(0, 0))
    single_read = follow.poll(
        lambda: raise_in_iterator(Unreachable("asking: no answer")),
        bool,
        follow=False,
        pause_s=(0, 0),
    )

    assert list(pieces) == [(0, b"one\n"), (0, b"two\n")]
    with pytest.raises(Unreachable):
        list(single_read)


def raise_in_iterator(error: Exception) -> Iterator[Piece]:
    raise error
    yield


def test_a_log_is_polled_less_often_while_nothing_is_written():
    pauses: list[float] = []
    reads = itertools.count()

    def read() -> Iterator[Piece]:
        if next(reads) == 20:
            yield 0, b"x\n"

    def check_end() -> bool:
        return len(pauses) >= 22

    list(follow.poll(read, check_end, follow=True, pause_s=(1.0, 2.0), pause=pauses.append))

    assert pauses[:3] == [pytest.approx(1.2), pytest.approx(1.44), pytest.approx(1.728)]
    assert pauses[4:20] == [2.0] * 16
    assert pauses[20] == pytest.approx(1.2)


def test_streams_pass_on_everything_and_then_end():
    streams = Streams()
    for node in range(3):
        streams.add(lambda node=node: ((node, b"%d\n" % line) for line in range(200)))  # type: ignore[misc]

    lines_of: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    while not streams.has_ended:
        node, data = streams.next()
        if data:
            lines_of[node].append(data)

    assert lines_of == {node: [b"%d\n" % line for line in range(200)] for node in range(3)}


def test_an_error_of_a_stream_is_raised_after_its_lines():
    streams = Streams()

    def read() -> Iterator[Piece]:
        yield 0, b"a line\n"
        raise ZeroDivisionError

    streams.add(read)

    assert streams.next() == (0, b"a line\n")
    with pytest.raises(ZeroDivisionError):
        streams.next()


def test_the_threads_end_when_the_reader_stops():
    streams = Streams()
    before = threading.active_count()
    streams.add(lambda: ((0, b"x\n") for _ in itertools.count()))
    streams.next()

    streams.stop()

    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
