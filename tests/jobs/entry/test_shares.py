"""What ranks do over time is counted: real processes that meet again and again, one is slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jobentry.contract.paths import NodePaths
from jobentry.contract.slow import RankShare, Reason, Slow
from jobentry.control.slow_rules import WINDOWS, judge
from jobentry.node.local_ranks import LocalRanks
from jobentry.node.shares import cpus_of
from jobentry.node.standing import Pace, Reports, StandingRanks

WRAPPER = "import subprocess, sys; subprocess.call(sys.argv[1:])"
PYTHON = sys.executable if sys.implementation.name == "cpython" else "/usr/bin/python3"
# A window lasts for 1.8 s.
SCALE = 0.03
# Ranks that meet: each sends a byte to all others and waits until it has one of each.
MEET = """
import os, sys, time
rank = int(sys.argv[1])
pipes = sorted(os.listdir("pipes"))
class comm:
    others = [p for p in pipes if p.endswith(f"-{rank}")]
    inputs = [os.open(f"pipes/{p}", os.O_RDWR) for p in others]
    outputs = [os.open(f"pipes/{p}", os.O_RDWR) for p in pipes if p.startswith(f"{rank}-")]
    barrier = os.read
def work(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end: pass
def idle(seconds):
    time.sleep(seconds)
def meet():
    for output in comm.outputs: os.write(output, b"x")
    for each in comm.inputs:
        comm.barrier(each, 1)
"""
STEPS = "while True:\n    step()\n    meet()\n"


class Node:
    """A node with ranks, and what the head would conclude from its reports."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.history: dict[int, list[RankShare]] = {rank: [] for rank in range(count)}
        paths = NodePaths(*[str(folder)] * 5)
        self.ranks = LocalRanks(paths)
        self.standing = StandingRanks(
            self.ranks, paths, 0, Reports(lambda standing: None, self._take), Pace(SCALE)
        )
        (folder / "pipes").mkdir()
        for one in range(count):
            for other in range(count):
                if one != other:
                    os.mkfifo(folder / "pipes" / f"{one}-{other}")
        self._wrappers: list[subprocess.Popen[bytes]] = []

    def _take(self, shares: list[RankShare]) -> None:
        for each in shares:
            self.history[each.rank].append(each)

    def start(self, text: str, until: Callable[..., None]) -> None:
        (self.folder / "job.py").write_text(MEET + text)
        for rank in self.history:
            command = [PYTHON, "job.py", str(rank)]
            wrapper = subprocess.Popen(
                [sys.executable, "-c", WRAPPER, *command], start_new_session=True, cwd=self.folder
            )
            self._wrappers.append(wrapper)
            children = Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children")
            until(lambda children=children: children.read_text().split())
            child = int(children.read_text().split()[0])
            self.ranks.handle_event("start %d %d %d" % (rank, wrapper.pid, child))

    def verdict(self) -> Slow | None:
        """Look once, and return what the rules say about all windows so far."""
        time.sleep(min(self.standing.pause_s, 0.1))
        self.standing.look()
        return judge(frozenset(self.history), self.history)

    @property
    def windows(self) -> int:
        return min(len(shares) for shares in self.history.values())

    def close(self) -> None:
        self.standing.close()
        for wrapper in self._wrappers:
            os.killpg(wrapper.pid, signal.SIGKILL)
            wrapper.wait()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[[int], Node]]:
    """A function that creates a node with this many ranks."""
    nodes: list[Node] = []

    def make(count: int) -> Node:
        nodes.append(Node(tmp_path, count))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


