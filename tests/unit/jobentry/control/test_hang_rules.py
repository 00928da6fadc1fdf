"""When a job counts as hung, and which ranks are named: tables of ranks, without clocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jobentry.contract import hangs
from jobentry.contract.hangs import Activity, Confidence, Hang, Late, Progress, Rule, Standing
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait
from jobentry.control.hang_rules import (
    LIMITS,
    NOT_SUSPECTED,
    Event,
    Suspicion,
    advance,
    judge,
)

REDUCE = Frame("train.py", 41, "train_step", "comm.Allreduce(MPI.IN_PLACE, grads)")
BARRIER = Frame("train.py", 44, "train_step", "comm.Barrier()")
LOAD = Frame("data.py", 17, "load", "with open(path) as file:")
INIT = Frame("train.py", 3, "main", "dist.init_process_group()")
MINUTE = 60.0


def waits(
    rank: int, still_s: float, place: Frame = REDUCE, operation: str = "allreduce", **more: float
) -> Standing:
    """Return a rank that waits for others."""
    wait = Wait.START if place is INIT else Wait.RANKS
    return Standing(
        rank, rank // 2, Activity.WAITING, wait, "", place, operation, still_s, **{  # type: ignore[arg-type]
            "quiet_s": still_s, "cpu_percent": 100, **more}
    )  # fmt: skip


def idles(
    rank: int, still_s: float, wait: Wait = Wait.FILE, place: Frame = LOAD, **more: float
) -> Standing:
    """Return a rank that waits for something else."""
    return Standing(
        rank, rank // 2, Activity.IDLE, wait, "reading", place, "", still_s, **{  # type: ignore[arg-type]
            "quiet_s": still_s, **more}
    )  # fmt: skip


def busies(rank: int, still_s: float, place: Frame = LOAD, **more: float) -> Standing:
    """Return a rank that computes at one place."""
    standing = idles(rank, still_s, Wait.NOTHING, place, **{"cpu_percent": 99, **more})
    return standing._replace(activity=Activity.BUSY)


def stopped(rank: int, still_s: float) -> Standing:
    """Return a rank that a signal has stopped."""
    standing = idles(rank, still_s, Wait.STOPPED)
    return standing._replace(activity=Activity.GONE)


def verdict(*standing: Standing, ranks: int = 4) -> Hang | None:
    """Return the verdict on a job of which all other ranks move."""
    return judge(frozenset(range(ranks)), standing, LIMITS)


def named(hang: Hang | None) -> tuple[Rule, tuple[int, ...]] | None:
    if hang is None:
        return None
    return hang.rule, tuple(rank for group in hang.culprits for rank in group.ranks)


def others(still_s: float, ranks: int = 4, but: int = -1, **more: float) -> list[Standing]:
    return [waits(rank, still_s, **more) for rank in range(ranks) if rank != but]


def on_devices(
    still_s: float, late: Sequence[int] = (), progress: Progress = Progress.BEHIND
) -> list[Standing]:
    """Return ranks that wait for their devices; some have not launched a collective of others."""
    return [
        each._replace(
            wait=Wait.DEVICE,
            operation="",
            progress=progress if each.rank in late else Progress.AHEAD,
            missing="AllReduce 31" if each.rank in late else "",
        )
        for each in others(still_s)
    ]


# ---- no alarm ------------------------------------------------------------------------------------

QUIET = {
    "N1 evaluation on rank 0 for 9 minutes": [
        busies(0, 9 * MINUTE, place=Frame("eval.py", 9, "evaluate")), *others(9 * MINUTE, but=0)],
    "N2 a checkpoint that is written for long, by rank 0": [
        busies(0, 9 * MINUTE, moved_bytes_s=1e6), *others(9 * MINUTE, but=0)],
    "N3 all ranks compile, for an hour": [busies(rank, 60 * MINUTE) for rank in range(4)],
    "N3 all ranks compute at different places": [
        busies(rank, 60 * MINUTE, place=Frame("a.py", rank, "f")) for rank in range(4)],
    "N4 a download before the first batch, while the others wait": [
        busies(0, 4 * MINUTE, moved_bytes_s=2e5), *others(4 * MINUTE, but=0)],
    "N5 a long epoch without output: some rank moves": others(20 * MINUTE, but=2),
    "N6 a step of 90 s": [idles(3, 90), *others(90, but=3)],
    "N6 a step of 10 minutes that took 3 minutes before": [
        idles(3, 10 * MINUTE, longest_s=3 * MINUTE), *others(10 * MINUTE, but=3)],
    "N7 a pipeline in which rank 3 moves": others(20 * MINUTE, but=3),
    "N7 stages that are idle while one moves": [
        idles(rank, 20 * MINUTE, Wait.LOCK) for rank in range(3)],
    "N9 the first minutes after the clocks were started again": others(100),
    "no rank is old": [],
    "a collective that still moves data": others(30 * MINUTE, moved_bytes_s=1e6),
    "a collective of 20 minutes that took 5 minutes before": others(
        20 * MINUTE, longest_s=5 * MINUTE),
    "all ranks wait for their devices, of which nothing is known": on_devices(60 * MINUTE),
    "all ranks wait for their devices, which compute": [
        each._replace(computes=True) for each in on_devices(60 * MINUTE, late=(1,))],
    "all ranks wait for their devices, and data moves": [
        each._replace(computes=False, moved_bytes_s=5e7) for each in on_devices(16 * MINUTE)],
    "all ranks wait for their devices for 14 minutes": [
        each._replace(computes=False) for each in on_devices(14 * MINUTE)],
    "a rank has not launched a collective for 4 minutes": on_devices(4 * MINUTE, late=(1,)),
    "all ranks idle, but one prints": [
        idles(0, 20 * MINUTE, Wait.LOCK, quiet_s=3), *(
            idles(rank, 20 * MINUTE, Wait.LOCK) for rank in range(1, 4))],
    "all ranks sleep for 14 minutes": [
        idles(rank, 14 * MINUTE, Wait.SLEEP) for rank in range(4)],
    "a server without requests": [
        idles(rank, 300 * MINUTE, Wait.EVENTS) for rank in range(4)],
    "some ranks idle, one computes, and none waits": [
        busies(0, 60 * MINUTE), *(idles(rank, 60 * MINUTE, Wait.LOCK) for rank in range(1, 4))],
}  # fmt: skip


@pytest.mark.parametrize("standing", QUIET.values(), ids=QUIET)
def test_nothing_is_said(standing: list[Standing]):
    assert verdict(*standing) is None


def test_a_single_rank_that_sleeps_between_polls_is_no_hang():
    assert verdict(idles(0, 5 * MINUTE, Wait.SLEEP), ranks=1) is None
    assert verdict(idles(0, 20 * MINUTE, Wait.SLEEP, longest_s=5 * MINUTE), ranks=1) is None


def test_a_long_evaluation_is_at_most_a_notice_of_low_confidence():
    """N1: the text says that the rank may only be slow, and the job is never ended for it."""
    hang_now = verdict(busies(0, 11 * MINUTE), *others(11 * MINUTE, but=0))

    assert named(hang_now) == (Rule.ONE_BUSY, (0,))
    assert hang_now is not None
    assert hang_now.confidence is Confidence.LOW
    assert not hang_now.may_stop


# ---- hangs ---------------------------------------------------------------------------------------


def test_a_rank_that_idles_while_the_others_wait_is_named_even_if_a_thread_prints():
    """N8: a progress bar that another thread prints does not hide the hang."""
    hang_now = verdict(idles(2, 130), *others(130, but=2, quiet_s=1.0))

    assert named(hang_now) == (Rule.ONE_IDLE, (2,))
    assert hang_now is not None
    assert hang_now.groups[0].place == LOAD
    assert hang_now.groups[1].ranks == (0, 1, 3)
    assert hang_now.lasted_s == 130
    assert hang_now.may_stop


def test_programs_without_python_hang_only_if_one_of_them_does_not_run():
    place = Frame("solve", 0, "stuck")
    waiting = [waits(rank, 2 * MINUTE, place._replace(function="MPI_Barrier")) for rank in (0, 2)]

    assert named(verdict(idles(1, 2 * MINUTE, place=place), *waiting, ranks=3)) == (
        Rule.ONE_IDLE,
        (1,),
    )
    assert verdict(*others(60 * MINUTE, 2), idles(2, 60 * MINUTE, place=place), ranks=3) is not None
    assert verdict(waits(0, 60 * MINUTE, place, ""), waits(1, 60 * MINUTE), ranks=2) is None
    assert verdict(idles(0, 60 * MINUTE, place=place), ranks=1) is None


def test_a_stopped_rank_is_certain_after_half_a_minute():
    assert verdict(stopped(1, 20), *others(31, but=1)) is None
    hang_now = verdict(stopped(1, 31), *others(31, but=1))

    assert named(hang_now) == (Rule.STOPPED, (1,))
    assert hang_now is not None
    assert hang_now.confidence is Confidence.CERTAIN
    assert named(verdict(stopped(0, 31), ranks=1)) == (Rule.STOPPED, (0,))


def test_ranks_in_different_collectives_wait_for_each_other():
    hang_now = verdict(waits(0, 125), waits(1, 125, BARRIER, "barrier"), ranks=2)

    assert hang_now is not None
    assert (hang_now.rule, hang_now.confidence, hang_now.named) == (
        Rule.DEADLOCK,
        Confidence.HIGH,
        0,
    )
    assert [group.place for group in hang_now.groups] == [REDUCE, BARRIER]


def test_a_key_of_a_store_may_come_from_a_thread_so_that_is_no_certain_deadlock():
    hang_now = verdict(*others(125, but=3), waits(3, 125, BARRIER, "store"))

    assert named(hang_now) == (Rule.DEADLOCK, ())
    assert hang_now is not None
    assert not hang_now.may_stop


def test_ranks_that_start_late_get_the_time_of_a_start_before_others_are_said_to_deadlock():
    def starting(still_s: float) -> list[Standing]:
        return [waits(0, still_s), waits(1, still_s, INIT, "")]

    assert verdict(*starting(290), ranks=2) is None
    assert named(verdict(*starting(301), ranks=2)) == (Rule.DEADLOCK, ())


@pytest.mark.parametrize(
    ("operations", "lines"),
    [
        (("bcast", "bcast"), (3, 5)),
        (("recv", "recv"), (3, 3)),
        (("send", "recv"), (3, 5)),
        (("allreduce", "allreduce"), (3, 3)),
    ],
)
def test_no_rank_is_named_if_all_wait_in_calls_that_belong_together(
    operations: tuple[str, str], lines: tuple[int, int]
):
    standing = [
        waits(rank, 125, Frame("a.py", lines[rank], "f"), operations[rank]) for rank in range(2)
    ]

    hang_now = verdict(*standing, ranks=2)

    assert named(hang_now) == (Rule.ALL_WAIT, ())
    assert hang_now is not None
    assert not hang_now.may_stop


def test_a_rank_that_does_not_join_is_named_after_five_minutes():
    starting = [waits(rank, 301, INIT, "") for rank in (0, 2, 3)]

    assert verdict(idles(1, 200), *(each._replace(still_s=200) for each in starting)) is None
    assert named(verdict(idles(1, 301), *starting)) == (Rule.NO_START, (1,))
    assert named(verdict(busies(1, 301), *starting)) == (Rule.NO_START, (1,))
    assert named(verdict(waits(1, 301, INIT, ""), *starting)) == (Rule.NO_START, ())


def test_no_rank_is_named_if_too_few_wait():
    hang_now = verdict(waits(0, 400), *(idles(rank, 400) for rank in (1, 2, 3)))

    assert named(hang_now) == (Rule.NOTHING_MOVES, ())


@pytest.mark.parametrize(
    ("wait", "before_s", "after_s"),
    [(Wait.LOCK, 290, 301), (Wait.FILE, 290, 301), (Wait.INPUT, 290, 301),
     (Wait.SLEEP, 890, 901), (Wait.CHILD, 890, 901)],
)  # fmt: skip
def test_a_single_rank_hangs_after_a_time_that_depends_on_what_it_waits_for(
    wait: Wait, before_s: float, after_s: float
):
    assert verdict(idles(0, before_s, wait), ranks=1) is None
    assert named(verdict(idles(0, after_s, wait), ranks=1)) == (Rule.NOTHING_MOVES, (0,))


def test_a_busy_rank_beside_an_idle_one_makes_the_verdict_a_notice():
    hang_now = verdict(idles(1, 601), busies(2, 601), waits(0, 601), waits(3, 601))

    assert named(hang_now) == (Rule.ONE_BUSY, (1, 2))


def test_a_server_of_events_is_named_with_less_confidence():
    hang_now = verdict(idles(1, 130, Wait.EVENTS), *others(130, but=1))

    assert hang_now is not None
    assert hang_now.confidence is Confidence.MEDIUM
    assert not hang_now.may_stop


def test_ranks_that_have_ended_do_not_count():
    assert named(judge(frozenset((1, 2)), others(130), LIMITS)) == (Rule.ALL_WAIT, ())
    assert judge(frozenset(), others(130), LIMITS) is None


def test_limits_can_be_scaled():
    assert named(judge(frozenset((0,)), [idles(0, 16)], LIMITS.scaled(0.05))) is not None
    assert judge(frozenset((0,)), [idles(0, 14)], LIMITS.scaled(0.05)) is None


# ---- from a suspicion to an event ----------------------------------------------------------------


def hang(still_s: float, rank: int = 2) -> Hang:
    hang_now = verdict(idles(rank, still_s), *others(still_s, but=rank))
    assert hang_now is not None
    return hang_now


def events(*steps: tuple[float, Hang | None], moves: bool = False) -> tuple[Suspicion, list[Event]]:
    state, all_events = NOT_SUSPECTED, []
    for now_s, verdict_now in steps:
        is_moving = moves and verdict_now is None
        state, event = advance(
            state, verdict_now, now_s, LIMITS, is_moving=is_moving, reported_s=now_s
        )
        all_events.append(event)
    return state, all_events


def test_a_verdict_must_hold_for_fifteen_seconds():
    _, all_events = events((0, hang(121)), (10, hang(131)), (15, hang(136)), (20, hang(141)))

    assert all_events == [Event.NONE, Event.NONE, Event.BEGINS, Event.NONE]


def test_another_verdict_starts_the_count_again():
    _, all_events = events(
        (0, hang(121)), (10, hang(131, rank=1)), (16, hang(131)), (32, hang(151))
    )

    assert all_events == [Event.NONE, Event.NONE, Event.NONE, Event.BEGINS]


def test_a_job_that_moves_again_is_reported_once_and_has_more_time_afterwards():
    state, all_events = events((0, hang(130)), (15, hang(145)), (20, None), (25, None), moves=True)

    assert all_events == [Event.NONE, Event.BEGINS, Event.ENDS, Event.NONE]
    assert state.confirmed is None
    assert state.floor_s == 2 * 150

    for now_s, still_s in ((500, 270), (520, 290), (531, 301)):
        state, event = advance(
            state, hang(still_s), now_s, LIMITS, is_moving=False, reported_s=now_s
        )
        assert event is Event.NONE
    assert (
        advance(state, hang(317), 547, LIMITS, is_moving=False, reported_s=547)[1] is Event.BEGINS
    )


def test_a_verdict_needs_a_report_of_every_node_from_after_the_first_suspicion():
    """A rank may have gone on since the last report of its node."""
    state, _ = advance(NOT_SUSPECTED, hang(121), 0, LIMITS, is_moving=False, reported_s=-10)

    state, event = advance(state, hang(141), 20, LIMITS, is_moving=False, reported_s=-10)
    assert event is Event.NONE
    assert advance(state, hang(142), 21, LIMITS, is_moving=False, reported_s=5)[1] is Event.BEGINS


def test_a_verdict_that_only_changes_is_no_movement():
    _, all_events = events((0, hang(130)), (15, hang(145)), (20, None), (25, hang(155)))

    assert all_events == [Event.NONE, Event.BEGINS, Event.NONE, Event.NONE]


def test_a_lasting_hang_is_repeated_at_intervals_that_double():
    steps = [(15.0 * n, hang(130 + 15.0 * n)) for n in range(200)]

    _, all_events = events(*steps)

    repeated = [steps[n][0] - 15 for n, event in enumerate(all_events) if event is Event.LASTS]
    assert repeated == [600, 1200, 2400]


def test_a_rank_that_idles_while_the_others_wait_for_their_devices_is_named_with_less_confidence():
    """A collective of NCCL runs on the device, so the ranks wait where they read its result."""
    devices = [each._replace(wait=Wait.DEVICE) for each in others(3 * MINUTE, but=2)]
    hang_now = verdict(idles(2, 3 * MINUTE), *devices)

    assert named(hang_now) == (Rule.ONE_IDLE, (2,))
    assert hang_now is not None
    assert hang_now.confidence is Confidence.MEDIUM
    assert not hang_now.may_stop

    late = idles(2, 3 * MINUTE)._replace(progress=Progress.BEHIND, missing="AllReduce 31")
    hang_now = verdict(late, *devices)
    assert hang_now is not None
    assert hang_now.may_stop
    assert "has not launched AllReduce 31" in hangs.headline(hang_now)


def test_a_rank_whose_device_waits_is_named_if_it_has_not_launched_what_the_others_wait_for():
    unread = verdict(*on_devices(5 * MINUTE, late=(1,)))
    hang_now = verdict(
        *(each._replace(computes=False) for each in on_devices(5 * MINUTE, late=(1,)))
    )

    assert named(unread) == named(hang_now) == (Rule.NOT_JOINED, (1,))
    assert hang_now is not None
    assert unread is not None
    # A device that cannot be read may still compute.
    assert (unread.may_stop, hang_now.may_stop) == (False, True)
    assert hangs.headline(hang_now) == (
        "rank 1 on node 0 is stuck in train_step() at train.py:41 (has not launched AllReduce 31),"
        " for 5 min"
    )
    # Rank 3 waits for rank 1 in another group.
    between = [
        each._replace(progress=Progress.BOTH, missing="AllGather 7") if each.rank == 3 else each
        for each in on_devices(5 * MINUTE, late=(1,))
    ]
    assert named(verdict(*between)) == (Rule.NOT_JOINED, (1,))


def test_ranks_that_have_not_launched_what_each_other_waits_for_deadlock():
    late = on_devices(5 * MINUTE, late=range(4), progress=Progress.BOTH)

    hang_now = verdict(*late)

    assert named(hang_now) == (Rule.DEADLOCK, ())
    assert hang_now is not None
    assert "has not launched AllReduce 31" in hangs.headline(hang_now)


def test_nobody_is_named_if_all_devices_wait_and_their_library_says_nothing():
    hang_now = verdict(*(each._replace(computes=False) for each in on_devices(16 * MINUTE)))

    assert named(hang_now) == (Rule.ALL_WAIT, ())
    assert hang_now is not None
    assert not hang_now.may_stop
    assert hangs.headline(hang_now).startswith("all ranks wait for their devices, for 16 min")


def test_ranks_that_horovod_misses_are_named_although_it_prints_and_sends_all_the_time():
    """The coordinator, rank 0, says which ranks have not submitted which tensors."""

    def told(*late: Late, still_s: float = 6 * MINUTE) -> tuple[Standing, ...]:
        first, *rest = others(still_s, quiet_s=10.0, moved_bytes_s=5e4)
        return (first._replace(late=late), *rest)

    behind = verdict(*told(Late(2, ("loss", "lr"))))

    assert named(behind) == (Rule.NOT_JOINED, (2,))
    assert behind is not None
    assert behind.may_stop
    assert "rank 2 on node 1 is stuck in allreduce" in hangs.headline(behind)
    assert "has not launched loss" in hangs.headline(behind)
    assert verdict(*told(Late(2, ("loss",)), still_s=4 * MINUTE)) is None
    # That was said before rank 2 came to its place, so it may have submitted the tensor since.
    first, *rest = told(Late(1, ("loss",)), Late(2, ("loss",)), still_s=7 * MINUTE)
    rest[1] = rest[1]._replace(still_s=6 * MINUTE)
    assert verdict(first._replace(late_s=6 * MINUTE), *rest) is None
    assert named(verdict(first._replace(late_s=5 * MINUTE), *rest)) == (Rule.NOT_JOINED, (1, 2))
    # Each waits for a tensor of the other.
    crossed = verdict(
        *told(Late(2, ("loss",)), Late(0, ("lr",)), Late(1, ("lr",)), Late(3, ("lr",)))
    )
    assert named(crossed) == (Rule.DEADLOCK, ())
    # A rank that sleeps is certain enough to end the job also if it sleeps in an event loop.
    asleep = idles(2, 6 * MINUTE, Wait.EVENTS)
    waiting = [each for each in told(Late(2, ("loss",))) if each.rank != 2]
    hang_now = verdict(asleep, *waiting)
    assert named(hang_now) == (Rule.ONE_IDLE, (2,))
    assert hang_now is not None
    assert hang_now.confidence is Confidence.HIGH
