"""The head applies the rules to what the nodes report, and writes what it concludes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobentry.contract import hang_actions, hangs, journal
from jobentry.contract.env import NodeEnv
from jobentry.contract.hangs import Activity, Hang, Standing
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait
from jobentry.control.commands import LaunchProcesses
from jobentry.control.handshake import Access, Resolver
from jobentry.control.peers import WorkerPool
from jobentry.control.stop import Stop
from jobentry.control.watch import HangWatch
from jobentry.node.journal import Journal
from tests.support.loops import Clock, make_loop, paths_in, signals_restored

# Seconds between two reports, after how many of them a test gives up, and between two steps of the
# head's loop.
REPORT_S, MOST_REPORTS, STEP_S = 5.0, 1000, 1.0
PLACE = Frame("data.py", 17, "load", "file.read()")


def standing(rank: int, activity: Activity, wait: Wait, operation: str = "") -> Standing:
    return Standing(
        rank, 0, activity, wait, "reading from a pipe", PLACE, operation, 500.0, quiet_s=500.0
    )


IDLE = standing(2, Activity.IDLE, Wait.FILE)
OTHERS = [standing(rank, Activity.WAITING, Wait.RANKS, "barrier") for rank in (0, 1, 3)]


class Head:
    """The parts of a head that watch for hangs, of a job with four ranks."""

    def __init__(self, folder: Path, action: str) -> None:
        node = NodeEnv(job="j", hang_action=action, hang_after_s=60.0)
        self.clock = Clock()
        self.loop = make_loop(node, paths_in(folder), now_s=self.clock.now_s)
        access = Access(b"", "", 0, Resolver(self.loop))
        pool = WorkerPool(node, self.loop, {}, access, lambda *_: None, lambda _: None)
        self.stop = Stop(node, self.loop, pool, LaunchProcesses(self.loop, lambda: True), None)
        self.lines: list[bytes] = []
        self.running = frozenset(range(4))
        journal = Journal(self.lines.append)
        self.watch = HangWatch(node, self.loop, pool, self.stop, lambda: self.running, journal)

    def report(self, *ranks: Standing, times: int = 1) -> None:
        """Report ranks as a node does, and let the head evaluate them."""
        for _ in range(times):
            self.watch.take(0, list(ranks))
            self.wait()

    def wait(self) -> None:
        """Let the time between two reports pass."""
        for _ in range(round(REPORT_S / STEP_S)):
            self.clock.advance(self.loop, STEP_S)

    def until(self, claim: Callable[[], object], *ranks: Standing) -> None:
        for _ in range(MOST_REPORTS):
            if claim():
                return
            self.report(*ranks)
        raise AssertionError(self.lines)

    @property
    def written(self) -> list[Hang]:
        """The hangs in the journal."""
        entries = (journal.load(line[len(journal.MARK) :]) for line in self.lines)
        return [entry for entry in entries if isinstance(entry, Hang)]


@pytest.fixture
def make_head(tmp_path: Path) -> Iterator[Callable[[str], Head]]:
    """A function that creates the head of a job with this action."""
    heads: list[Head] = []

    def make(action: str = hang_actions.WARN) -> Head:
        heads.append(Head(tmp_path, action))
        return heads[-1]

    with signals_restored():
        yield make
    for head in heads:
        head.loop.relay.finish()


def test_a_hang_is_written_to_the_journal_and_the_log_and_so_is_its_end(
    make_head: Callable[..., Head], capfd: pytest.CaptureFixture[str]
):
    head = make_head()

    head.until(lambda: head.written, IDLE, *OTHERS)
    assert head.watch.hang is not None
    head.until(lambda: head.watch.hang is None)

    assert [(hang.rule, hang.is_over) for hang in head.written] == [
        (hangs.Rule.ONE_IDLE, False),
        (hangs.Rule.ONE_IDLE, True),
    ]
    said = capfd.readouterr().err
    assert "the job hangs: rank 2 on node 0 is stuck in load() at data.py:17" in said
    assert "ranks 0-1,3 on node 0 wait for that in barrier at data.py:17" in said
    assert "the job moves again after 8 min: it was slow, not hung" in said
    assert not head.stop.has_begun


def test_a_job_is_ended_if_it_still_hangs_after_the_chosen_time(make_head: Callable[..., Head]):
    head = make_head(hang_actions.STOP)

    head.until(lambda: head.written, IDLE, *OTHERS)
    # It was frozen, for longer than that time.
    head.clock.advance(head.loop, 600)
    head.report(IDLE, *OTHERS, times=2)
    assert not head.stop.has_begun
    head.until(lambda: head.stop.has_begun, IDLE, *OTHERS)

    outcome = head.stop.outcome
    assert outcome is not None
    assert (outcome.exit_code, outcome.cause, outcome.is_over) == (124, "hang", True)
    assert outcome.failure is not None
    assert (outcome.failure.node, outcome.failure.rank) == (0, 2)
    assert head.watch.hang is not None


def test_a_job_is_not_ended_if_no_rank_stands_out(make_head: Callable[..., Head]):
    head = make_head(hang_actions.STOP)
    all_wait = [*OTHERS, standing(2, Activity.WAITING, Wait.RANKS, "barrier")]

    head.until(lambda: head.written, *all_wait)
    head.report(*all_wait, times=MOST_REPORTS)

    assert head.written[0].rule is hangs.Rule.ALL_WAIT
    assert not head.stop.has_begun


def test_reports_of_ranks_that_have_ended_say_nothing(make_head: Callable[..., Head]):
    head = make_head()
    head.running = frozenset()

    head.report(IDLE, *OTHERS, times=MOST_REPORTS)

    assert head.written == []


@pytest.mark.parametrize(
    "values",
    [{}, {"ranks": None}, {"ranks": [None]}, {"ranks": [[]]}, {"ranks": [["x"] * 12]}, {"ranks": 3},
     {"ranks": [[*hangs.to_row(IDLE)[:7], "nan", 0, 0, 0, 0]]}],
)  # fmt: skip
def test_a_report_that_cannot_be_read_is_ignored(
    make_head: Callable[..., Head], values: dict[str, object]
):
    head = make_head()

    head.watch.take_rows(1, values)

    assert not head.loop.is_scheduled("hangs")


def test_a_worker_reports_only_ranks_of_its_own_node(make_head: Callable[..., Head]):
    head = make_head()
    rows = [hangs.to_row(each) for each in (IDLE, *OTHERS)]

    for _ in range(MOST_REPORTS):
        head.watch.take_rows(3, {"ranks": rows})
        head.wait()

    assert {node for group in head.written[0].groups for node in group.nodes} == {3}
