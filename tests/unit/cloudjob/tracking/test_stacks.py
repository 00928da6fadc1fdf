"""Stacks of ranks are merged, and those that do not wait for others come first."""

from __future__ import annotations

import pytest

from cloudjob.tracking.stacks import JobStacks, merged
from jobentry.contract.stacks import Frame, ProcessStacks, Stacks, ThreadStack

MAIN = Frame("train.py", 50, "main", "train_step(step)")
REDUCE = Frame("train.py", 41, "train_step", "comm.Allreduce(MPI.IN_PLACE, grads)")
LOAD = Frame("data.py", 17, "load", "with open(path) as file:")


def process(
    rank: int,
    *frames: Frame,
    state: str = "S",
    waits_in: str = "",
    number: int = 0,
    child: str = "",
) -> ProcessStacks:
    number = number or 100 + rank
    thread = ThreadStack(number, state, waits_in, False, frames)
    command = child or "python train.py"
    return ProcessStacks(rank, rank // 2, number, command, not child, (thread,))


def merge(*processes: ProcessStacks) -> JobStacks:
    return merged(Stacks(0.0, processes))


def test_the_odd_rank_comes_first() -> None:
    ranks = [process(rank, REDUCE, MAIN, state="RS"[rank % 2]) for rank in (0, 1, 3)]

    stacks = merge(*ranks, process(2, LOAD, MAIN, waits_in="wait_for_partner"))

    assert [group.ranks for group in stacks.groups] == [(2,), (0, 1, 3)]
    assert [group.nodes for group in stacks.groups] == [(1,), (0, 1)]
    assert stacks.groups[0].does == "opening a pipe that no other process has opened"
    assert stacks.groups[1].does == "waiting for other ranks"
    assert (stacks.odd_ranks, stacks.waiting_ranks) == ((2,), (0, 1, 3))
    assert stacks.conclusion == "Ranks 0-1,3 wait for others; rank 2 does not."
    assert [group.who for group in stacks.groups] == ["rank 2 on node 1", "ranks 0-1,3"]


def test_nobody_is_named_if_all_wait_or_most_do_not() -> None:
    assert merge(process(0, REDUCE), process(1, REDUCE)).odd_ranks == ()
    assert merge(process(0, REDUCE), process(1, LOAD), process(2, LOAD)).odd_ranks == ()
    assert merge(process(0, LOAD), process(1, MAIN)).odd_ranks == ()
    assert merge().odd_ranks == ()


def test_one_rank_waits_for_another() -> None:
    stacks = merge(process(0, REDUCE), process(1, LOAD))

    assert stacks.conclusion == "Rank 0 waits for others; rank 1 does not."


def test_ranks_in_different_collectives_are_two_groups() -> None:
    barrier = Frame("train.py", 44, "train_step", "comm.Barrier()")

    stacks = merge(process(0, REDUCE), process(1, barrier), process(2, REDUCE))

    assert [group.ranks for group in stacks.groups] == [(1,), (0, 2)]
    assert stacks.odd_ranks == ()


def test_a_stopped_rank_that_was_in_a_collective_is_apart() -> None:
    stacks = merge(process(0, REDUCE), process(1, REDUCE, state="T"))

    assert {group.ranks: group.does for group in stacks.groups} == {
        (0,): "waiting for other ranks",
        (1,): "stopped by a signal",
    }
    assert stacks.odd_ranks == (1,)


def test_children_come_after_the_ranks_and_name_nobody() -> None:
    stacks = merge(
        process(0, LOAD, number=7, child="python worker 1"),
        process(1, LOAD, number=8, child="python worker 1"),
        process(0, REDUCE),
        process(1, REDUCE),
    )

    assert [(group.ranks, group.command) for group in stacks.groups] == [
        ((0, 1), ""),
        ((0, 1), "python worker 1"),
    ]
    assert stacks.groups[1].processes == (7, 8)
    assert stacks.odd_ranks == ()


def test_other_threads_come_after_main_threads() -> None:
    threads = (
        ThreadStack(100, "S", "futex_wait_queue", False, (MAIN,)),
        ThreadStack(101, "S", "hrtimer_nanosleep", False, (LOAD,)),
    )
    stacks = merge(ProcessStacks(0, 0, 100, "python", True, threads))

    assert [(group.is_main, group.does) for group in stacks.groups] == [
        (True, "waiting for a lock or another thread"),
        (False, "sleeping"),
    ]


@pytest.mark.parametrize(
    ("source", "file", "waits"),
    [
        ("comm.Barrier()", "a.py", True),
        ("dist.all_reduce(grad)", "a.py", True),
        ("request.Wait()", "a.py", True),
        ("data = comm.recv(source=1)", "a.py", True),
        ("hvd.allreduce_(x)", "a.py", True),
        ("", "/x/site-packages/torch/distributed/distributed_c10d.py", True),
        ("", "/x/site-packages/horovod/torch/mpi_ops.py", True),
        ("MPI.COMM_WORLD.send(x, dest=1)", "a.py", True),
        ("work.wait()", "a.py", True),
        ("self.comm.Gatherv(a, b)", "a.py", True),
        ("dist.broadcast_object_list(rows)", "a.py", True),
        ("sock.recv(1024)", "a.py", False),
        ("server.send(data)", "a.py", False),
        ("np.broadcast_to(a, shape)", "a.py", False),
        ("event.clear()", "a.py", False),
        ("send_mail(text)", "a.py", False),
        ("reduced = reduce(add, rows)", "a.py", False),
        ("", "/x/my_torch/distributed_c10d.py", False),
    ],
)
def test_calls_that_wait_for_other_ranks(source: str, file: str, waits: bool) -> None:
    (group,) = merge(process(0, Frame(file, 1, "f", source))).groups

    assert group.waits_for_ranks is waits


@pytest.mark.parametrize(
    ("state", "waits_in", "does"),
    [
        ("R", "", "running"),
        ("D", "nfs_wait_bit", "waiting in the kernel, not interruptible (nfs_wait_bit)"),
        ("S", "do_sys_poll_x", "waiting (do_sys_poll_x)"),
        ("S", "", "waiting"),
        ("t", "ptrace_stop", "stopped by a debugger"),
        ("Z", "", "ended, but its parent has not noticed"),
    ],
)
def test_the_state_is_told_in_words(state: str, waits_in: str, does: str) -> None:
    (group,) = merge(process(0, MAIN, state=state, waits_in=waits_in)).groups

    assert group.does == does