# ``idle`` stands for work that uses no CPU, so that these tests also pass on a busy machine.
QUIET = {
    "all are equal": "def step(): idle(.03)\n",
    "rank 0 also evaluates": (
        "number = 0\n"
        "def evaluate(): time.sleep(.3)\n"
        "def step():\n"
        "    global number; number += 1\n"
        "    idle(.03)\n"
        "    if rank == 0 and number % 10 == 0: evaluate()\n"
    ),
    "rank 0 also evaluates, with a function of the training": (
        "number = 0\n"
        "def evaluate():\n"
        "    for _ in range(10): idle(.03)\n"
        "def step():\n"
        "    global number; number += 1\n"
        "    idle(.03)\n"
        "    if rank == 0 and number % 10 == 0: evaluate()\n"
    ),
    "each rank has its own part": (
        "def first(): time.sleep(.09)\n"
        "def second(): time.sleep(.03)\n"
        "def step(): first() if rank == 0 else second()\n"
    ),
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET)
def test_nobody_is_named(make_node, until, text):
    node = make_node(2)
    node.start(text + STEPS, until)

    named: list[Slow] = []
    until(lambda: (named.append(node.verdict()), node.windows >= WINDOWS + 3)[1], within_s=120)

    assert [each for each in named if each is not None] == []
    # The ranks were seen often enough, so this was no accident.
    assert sum(each.looks for each in node.history[1]) > WINDOWS * 8


def test_a_rank_with_more_work_is_named_with_its_place(make_node, until):
    node = make_node(2)
    node.start("def step(): idle(.09 if rank == 1 else .02)\n" + STEPS, until)

    until(lambda: node.verdict() is not None, within_s=120)
    slow_ranks = node.verdict()

    assert slow_ranks is not None
    assert slow_ranks.ranks == (1,)
    assert slow_ranks.place[:3] == ("job.py", 14, "idle")
    assert slow_ranks.place_percent >= 50
    assert all(each.meeting == "barrier at job.py:18" for each in node.history[0][1:] if each.waits)


class SlowForRank1(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(0.09 if self.path == "/1" else 0.0)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_rank_that_waits_for_a_server_is_named_with_that_reason(make_node, until):
    node = make_node(2)
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowForRank1) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = (
            "from urllib.request import urlopen\n"
            f"def step(): idle(.02); urlopen(f'http://127.0.0.1:{server.server_port}/{{rank}}')\n"
        )
        node.start(text + STEPS, until)

        until(lambda: node.verdict() is not None, within_s=120)
        server.shutdown()
    slow_ranks = node.verdict()

    assert slow_ranks is not None
    assert (slow_ranks.ranks, slow_ranks.reason) == ((1,), Reason.NETWORK)


def test_a_rank_whose_cpu_others_take_is_named_with_that_reason(make_node, until):
    """The rank shares one CPU with four other processes; the other rank needs hardly any."""
    cpu = min(cpus_of(os.getpid()))
    node = make_node(2)
    text = (
        f"if rank == 1: os.sched_setaffinity(0, [{cpu}])\n"
        "def step(): idle(.01); work(.03 if rank == 1 else .001)\n"
    )
    spin = f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    busy = [subprocess.Popen([PYTHON, "-c", spin]) for _ in range(4)]
    try:
        node.start(text + STEPS, until)
        named: list[Slow] = []

        def is_named_for_its_cpu() -> bool:
            slow_ranks = node.verdict()
            if slow_ranks is not None and slow_ranks.reason is Reason.CPU:
                named.append(slow_ranks)
            return bool(named)

        until(is_named_for_its_cpu, within_s=400)
    finally:
        for each in busy:
            each.kill()
            each.wait()

    assert named[0].ranks == (1,)
    assert node.history[1][-1].delay_percent > 10
    assert node.history[1][-1].cpus == (cpu,)


def test_what_a_rank_did_lately_is_known_to_the_journal(make_node, until):
    node = make_node(2)
    node.start("def step(): idle(.09 if rank == 1 else .02)\n" + STEPS, until)
    until(lambda: node.verdict() is None and node.windows >= 2, within_s=120)

    recent = node.standing.recent()

    percent, place = recent[0]
    assert percent is not None
    assert 0 <= percent <= 100
    assert "job.py:" in place
    assert node.standing.recent()[0] == (None, "")
