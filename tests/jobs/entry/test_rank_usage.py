"""Resource usage of ranks: real processes that compute, sleep, start others and exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobentry.contract.journal import RankSample
from jobentry.contract.paths import NodePaths
from jobentry.node.local_ranks import LocalRanks
from jobentry.node.rank_usage import TICK_S, RankProcesses

BUSY = "while True: pass"
QUIET = "import time; time.sleep(600)"
FORKING = (
    "import os, time\nfor _ in range(3):\n    if not os.fork(): time.sleep(600)\ntime.sleep(600)"
)
# A wrapper: its child is the program of the rank.
WRAPPER = "import subprocess, sys; subprocess.call([sys.executable, '-c', sys.argv[1]])"


class Node:
    """A node with ranks; each rank has a process that stands in for its wrapper."""

    def __init__(self, folder: Path, until: Callable[..., None]) -> None:
        self.folder = folder
        self._until = until
        self._wrappers: list[subprocess.Popen[bytes]] = []
        paths = NodePaths(str(folder), str(folder), str(folder), str(folder), str(folder))
        self.ranks = LocalRanks(paths)
        self.processes = RankProcesses(self.ranks, paths)

    def start(self, rank: int, program: str) -> None:
        wrapper = subprocess.Popen([sys.executable, "-c", WRAPPER, program], start_new_session=True)
        self._wrappers.append(wrapper)
        children = Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children")
        self._until(lambda: children.read_text().split())
        child = int(children.read_text().split()[0])
        self._until(lambda: sys.executable.encode() in Path(f"/proc/{child}/cmdline").read_bytes())
        self.ranks.handle_event("start %d %d %d" % (rank, wrapper.pid, child))

    def sample(self) -> dict[int, RankSample]:
        return {sample.rank: sample for sample in self.processes.sample()}

    def close(self) -> None:
        for wrapper in self._wrappers:
            os.killpg(wrapper.pid, 9)
            wrapper.wait()


@pytest.fixture
def node(tmp_path: Path, until: Callable[..., None]) -> Iterator[Node]:
    new_node = Node(tmp_path, until)
    yield new_node
    new_node.close()


def test_a_busy_rank_differs_from_one_that_sleeps(node: Node, until: Callable[..., None]):
    node.start(0, BUSY)
    node.start(1, QUIET)
    until(lambda: node.sample()[0].cpu_percent > 0)
    time.sleep(0.3)
    ranks = node.sample()

    assert ranks[0].cpu_percent > ranks[1].cpu_percent
    assert ranks[0].state == "R"
    assert ranks[1].state == "S"
    assert ranks[1].rss_mib > 0


def test_processes_that_a_rank_starts_count_for_it(node: Node, until: Callable[..., None]):
    node.start(0, QUIET)
    node.start(1, FORKING)
    until(lambda: node.sample()[1].children == 3)
    ranks = node.sample()

    assert (ranks[0].children, ranks[0].threads) == (0, 1)
    assert ranks[1].threads == 4


def test_what_ended_processes_have_used_counts_for_the_rank_that_started_them(
    node: Node, until: Callable[..., None]
):
    """As a compiler's, which may end between two measurements."""
    path = node.folder / "used"
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    node.start(
        0,
        "import os, subprocess, sys, time\n"
        f"subprocess.call([sys.executable, '-c', {burn!r}])\nused = os.times()\n"
        f"with open('{path}.part', 'w') as file:\n"
        "    file.write(str(used.children_user + used.children_system))\n"
        f"os.rename('{path}.part', '{path}')\ntime.sleep(600)",
    )
    until(path.exists)

    used_s = sum(process.ticks for process in node.processes.members()[0].values()) * TICK_S
    assert used_s >= float(path.read_text()) > 0.1
    node.sample()
    time.sleep(0.3)
    assert node.sample()[0].cpu_percent < 20


def test_a_silent_rank_has_been_quiet_since_its_last_output(node: Node):
    node.start(0, QUIET)
    node.start(1, QUIET)
    for rank, age_s in ((0, 0.0), (1, 1000.0)):
        log = node.folder / ("rank-%d.log" % rank)
        log.write_bytes(b"hello\n")
        os.utime(log, (time.time() - age_s, time.time() - age_s))
    ranks = node.sample()

    assert ranks[0].quiet_s < 300
    assert 999 <= ranks[1].quiet_s < 1300


def test_the_state_of_an_ended_rank_shows_how_it_ended(node: Node):
    ends = ("0 0 0", "3 0 0", "143 15 1", "137 9 0")
    for rank, end in enumerate(ends):
        node.start(rank, QUIET)
        node.ranks.handle_event("end %d %s %f " % (rank, end, time.time()))
    ranks = node.sample()

    assert "".join(ranks[rank].state for rank in range(4)) == "EFCF"


def test_a_rank_that_fails_after_it_was_asked_to_end_was_stopped(node: Node):
    node.start(0, QUIET)
    node.start(1, QUIET)
    node.ranks.handle_event("end 1 1 0 0 %f " % time.time())
    node.ranks.forward_signal(signal.SIGTERM)
    node.ranks.handle_event("fail 0 1 0 0 %f SystemExit" % time.time())

    assert [sample.state for sample in node.sample().values()] == ["C", "F"]


@pytest.mark.parametrize(("is_killed_by_us", "state"), [(True, "C"), (False, "L")])
def test_a_rank_without_a_report_is_lost_unless_cloudjob_killed_it(
    node: Node, until: Callable[..., None], is_killed_by_us: bool, state: str
):
    node.start(0, QUIET)
    if is_killed_by_us:
        node.ranks.kill()
        # The sample may be taken before its end is noticed.
        assert node.sample()[0].state == state
    else:
        os.kill(node._wrappers[0].pid, signal.SIGKILL)
    until(lambda: node.ranks.missing)
    node.ranks.lost()

    assert node.sample()[0].state == state


def test_a_rank_that_is_seen_late_is_counted_all_the_same(node: Node, until: Callable[..., None]):
    """A sample has already counted its processes before its start is reported."""
    node.start(0, QUIET)
    report, node.ranks.handle_event = node.ranks.handle_event, lambda _: ("", None)  # type: ignore[method-assign]
    node.start(1, FORKING)
    node.sample()
    node.ranks.handle_event = report  # type: ignore[method-assign]
    wrapper = node._wrappers[1].pid
    child = int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()[0])
    node.ranks.handle_event("start 1 %d %d" % (wrapper, child))

    until(lambda: node.sample()[1].children == 3)
