"""Which rank slows a job down, as a table: first the jobs in which nobody may be named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from jobentry.contract import slow
from jobentry.contract.slow import Function, RankShare, Reason
from jobentry.contract.stacks import Frame
from jobentry.control.slow_rules import WINDOWS, judge

LOOKS = 60
AUGMENT, FORWARD, EVALUATE = (
    ("data.py", "augment"),
    ("model.py", "forward"),
    ("eval.py", "evaluate"),
)
LINES = {AUGMENT: 30, FORWARD: 8, EVALUATE: 40}


@dataclass(frozen=True)
class Rank:
    """A rank that waits for this percentage of the time, and does this with the rest."""

    waits: int
    functions: Mapping[tuple[str, str], int] = field(default_factory=lambda: {FORWARD: 1})
    meeting: str = "allreduce at train.py:41"
    is_message: bool = False
    passes: int = 10
    looks: int = LOOKS
    node: int = 0
    data: int = 0
    disk: int = 0
    network: int = 0
    delay_percent: float = 1.0
    throttled_percent: float = 0.0
    faults_s: float = 0.0
    cpus: tuple[int, ...] = (0, 1, 2, 3)
    # The functions that something else calls than usual.
    called_elsewhere: frozenset[tuple[str, str]] = frozenset()

    def share(self, rank: int) -> RankShare:
        waits = self.looks * self.waits // 100
        parts = sum(self.functions.values())
        functions = tuple(
            Function(
                file,
                name,
                LINES[file, name],
                (self.looks - waits) * part // parts,
                int((file, name) in self.called_elsewhere),
            )
            for (file, name), part in self.functions.items()
        )
        return RankShare(
            rank,
            self.node,
            self.looks,
            waits,
            min(waits, self.passes),
            self.meeting,
            self.is_message,
            self.looks * self.data // 100,
            self.looks * self.disk // 100,
            self.looks * self.network // 100,
            self.delay_percent,
            self.throttled_percent,
            self.faults_s,
            self.cpus,
            functions,
        )


def in_one_window(rank: Rank) -> tuple[tuple[Rank, ...], ...]:
    """Return windows of a slow rank and others, which pass their collective only in the first."""
    others = replace(rank, passes=0)
    return ((SLOW, rank, rank), (SLOW, others, others))


def history(*windows: tuple[Rank, ...]) -> dict[int, list[RankShare]]:
    """Return these windows, the last of them as often as needed."""
    rows = [*windows, *[windows[-1]] * (WINDOWS - len(windows))]
    return {rank: [row[rank].share(rank) for row in rows] for rank in range(len(windows[0]))}


def verdict(*windows: tuple[Rank, ...], before: frozenset[int] = frozenset()) -> slow.Slow | None:
    windows_of = history(*windows)
    return judge(frozenset(windows_of), windows_of, before)


MIXED = {FORWARD: 3, AUGMENT: 1}
FAST = Rank(40, MIXED)
SLOW = Rank(2, {FORWARD: 3, AUGMENT: 7})
EVALUATES = Rank(2, {FORWARD: 2, EVALUATE: 1})
EQUAL = Rank(20, MIXED)

QUIET = {
    "all are equal": ((EQUAL,) * 4,),
    "all wait much for each other": ((Rank(60, MIXED),) * 4,),
    "nobody waits much": ((Rank(15, MIXED),) * 3 + (Rank(0, MIXED),),),
    "one rank": ((FAST,),),
    "the difference is small": ((Rank(30), Rank(30), Rank(18)),),
    "rank 0 evaluates from time to time": ((EVALUATES, *[Rank(35, {FORWARD: 1})] * 3),),
    "rank 0 evaluates, in a function of the training": (
        (
            Rank(2, {FORWARD: 5, AUGMENT: 1}, called_elsewhere=frozenset([FORWARD])),
            *[Rank(35, MIXED)] * 3,
        ),
    ),
    "rank 0 evaluates for the whole time": (
        (Rank(0, {EVALUATE: 1}), *[Rank(100, {}, passes=0)] * 3),
    ),
    "rank 0 is slow once": (
        (SLOW, *[FAST] * 3),
        (SLOW, *[FAST] * 3),
        (EQUAL,) * 4,
    ),
    "a pipeline: its stages run different functions": (
        (
            Rank(0, {FORWARD: 1}, "recv at pipe.py:5", True),
            Rank(50, {AUGMENT: 1}, "recv at pipe.py:9", True),
        ),
    ),
    "a pipeline: its stages run the same function on other layers": (
        (Rank(0, is_message=True), *[Rank(50, meeting="recv at pipe.py:5", is_message=True)] * 3),
    ),
    "workers that wait for a master": (
        (Rank(0, {AUGMENT: 1}), *[Rank(60, meeting="recv at work.py:3", is_message=True)] * 3),
    ),
    "ranks that meet in different collectives": (
        (SLOW, FAST, replace(FAST, meeting="barrier at other.py:3")),
    ),
    "two groups of the same size, of which none is the rule": (
        (Rank(0), Rank(0), Rank(0), Rank(40), Rank(40)),
    ),
    "too few looks": ((replace(SLOW, looks=3), replace(FAST, looks=3)),),
    "a chance, with few looks": ((replace(SLOW, looks=8, waits=13), replace(FAST, looks=8)),),
    "a rank that cannot be read": ((Rank(0, {}, looks=0), *[FAST] * 3),),
    "others that stand in one collective": ((SLOW, *[replace(FAST, passes=0)] * 3),),
    "others that passed their collective only twice": in_one_window(replace(FAST, passes=2)),
    "all are slowed down by the network": ((Rank(70), Rank(72), Rank(75), Rank(71)),),
}


@pytest.mark.parametrize("windows", QUIET.values(), ids=QUIET)
def test_nobody_is_named(windows):
    assert verdict(*windows) is None


@pytest.mark.parametrize("missing", [0, 1])
def test_nobody_is_named_until_every_rank_was_seen_for_minutes(missing):
    rows = history((FAST, FAST, SLOW))
    rows[missing] = rows[missing][1:]

    assert judge(frozenset(rows), rows) is None


UNEVEN = "68 % in augment() at data.py:30"
SLOWED = Rank(2, MIXED)

SLOW_RANKS = {
    "S1 another process on its CPU": (
        replace(SLOWED, delay_percent=48),
        Reason.CPU,
        "for 48 % of the time it was ready to run and had no CPU, the others for 1 %",
    ),
    "S2 a limit of its node": (
        replace(SLOWED, throttled_percent=60, delay_percent=60, node=1),
        Reason.QUOTA,
        "the CPU limit of its node held it back for 60 % of the time, the others for 0 %",
    ),
    "S3 its data loader": (
        replace(SLOW, data=50),
        Reason.DATA,
        "it waits for its data loader for 50 % of the time, the others for 0 %",
    ),
    "S4 more work": (SLOW, Reason.UNEVEN, f"uneven work: {UNEVEN}"),
    "S7 memory": (
        replace(SLOWED, faults_s=400),
        Reason.MEMORY,
        "400 pages a second had to be read from a disk for it, 0 for the others",
    ),
    "a disk": (
        replace(SLOW, disk=50),
        Reason.DISK,
        "it waits for a disk for 50 % of the time, the others for 0 %",
    ),
    "a download": (
        replace(SLOW, network=50),
        Reason.NETWORK,
        "it waits for the network for 50 % of the time, the others for 0 %",
    ),
    "a counter that does not differ enough is no reason": (
        replace(SLOW, disk=15),
        Reason.UNKNOWN,
        f"no counter shows why; {UNEVEN}",
    ),
}


@pytest.mark.parametrize(("rank", "reason", "evidence"), SLOW_RANKS.values(), ids=SLOW_RANKS)
def test_the_slow_rank_is_named_with_what_shows_the_reason(rank, reason, evidence):
    slow_now = verdict((FAST, FAST, rank, FAST))

    assert slow_now is not None
    assert (slow_now.ranks, slow_now.nodes, slow_now.reason) == ((2,), (rank.node,), reason)
    assert slow_now.evidence.startswith(evidence)
    assert 35 <= slow_now.cost_percent <= 40


def test_a_rank_is_not_blamed_for_what_all_ranks_suffer_from():
    busy = replace(FAST, delay_percent=30)

    slow_now = verdict((busy, busy, replace(SLOW, delay_percent=35), busy))

    assert slow_now is not None
    assert (slow_now.ranks, slow_now.reason) == ((2,), Reason.UNKNOWN)


def test_ranks_that_are_bound_to_the_same_cpu_are_named():
    shared = {"cpus": (0,), "delay_percent": 50.0}
    ranks = (replace(SLOWED, **shared), replace(SLOWED, **shared), *[FAST] * 4)

    slow_now = verdict(ranks)

    assert slow_now is not None
    assert (slow_now.ranks, slow_now.reason) == ((0, 1), Reason.BINDING)
    assert slow_now.evidence.startswith("ranks 0-1 are all bound to CPU 0; ")


def test_more_ranks_than_cpus_are_no_reason_why_one_of_them_is_slow():
    ranks = [replace(each, cpus=(0, 1)) for each in (FAST, FAST, FAST)]

    slow_now = verdict((*ranks, replace(SLOWED, cpus=(0, 1), delay_percent=50)))

    assert slow_now is not None
    assert slow_now.reason is Reason.CPU


def test_all_ranks_of_a_node_are_named_together():
    there = replace(SLOWED, node=1, throttled_percent=40)

    slow_now = verdict((FAST, FAST, there, there))

    assert slow_now is not None
    assert (slow_now.ranks, slow_now.nodes, slow_now.reason) == ((2, 3), (1,), Reason.QUOTA)


def test_a_straggler_is_named_where_the_others_wait_for_their_devices():
    others = replace(FAST, meeting="device at train.py:44")

    slow_now = verdict((others, SLOW, others))

    assert slow_now is not None
    assert slow_now.ranks == (1,)


def test_a_window_that_differs_changes_nothing():
    slow_now = verdict((EQUAL,) * 3, (FAST, SLOW, FAST))

    assert slow_now is not None
    assert slow_now.ranks == (1,)


def test_a_named_rank_stays_so_until_it_is_clearly_not_slow():
    nearly = (replace(FAST, waits=22), replace(SLOW, waits=12), replace(FAST, waits=22))

    assert verdict(nearly) is None
    assert verdict(nearly, before=frozenset({1})) is not None
    assert verdict((EQUAL,) * 3, before=frozenset({1})) is None


def test_the_headline_names_ranks_cost_and_reason():
    place = Frame("data.py", 30, "augment")
    slow_now = slow.Slow((5,), (1,), 0.0, 31, Reason.UNEVEN, f"uneven work: {UNEVEN}", place, 72)

    assert slow.headline(slow_now) == (
        "rank 5 on node 1: the others wait 31 % of the time for it; "
        "uneven work: 68 % in augment() at data.py:30"
    )
    assert slow.headline(slow_now._replace(ranks=(4, 5), evidence="")) == (
        "ranks 4-5 on node 1: the others wait 31 % of the time for them"
    )


def test_a_row_and_values_are_read_as_they_were_written():
    share = replace(SLOW, delay_percent=2.5, cpus=(0, 2)).share(3)
    place = Frame("data.py", 30, "augment")
    slow_now = slow.Slow((5,), (1,), 2.5, 31, Reason.DATA, "it waits", place, 72, True)

    assert slow.from_row(slow.to_row(share)) == share
    assert slow.from_row(slow.to_row(share._replace(cpus=())))[-2] == ()
    assert slow.from_values(slow.to_values(slow_now)) == slow_now
