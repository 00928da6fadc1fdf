"""The pipes of ranks: what is written to them is in the log, whatever happens to it there."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Callable

import pytest

from jobentry.contract import lines
from jobentry.log import Relay
from jobentry.node.rank_output import RankOutput


class Ranks:
    """The outputs of some ranks, and the stream to which they are copied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stream = os.open(folder / "stream", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.relay = Relay(str(folder), self._stream)
        self.relay.start()
        self.output = RankOutput(str(folder), self.relay)

    def open(self, rank: int) -> int:
        """Open the output of a rank as its wrapper does."""
        path = self.folder / f"output-{rank}"
        os.mkfifo(path)
        taking = threading.Thread(target=self.output.take, args=(rank, str(path)))
        self.relay.add(rank)
        taking.start()
        end = os.open(path, os.O_WRONLY)
        taking.join()
        path.unlink()
        return end

    def log(self, rank: int) -> bytes:
        return (self.folder / ("rank-%d.log" % rank)).read_bytes()

    def finish(self) -> dict[int, bytes]:
        """Return the bytes of each rank in the stream."""
        self.output.finish()
        self.relay.finish()
        os.close(self._stream)
        read: dict[int, list[bytes]] = {}
        for line in (self.folder / "stream").read_bytes().split(b"\n")[:-1]:
            rank, data = lines.read(line + b"\n")
            assert rank is not None
            read.setdefault(rank, []).append(data)
        return {rank: b"".join(parts) for rank, parts in read.items()}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """No ranks yet."""
    return Ranks(tmp_path)


def test_output_is_in_the_log_once_it_is_settled(ranks: Ranks):
    end = ranks.open(3)
    os.write(end, b"one\ntwo")
    ranks.output.settle(3)

    assert ranks.log(3) == b"one\ntwo"
    os.close(end)
    ranks.finish()


def test_output_that_processes_write_after_their_rank_is_kept(
    ranks: Ranks, until: Callable[..., None]
):
    """A daemon keeps the output open."""
    end = ranks.open(0)
    ranks.output.settle(0)
    os.write(end, b"daemon\n")
    until(lambda: ranks.log(0) == b"daemon\n")
    os.close(end)

    assert ranks.finish() == {0: b"daemon\n"}


def test_much_output_of_several_ranks_is_complete(ranks: Ranks):
    text = "import sys; sys.stdout.write(''.join('%s %d\\n' % (sys.argv[1], i) for i in range({})))"
    count = 200_000
    processes = []
    for rank in range(3):
        end = ranks.open(rank)
        argv = [sys.executable, "-c", text.format(count), str(rank)]
        processes.append(subprocess.Popen(argv, stdout=end))
        os.close(end)
    for process in processes:
        assert process.wait(60) == 0

    streamed = ranks.finish()

    for rank in range(3):
        expected = b"".join(b"%d %d\n" % (rank, index) for index in range(count))
        assert ranks.log(rank) == expected
        assert streamed[rank] == expected


def test_a_rank_that_starts_again_continues_its_log(ranks: Ranks):
    for text in (b"first\n", b"second\n"):
        end = ranks.open(0)
        os.write(end, text)
        os.close(end)
        ranks.output.settle(0)

    assert ranks.finish() == {0: b"first\nsecond\n"}


def test_output_that_does_not_fit_on_the_disk_is_still_shown(tmp_path: Path):
    """The limit on the size of files stands for a full disk; both are an error of write(2)."""
    text = """
import os, resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tests.jobs.entry.test_rank_output import Ranks
ranks = Ranks(Path(sys.argv[1]))
# The stream must not be limited.
os.dup2(1, ranks.relay._descriptor)
end = ranks.open(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
for number in range(20_000):
    os.write(end, b"line %d\\n" % number)
os.close(end)
ranks.output.finish()
ranks.relay.finish()
"""
    root = Path(__file__).parents[3]
    argv = [sys.executable, "-c", text, str(tmp_path), str(root), *sys.path]
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=180, check=True)

    assert done.stdout == b"".join(b"[0] line %d\n" % number for number in range(20_000))
    assert (tmp_path / "rank-0.log").stat().st_size == 10_000


def test_a_rank_that_starts_when_the_node_has_finished_ends_nothing(ranks: Ranks):
    """A job that fails at its start may end before mpirun has started the last rank."""
    ranks.finish()
    path = ranks.folder / "output-1"
    os.mkfifo(path)

    ranks.output.take(1, str(path))

    assert not (ranks.folder / "rank-1.log").exists()


def test_only_a_fifo_is_taken(ranks: Ranks):
    """Scripts can write to the FIFO of reports as well."""
    (ranks.folder / "file").write_text("x")
    os.mkfifo(ranks.folder / "fifo")
    (ranks.folder / "link").symlink_to("fifo")

    for name in ("missing", "file", "link", "."):
        ranks.output.take(0, str(ranks.folder / name))

    assert ranks.finish() == {}
    assert not (ranks.folder / "rank-0.log").exists()


def test_without_free_descriptors_the_output_is_not_taken(ranks: Ranks):
    path = ranks.folder / "output-0"
    os.mkfifo(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ranks.output.take(0, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ranks.finish()
