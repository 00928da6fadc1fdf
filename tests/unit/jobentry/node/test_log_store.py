"""The stored log of a node: real files, a store that fails, and size limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobentry import log
from jobentry.contract import stored_log
from jobentry.contract.stored_log import Chunk
from jobentry.node.log_store import MAX_WAITING_CHUNKS, LogStore

LINES = [b"[0] line %d %d\n" % (n, random.Random(n).getrandbits(256)) for n in range(3000)]


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A function that starts a log store, which is finished after the test."""
    started: list[LogStore] = []

    def start(**options: Any) -> LogStore:
        log_store = LogStore(f"file://{tmp_path}/record", 3, **options)
        started.append(log_store)
        log_store.start()
        return log_store

    yield start
    for each in started:
        each.finish()
        each.join(60.0)
    log.copy_log(None)


def chunks(folder: Path) -> list[tuple[Chunk, bytes]]:
    """Return the stored chunks with their text."""
    stored = []
    for path in sorted((folder / "record").glob("*.gz")):
        chunk = stored_log.read_name(path.name)
        assert chunk is not None
        stored.append((chunk, b"".join(stored_log.unpack(path.read_bytes()))))
    return stored


def text(folder: Path) -> bytes:
    return b"".join(data for _, data in chunks(folder))


def test_the_log_is_stored_in_chunks_of_one_size(store: Any, tmp_path: Path):
    log_store = store(chunk_bytes=20_000)
    for line in LINES:
        log_store.add(line)
    log_store.finish()
    log_store.join(60.0)

    assert text(tmp_path) == b"".join(LINES)
    stored = [chunk for chunk, _ in chunks(tmp_path)]
    assert [chunk.number for chunk in stored] == list(range(len(stored)))
    assert {chunk.node for chunk in stored} == {3}
    sizes = [path.stat().st_size for path in (tmp_path / "record").glob("*.gz")]
    assert len(sizes) > 3
    assert max(sizes) < 90_000


def test_a_node_that_is_killed_has_stored_its_log_so_far(
    store: Any, tmp_path: Path, until: Callable[..., None]
):
    log_store = store(period_s=0.01)
    log_store.add(LINES[0])
    until(lambda: text(tmp_path) == LINES[0])
    log_store.add(LINES[1])
    until(lambda: text(tmp_path) == LINES[0] + LINES[1])

    assert [chunk.number for chunk, _ in chunks(tmp_path)] == [0]


def test_messages_journal_and_ranks_are_stored_as_they_were_written(
    store: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    log_store = store()
    log.log_message("a message")
    log.write_journal(b"jobentry# {}\n")
    (tmp_path / "rank-1.log").write_bytes(b"hello\n")
    relay = log.Relay(str(tmp_path))
    relay.add(1)
    relay.start()
    relay.finish()
    log_store.finish()
    log_store.join(60.0)

    printed = capfd.readouterr()
    assert sorted(text(tmp_path).splitlines()) == sorted(
        (printed.out + printed.err).encode().splitlines()
    )
    assert text(tmp_path).count(b"\n") == 3


def test_a_log_without_end_keeps_its_beginning_and_its_end(
    store: Any, tmp_path: Path, until: Callable[..., None]
):
    log_store = store(chunk_bytes=1, max_chunks=6)
    for number, line in enumerate(LINES[:20]):
        log_store.add(line)
        until(lambda number=number: list((tmp_path / "record").glob("*-%06d.gz" % number)))
    log_store.finish()
    log_store.join(60.0)

    assert [chunk.number for chunk, _ in chunks(tmp_path)] == [0, 1, 2, 17, 18, 19]


def test_a_store_that_fails_costs_one_warning_and_bounded_memory(
    store: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], until: Callable[..., None]
):
    """Once the store works again, it receives the end of the log."""
    (tmp_path / "record").write_text("not a folder")
    log_store = store(chunk_bytes=1, period_s=0.01)
    for line in LINES[: 3 * MAX_WAITING_CHUNKS]:
        log_store.add(line)
    until(lambda: log_store._has_failed)
    (tmp_path / "record").unlink()
    log_store.add(LINES[-1])
    log_store.finish()
    log_store.join(60.0)

    assert capfd.readouterr().err.count("storing the log: ") == 1
    stored = chunks(tmp_path)
    # One more chunk was being written when the store began to work.
    assert len(stored) <= MAX_WAITING_CHUNKS + 1
    # The warning is also logged, perhaps after that line.
    assert LINES[-1] in [data for _, data in stored[-2:]]


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x1f\x8b\x08\0", bytes(range(256))])
def test_a_damaged_chunk_ends_where_it_is_damaged(junk: bytes):
    packer = stored_log.compressor()
    data = packer.compress(b"hello\n") + packer.flush()

    assert list(stored_log.unpack(junk)) in ([], [b""])
    assert b"hello\n".startswith(b"".join(stored_log.unpack(data[:-8] + junk)))
    assert b"".join(stored_log.unpack(data + junk)) == b"hello\n"


@pytest.mark.parametrize("name", ["exit.json", "log-.gz", "log-1-2-3.gz", "journal-0.jsonl.gz"])
def test_objects_with_other_names_are_not_chunks(name: str):
    assert stored_log.read_name(name) is None
    assert stored_log.read_name(Chunk(1, 2, 3).name) == Chunk(1, 2, 3)
