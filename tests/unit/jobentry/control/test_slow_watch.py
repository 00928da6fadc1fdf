"""The head judges when every node has reported, and writes what has changed."""

from __future__ import annotations

import pytest

from jobentry.contract import journal, slow
from jobentry.contract.slow import Function, RankShare, Slow
from jobentry.control.slow_rules import WINDOWS
from jobentry.control.watch import SlowWatch
from jobentry.node.journal import Journal

FORWARD = ("model.py", "forward", 8)


def share(rank: int, waits: int) -> RankShare:
    meeting = "allreduce at train.py:41"
    functions = (Function(*FORWARD, 60 - waits),)
    return RankShare(rank, rank, 60, waits, 20, meeting, functions=functions)


class Head:
    """The watch of a head with two nodes of one rank each, and what it has written."""

    def __init__(self) -> None:
        self.running = frozenset({0, 1})
        self.lines: list[bytes] = []
        self.watch = SlowWatch(lambda: self.running, Journal(self.lines.append))

    def report(self, waits_0: int, waits_1: int, times: int = 1) -> None:
        for _ in range(times):
            self.watch.take(0, [share(0, waits_0)])
            self.watch.take_rows(1, {"ranks": [slow.to_row(share(1, waits_1))]})

    @property
    def written(self) -> list[tuple[tuple[int, ...], bool]]:
        entries = (journal.load(line[len(journal.MARK) :]) for line in self.lines)
        return [(entry.ranks, entry.is_over) for entry in entries if isinstance(entry, Slow)]


def test_a_slow_rank_is_written_each_time_and_logged_once(capfd):
    head = Head()

    head.report(30, 1, WINDOWS - 1)
    assert head.written == []
    head.report(30, 1, 3)

    assert head.written == [((1,), False)] * 3
    assert capfd.readouterr().err.count("slow: rank 1 on node 1: the others wait 48 %") == 1

    head.report(20, 20, 4)

    assert head.written[-1] == ((1,), True)
    assert head.written.count(((1,), True)) == 1
    assert capfd.readouterr().err.count("no longer slow: rank 1 on node 1") == 1


def test_a_job_is_judged_only_when_every_rank_was_reported_again():
    head = Head()
    head.report(30, 1, WINDOWS)
    count = len(head.written)

    for _ in range(5):
        head.watch.take(0, [share(0, 30)])
    assert len(head.written) == count

    head.running = frozenset({0})
    head.watch.take(0, [share(0, 30)])
    assert head.written[-1] == ((1,), True)


@pytest.mark.parametrize(
    "values",
    [{}, {"ranks": 3}, {"ranks": [[1, 2]]}, {"ranks": [None]}, {"ranks": [["x"] * 14]}],
    ids=str,
)
def test_a_report_that_cannot_be_read_is_ignored(values):
    head = Head()

    head.watch.take_rows(1, values)
    head.report(30, 1, WINDOWS)

    assert head.written == [((1,), False)]
