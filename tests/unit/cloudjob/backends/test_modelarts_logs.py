"""Tests of logs that are read through a window on their end: no line is lost or repeated."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudjob.backends.modelarts import logs as following
from cloudjob.backends.modelarts.client import ModelArtsClient
from cloudjob.backends.modelarts.logs import Stitcher, Window
from cloudjob.backends.modelarts.site import Site
from tests.support.modelarts import KEYS, PROJECT, ModelArts, Reply, once


def window(log: bytes, size_bytes: int) -> Window:
    """Return the end of a log as the service shows it, with U+FFFD for broken characters."""
    part = log[-size_bytes:]
    return Window(part.decode("utf-8", "replace"), len(part), len(log))


def joined(log: bytes, sizes: list[int], size_bytes: int) -> tuple[bytes, int]:
    """Follow a log that grows to each of ``ends``; return its lines and the number of gaps."""
    stitcher, got, gaps = Stitcher(), b"", 0
    for end in [*sizes, len(log)]:
        piece = stitcher.add(window(log[:end], size_bytes))
        if piece is None:
            gaps += 1
            # The exported log has the lines that the window has dropped.
            piece = stitcher.give(log[stitcher.seen_bytes : end])
        got += piece
    piece = stitcher.add(window(log, size_bytes), is_last=True)
    if piece is None:
        piece = stitcher.give(log[stitcher.seen_bytes :], is_last=True)
    return got + piece, gaps


def ended(log: bytes) -> bytes:
    """Return a log as it is shown, with a newline after its last line."""
    return log + b"\n" if log and not log.endswith(b"\n") else log


texts = st.lists(
    st.sampled_from(
        [b"a", b"b", b"same line\n", b"\n", "ü".encode(), "日本".encode(), b"\r", b" 1\n"]
    )
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=5).map(str.encode),
    max_size=40,
).map(b"".join)
invalid_utf8_logs = st.lists(
    st.lists(st.sampled_from([b"\xff", b"\xc3", b"\xe6\x97", b"a", "日".encode()]), max_size=6),
    max_size=20,
).map(lambda lines: b"".join(b"%d:%s\n" % (n, b"".join(line)) for n, line in enumerate(lines)))


@given(texts, st.lists(st.integers(0, 300), max_size=8), st.integers(1, 200))
@example(b"x\n" * 100, [10, 20, 30, 100], 25)
@example("日本\n".encode() * 30, [9, 50, 61, 80], 41)
@example(b"no end", [1, 2, 3], 4)
def test_every_line_comes_once_and_in_order(log: bytes, sizes: list[int], size_bytes: int):
    sizes = sorted(min(end, len(log)) for end in sizes)
    got, _ = joined(log, sizes, size_bytes)

    assert got == ended(log)


@given(invalid_utf8_logs, st.lists(st.integers(0, 300), max_size=8), st.integers(20, 200))
def test_bytes_that_are_not_utf8_lose_and_repeat_no_line(
    log: bytes, sizes: list[int], size_bytes: int
):
    """Such bytes become U+FFFD, as the service decodes them; other lines are unchanged."""
    log = ended(log)
    sizes = sorted(min(end, len(log)) for end in sizes)
    got, _ = joined(log, sizes, size_bytes)

    assert got.count(b"\n") == log.count(b"\n")
    assert got.decode("utf-8", "replace") == log.decode("utf-8", "replace")


@given(texts, st.lists(st.integers(0, 300), max_size=8), st.integers(1, 200))
def test_every_line_comes_once_when_less_is_remembered_than_the_window_shows(
    log: bytes, sizes: list[int], size_bytes: int
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "_KEPT", 10)
        got, _ = joined(log, sorted(min(end, len(log)) for end in sizes), size_bytes)

    assert got == ended(log)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_the_exported_log_is_not_read_while_the_window_has_all_new_lines(grown: list[int]):
    """The exported log is only for lines older than the window."""
    log = b"".join(b"line %d\n" % number for number in range(400))
    sizes, at = [], 0
    for count in grown:
        at += count
        sizes.append(min(at, len(log)))
    log = log[: sizes[-1]]

    assert joined(log, sizes, 100) == (ended(log), 0)


def test_a_line_is_held_back_until_it_is_complete():
    """A partial line may end within a character, and cloudjob's markers are at line starts."""
    stitcher = Stitcher()

    assert stitcher.add(window(b"one\ntw", 99)) == b"one\n"
    assert stitcher.add(window(b"one\ntwo", 99)) == b""
    assert stitcher.add(window(b"one\ntwo\n", 99)) == b"two\n"


def test_a_rescheduled_node_starts_a_new_log():
    """The log is then shorter than what was read before."""
    stitcher = Stitcher()
    stitcher.add(window(b"first\nattempt\n", 99))

    assert stitcher.add(window(b"again\n", 99)) == b"again\n"


