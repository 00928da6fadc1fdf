"""What a thread waits for follows from its innermost calls and its function of the kernel."""

from __future__ import annotations

import pytest

from jobentry.contract.stacks import Frame, NativeCall, ThreadStack
from jobentry.contract.waits import (
    Wait,
    cause_of,
    is_message,
    is_ours,
    operation,
    operation_of,
    place_of,
    reads_back,
    wait_in_libraries,
)

SITE = "/x/lib/python3.11/site-packages/"
MAIN = Frame("train.py", 50, "main", "train_step(step)")
OWN = Frame("train.py", 12, "step", "compute()")


def call(file: str, function: str = "f", source: str = "") -> Frame:
    return Frame(file, 1, function, source)


def wait(*frames: Frame, state: str = "S", waits_in: str = "") -> Wait:
    return cause_of(ThreadStack(7, state, waits_in, False, frames)).wait


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ((call("a.py", source="comm.Allreduce(a, b)"), MAIN), Wait.RANKS),
        ((call(SITE + "torch/distributed/distributed_c10d.py", "all_reduce"), MAIN), Wait.RANKS),
        ((call("a.py", source="sock.recv(1024)"), MAIN), Wait.NOTHING),
        ((call(SITE + "torch/distributed/rendezvous.py"), MAIN), Wait.START),
        (
            (
                call(SITE + "torch/distributed/distributed_c10d.py", "_store_based_barrier"),
                call(SITE + "torch/distributed/distributed_c10d.py", "init_process_group"),
                MAIN,
            ),
            Wait.START,
        ),
        (
            (
                call("<frozen importlib._bootstrap>", "_call_with_frames_removed"),
                call("a.py", source="from mpi4py import MPI"),
            ),
            Wait.START,
        ),
        ((call("a.py", source="from mpi4py import MPI"),), Wait.START),
        (
            (call("<frozen importlib._bootstrap>"), call("a.py", source="import torch")),
            Wait.NOTHING,
        ),
        ((call(SITE + "torch/cuda/__init__.py", "synchronize"), OWN), Wait.DEVICE),
        ((), Wait.NOTHING),
    ],
)
def test_calls_that_wait_even_while_the_thread_runs(frames: tuple[Frame, ...], expected: Wait):
    assert wait(*frames, state="R") is expected


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (("sched_yield", "opal_progress", "PMPI_Barrier", "main"), Wait.RANKS),
        (("epoll_wait", "MPI_Recv", "solve", "main"), Wait.RANKS),
        (("pthread_cond_wait", "gloo::transport::tcp::UnboundBuffer::waitRecv"), Wait.RANKS),
        (("poll", "PMPI_Init_thread", "main"), Wait.START),
        (("recv", "c10d::TCPStore::doWait", "c10d::TCPStore::wait"), Wait.RANKS),
        (("pthread_cond_wait", "c10d::Reducer::finalize_backward"), Wait.RANKS),
        (
            ("pthread_cond_timedwait", "mindspore::ps::core::AbstractNode::CollectiveWait"),
            Wait.RANKS,
        ),
        (("ioctl", "cuStreamSynchronize", "cudaStreamSynchronize"), Wait.DEVICE),
        (("compute", "main"), Wait.NOTHING),
        (("MPI_Comm_rank", "main"), Wait.NOTHING),
        (("MPI_Type_commit", "main"), Wait.NOTHING),
        ((), Wait.NOTHING),
    ],
)
def test_native_calls_say_what_a_program_waits_for(functions, expected):
    native = tuple(NativeCall(function, "libx.so") for function in functions)
    thread = ThreadStack(7, "R", "", False, (), native=native)
    assert cause_of(thread).wait is expected


@pytest.mark.parametrize(
    "source",
    ["v = x.sum().item()", "y = out.cpu().numpy()", "event.synchronize()", "z = a.to('cpu')"],
)
@pytest.mark.parametrize("state", ["R", "S"])
def test_a_process_with_a_device_waits_for_it_where_it_reads_a_value_back(source: str, state: str):
    frames = (call("a.py", source=source), MAIN)

    def wait_now(*, uses_device: bool) -> Wait:
        return cause_of(ThreadStack(7, state, "", False, frames, uses_device)).wait

    assert wait_now(uses_device=True) is Wait.DEVICE
    assert wait_now(uses_device=False) is not Wait.DEVICE


