"""The relay: real logs, real threads, and a stream that keeps every byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from jobentry.contract import lines
from jobentry.log import Relay, last_lines, log_message, pause_s


class Stream:
    """A relay that writes to a file, and the content of that file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "stream"
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.relay = Relay(str(folder), self.descriptor)
        self.relay.start()

    @property
    def text(self) -> bytes:
        return self.path.read_bytes()

    def log(self, rank: int) -> Path:
        return self.folder / ("rank-%d.log" % rank)

    def append(self, rank: int, data: bytes) -> None:
        with self.log(rank).open("ab") as file:
            file.write(data)

    def read(self) -> dict[int, bytes]:
        """Return every rank's bytes."""
        read: dict[int, bytes] = {}
        for line in self.text.split(b"\n")[:-1]:
            rank, data = lines.read(line + b"\n")
            assert rank is not None
            read[rank] = read.get(rank, b"") + data
        return read


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """A running relay."""
    stream = Stream(tmp_path)
    yield stream
    os.close(stream.descriptor)


def test_quiet_logs_are_looked_at_less_often():
    assert [pause_s(quiet_s) for quiet_s in (0.0, 0.9, 3.0, 3600.0)] == [0.01, 0.01, 0.03, 0.05]


def test_the_first_output_is_noted_once_and_before_it_is_written(
    stream: Stream, until: Callable[..., None]
):
    written: list[bytes] = []
    stream.relay.on_output = lambda: written.append(stream.text)
    stream.relay.add(0)
    stream.append(0, b"hello\n")
    until(lambda: stream.text == b"[0] hello\n")
    stream.append(0, b"world\n")
    until(lambda: stream.text.endswith(b"[0] world\n"))

    assert written == [b""]


def test_a_line_is_shown_at_once(stream: Stream, until: Callable[..., None]):
    stream.relay.add(0)
    stream.append(0, b"hello\nwor")
    until(lambda: stream.text.startswith(b"[0] hello\n"))
    stream.append(0, b"ld\n")
    stream.relay.finish()

    assert stream.read() == {0: b"hello\nworld\n"}


def test_a_progress_bar_is_shown_before_its_line_ends(stream: Stream, until: Callable[..., None]):
    stream.relay.add(3)
    stream.append(3, b"\r 10 %")
    until(lambda: stream.text == b"[3]+ \r 10 %\n")
    stream.append(3, b"\r 20 %\r 30 %")
    until(lambda: stream.text == b"[3]+ \r 10 %\n[3]+ \r 20 %\r 30 %\n")
    stream.append(3, b"\r done\nnext\n")
    stream.relay.finish()

    assert stream.text == (b"[3]+ \r 10 %\n[3]+ \r 20 %\r 30 %\n[3] \r done\n[3] next\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"no newline",
        b"\xff\xfe\x00 [1] not utf-8\n\xc3",
        b"windows\r\nlines\r\n",
        b"x" * 1_000_000 + b"\n" + b"y" * 1_000_000 + b"\nz",
        b"x" * 5_000_000,
        b"\n" * 300_000,
    ],
    ids=["nothing", "newline", "no newline", "bytes", "crlf", "long", "longer", "many"],
)
def test_a_log_is_copied_exactly(stream: Stream, data: bytes):
    stream.append(1, data)
    stream.relay.add(1)
    stream.relay.finish()

    assert stream.read().get(1, b"") == data


def test_a_very_long_line_is_copied_exactly(stream: Stream):
    data = b"x" * 40_000_000 + b"\nend\n"
    stream.append(1, data)
    stream.relay.add(1)
    stream.relay.finish()

    assert stream.read() == {1: data}
    assert stream.text.count(b"\n") > 2


def test_lines_of_many_ranks_are_never_mixed(stream: Stream):
    """Eight ranks write at the same time, in pieces that do not end at line breaks."""
    written = {
        rank: b"".join(b"rank %d line %d\n" % (rank, line) for line in range(2000))
        for rank in range(8)
    }

    def write(rank: int) -> None:
        for start in range(0, len(written[rank]), 999):
            stream.append(rank, written[rank][start : start + 999])

    threads = [threading.Thread(target=write, args=(rank,)) for rank in written]
    for rank, thread in enumerate(threads):
        stream.relay.add(rank)
        thread.start()
    for thread in threads:
        thread.join()
    stream.relay.finish()

    assert stream.read() == written


def test_a_deleted_log_is_shown_to_its_end(stream: Stream, until: Callable[..., None]):
    with stream.log(0).open("wb", buffering=0) as log:
        log.write(b"before\n")
        stream.relay.add(0)
        until(lambda: stream.text == b"[0] before\n")
        stream.log(0).unlink()
        log.write(b"after\n")
        stream.relay.finish()

    assert stream.read() == {0: b"before\nafter\n"}


def test_a_missing_log_is_ignored(stream: Stream):
    stream.relay.add(0)
    stream.relay.finish()

    assert stream.text == b""


def test_a_rank_that_starts_twice_is_shown_once(stream: Stream):
    """The relay follows the log from its beginning, and only once."""
    stream.append(0, b"a\n")
    stream.relay.add(0)
    stream.relay.add(0)
    stream.relay.finish()

    assert stream.text == b"[0] a\n"


def test_a_closed_stdout_does_not_end_the_job(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    relay = Relay(str(tmp_path), writing)
    (tmp_path / "rank-0.log").write_bytes(b"a\n" * 1000)
    relay.start()
    relay.add(0)
    relay.finish()
    os.close(writing)


def test_a_log_goes_on_when_its_disk_has_space_again(stream: Stream, until: Callable[..., None]):
    full = os.open("/dev/full", os.O_WRONLY)
    kept = os.dup(stream.descriptor)
    stream.relay.add(0)
    stream.append(0, b"before\n")
    until(lambda: stream.text == b"[0] before\n")
    os.dup2(full, stream.descriptor)
    stream.append(0, b"lost\n")
    until(lambda: stream.relay.missing_bytes > 0)
    os.dup2(kept, stream.descriptor)
    stream.append(0, b"after\n")
    stream.relay.finish()
    os.close(full)
    os.close(kept)

    gap = b"\njobentry: 9 B of output are missing here: No space left on device\n"
    assert stream.text == b"[0] before\n" + gap + b"[0] after\n"


def test_messages_of_the_entry_have_a_prefix(capfd: pytest.CaptureFixture[str]):
    log_message("one\ntwo")

    assert capfd.readouterr().err == "jobentry: one\n          two\n"


def test_the_last_lines_show_the_last_state_of_a_progress_bar(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n 1 %\r 2 %\r\nbad \xff\n\nlast\n")

    assert last_lines(str(log)) == ["first", " 2 %", "bad \ufffd", "", "last"]
    assert last_lines(str(log), count=2) == ["", "last"]


def test_only_the_end_of_a_long_log_is_read_for_its_last_lines(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        # 1 TiB does not fit into memory; on disk it is a sparse file.
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast")

    last = last_lines(str(log))

    assert (last[-1], len(last)) == ("last", 2)


def test_a_missing_log_has_no_last_lines(tmp_path: Path):
    (tmp_path / "empty").touch()

    assert last_lines(str(tmp_path / "none")) == []
    assert last_lines(str(tmp_path / "empty")) == []