def test_the_stitcher_skips_lines_that_the_window_has_dropped():
    stitcher = Stitcher()
    stitcher.add(window(b"0123\n", 5))

    assert stitcher.add(window(b"0123\n" * 4, 5)) is None
    assert stitcher.skip(window(b"0123\n" * 4, 5)) == 10
    assert stitcher.add(window(b"0123\n" * 5, 10)) == b"0123\n" * 2


# -- with a real server ---------------------------------------------------------------------------


@pytest.fixture
def service(service: ModelArts) -> ModelArts:
    """A service that shows only the last 200 bytes of a log."""
    service.configure(log_preview_bytes=200)
    return service


def client_of(service: ModelArts) -> ModelArtsClient:
    """Return a client of the service."""
    return ModelArtsClient(Site(service.endpoint, service.endpoint, "cn-north-4", PROJECT, KEYS))


def test_the_logs_of_all_nodes_are_followed_to_their_end(service: ModelArts):
    """Both logs grow between requests, and must be complete once the job has ended."""
    logs = [b"".join(b"node %d line %d\n" % (n, i) for i in range(200)) for n in (0, 1)]
    logs[1] += b"no end"
    job = service.add("train", nodes=2)
    steps = [0]

    def grow(_s: float) -> None:
        steps[0] += 1
        for node, log in enumerate(logs):
            # At step 6 the log grows by 550 bytes, more than the window holds.
            end = min(len(log), 150 * steps[0] + (400 if steps[0] > 5 else 0))
            service.write_log(job, node, log[:end])
        if steps[0] == 30:
            service.end(job)

    got = [b"", b""]
    for node, data in following.follow(
        client_of(service), job, None, is_live=True, poll_s=0.01, pause=grow
    ):
        assert data == b"" or data.endswith(b"\n")
        got[node] += data

    assert got == [logs[0], logs[1] + b"\n"]


def test_the_logs_of_a_large_job_are_polled_in_turns_and_no_line_is_lost(service: ModelArts):
    """The head's log is polled each time, the others in turn, and all after the job's end."""
    nodes, rounds = 70, 3
    job = service.add("train", nodes=nodes)
    logs = [b"".join(b"node %d line %d\n" % (n, i) for i in range(12)) for n in range(nodes)]
    requested_nodes: list[set[str]] = []

    def grow(_s: float) -> None:
        requested_nodes.append(
            {seen.path.split("/")[-3] for seen in service.requests_with("/logs/preview")}
        )
        service.seen.clear()
        for node, log in enumerate(logs):
            end = len(log) * len(requested_nodes) // rounds
            service.write_log(job, node, log[:end])
        if len(requested_nodes) == rounds:
            service.end(job)

    got = [b""] * nodes
    for node, data in following.follow(
        client_of(service), job, None, is_live=True, poll_s=0.01, pause=grow
    ):
        got[node] += data

    assert got == logs
    running = requested_nodes[:rounds]
    assert [len(names) for names in running] == [64] * rounds
    assert all("worker-0" in names for names in running)
    assert len(set().union(*running)) == nodes


def test_polling_some_nodes_does_not_end_the_logs_of_the_others(service: ModelArts):
    """The last line of a node that was not polled may still grow."""
    job = service.add("train", nodes=80)
    steps = [0]

    def grow(_s: float) -> None:
        steps[0] += 1
        if steps[0] == 4:
            service.write_log(job, 75, b"half")
            service.end(job)
        if steps[0] == 5:
            service.write_log(job, 75, b"half of it\n")

    pieces = following.follow(client_of(service), job, None, is_live=True, poll_s=0.01, pause=grow)

    assert [piece for piece in pieces if piece[1]] == [(75, b"half of it\n")]


def test_the_log_of_one_node_is_requested_alone(service: ModelArts):
    job = service.add("train", nodes=2)
    service.write_log(job, 1, b"one\ntw")
    pieces = following.follow(
        client_of(service), job, 1, is_live=False, poll_s=0.01, pause=lambda _: None
    )

    assert [piece for piece in pieces if piece[1]] == [(1, b"one\n"), (1, b"two\n"[:2] + b"\n")]
    assert not service.requests_with("worker-0/logs")


def test_a_missing_log_is_not_an_error(service: ModelArts):
    """The service answers 204 until the node runs."""
    job = service.add("train")

    assert (
        list(
            following.follow(
                client_of(service), job, None, is_live=False, poll_s=0.01, pause=lambda _: 0
            )
        )
        == []
    )


def test_lost_lines_are_reported(service: ModelArts):
    """The lines are older than the window, and the log was not exported."""
    job = service.add("train", phase="Completed")
    log = b"".join(b"line %d\n" % number for number in range(100))
    service.write_log(job, 0, log)
    service.faults.append(once("logs/url", Reply(204), times=99))
    got = b"".join(
        data
        for _, data in following.follow(
            client_of(service), job, None, is_live=True, poll_s=0.01, pause=lambda _: None
        )
    )

    assert got.startswith(b"cloudjob: 590 bytes of this log are missing")
    assert got.endswith(log[-180:])