@pytest.mark.parametrize(
    ("innermost", "waits_in", "expected"),
    [
        (OWN, "futex_wait_queue", Wait.LOCK),
        (OWN, "hrtimer_nanosleep", Wait.SLEEP),
        (OWN, "wait_for_partner", Wait.FILE),
        (OWN, "do_sys_poll", Wait.OTHER),
        (OWN, "", Wait.OTHER),
        (call("a.py", source="time.sleep(600)"), "", Wait.SLEEP),
        (call("a.py", source="answer = input('go on? ')"), "wait_woken", Wait.INPUT),
        (call("a.py", source="batch = self.input(0)"), "wait_woken", Wait.NETWORK),
        # The kernel knows only that these wait for events.
        (call("/usr/lib/python3.11/ssl.py"), "poll_schedule_timeout", Wait.NETWORK),
        (call(SITE + "torch/utils/data/dataloader.py"), "poll_schedule_timeout", Wait.DATA),
        (call("/usr/lib/python3.11/pdb.py"), "poll_schedule_timeout", Wait.INPUT),
        (OWN, "poll_schedule_timeout", Wait.EVENTS),
        (call("/usr/lib/python3.11/subprocess.py"), "do_wait", Wait.CHILD),
        (call("/usr/lib/python3.11/threading.py"), "", Wait.LOCK),
        (call("my_threading.py"), "", Wait.OTHER),
    ],
)
def test_what_a_blocked_thread_waits_for(innermost: Frame, waits_in: str, expected: Wait):
    assert wait(innermost, MAIN, waits_in=waits_in) is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [("T", Wait.STOPPED), ("t", Wait.STOPPED), ("Z", Wait.STOPPED), ("D", Wait.KERNEL)],
)
def test_the_state_of_a_process_counts_more_than_its_calls(state: str, expected: Wait):
    assert wait(OWN, state=state, waits_in="futex") is expected


def test_operations_have_one_name_whatever_the_library():
    torch = SITE + "torch/distributed/distributed_c10d.py"

    assert operation([call("a.py", source="comm.Iallreduce(a)")]) == "allreduce"
    assert operation([call(torch, "all_reduce")]) == "allreduce"
    assert operation([call("a.py", source="x = comm.recv(source=1)")]) == "recv"
    assert operation([OWN]) == ""
    ended = ThreadStack(7, "S", "", False, (), native=(NativeCall("ompi_mpi_finalize", "x"),))
    assert operation_of(ended) == "finalize"
    backward = NativeCall("c10d::Reducer::finalize_backward", "x")
    assert operation_of(ended._replace(frames=(OWN,), native=(backward,))) == "backward"
    # Only the innermost call that waits counts: those below it may have returned.
    split = tuple(NativeCall(name, "x") for name in ("opal_progress", "MPI_Comm_split"))
    send = NativeCall("PMPI_Send", "x")
    assert operation_of(ended._replace(frames=(OWN,), native=split)) == "commsplit"
    assert operation_of(ended._replace(frames=(OWN,), native=(send, *split))) == ""
    lock, key = NativeCall("PMPI_Win_lock", "x"), NativeCall("c10d::TCPStore::doWait", "x")
    flush = NativeCall("MPI_Win_flush", "x")
    assert operation_of(ended._replace(frames=(OWN,), native=(lock,))) == "winlock"
    assert operation_of(ended._replace(frames=(OWN,), native=(flush,))) == "winflush"
    in_store = ended._replace(frames=(OWN,), native=(key,))
    assert operation_of(in_store) == "store"
    assert cause_of(in_store).text == "waiting for other ranks (c10d::TCPStore::doWait)"
    assert [is_message(name) for name in ("recv", "send", "bcast", "barrier", "wait")] == [
        True, True, False, False, True,
    ]  # fmt: skip


def test_the_place_is_the_innermost_call_of_the_job():
    library = call(SITE + "horovod/torch/mpi_ops.py")
    starter = call("/tmp/x/script_runner.py", "main")

    elsewhere = call("/opt/packages/torch/distributed/distributed_c10d.py")
    of_the_job = call("torch/model.py")

    assert place_of([library, elsewhere, OWN, MAIN, starter]) is OWN
    assert place_of([elsewhere, of_the_job, MAIN]) is of_the_job
    assert place_of([library, starter]) is library
    assert place_of([]) is None


def test_our_own_calls_are_not_those_of_the_job():
    """They load mpi4py for the script, so they stand below the import of a rank that waits."""
    ours = call("/.machine/home/entry/jobentry/rank/crash_file.py", "load_mpi")

    assert is_ours(ours.file)
    assert not is_ours("/home/user/crash_file.py")
    assert place_of((ours, MAIN)) == MAIN


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        # A data loader waits in a queue, a device in a function of its library.
        (
            (
                call("/usr/lib/python3.11/multiprocessing/connection.py", "poll"),
                call("/usr/lib/python3.11/multiprocessing/queues.py", "get"),
                call(SITE + "torch/utils/data/dataloader.py", "_try_get_data"),
                MAIN,
            ),
            Wait.DATA,
        ),
        ((call(SITE + "torch/cuda/__init__.py", "synchronize"), MAIN), Wait.DEVICE),
        ((call("/usr/lib/python3.11/socket.py", "readinto"), MAIN), Wait.NETWORK),
        (
            (
                call("/usr/lib/python3.11/socket.py", "readinto"),
                call(SITE + "torch/utils/data/dataloader.py", "_try_get_data"),
                MAIN,
            ),
            Wait.DATA,
        ),
        ((call("/usr/lib/python3.11/queue.py", "get"), MAIN), None),
        ((MAIN,), None),
    ],
)
def test_what_libraries_wait_for_is_seen_between_the_innermost_call_and_the_jobs_own(
    frames: tuple[Frame, ...], expected: Wait | None
):
    assert wait_in_libraries(frames) is expected
    assert (wait(*frames, waits_in="poll_schedule_timeout") is Wait.DATA) == (expected is Wait.DATA)


def test_values_are_read_back_where_the_source_says_so():
    assert reads_back(call("a.py", source="total += loss.item()"))
    assert not reads_back(call("a.py", source="total += items[0]"))
