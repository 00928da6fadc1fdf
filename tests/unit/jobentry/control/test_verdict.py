"""The verdict: the outcome of a job for given ends of its ranks and its launcher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure
from jobentry.control.verdict import (
    LaunchEnd,
    Outcome,
    RankEnd,
    correction,
    decide,
    explained,
    hung_start,
    losses,
    may_start_again,
    start_patience_s,
)

SUCCEEDED = LaunchEnd("mpirun", 0, ())
FAILED = LaunchEnd("mpirun", 1, ("a rank ended badly",))


def end(
    rank: int,
    code: int = 0,
    *,
    at_s: float = 100.0,
    number: int | None = None,
    was_asked_to_end: bool = False,
    is_reported: bool = True,
) -> RankEnd:
    """Return how a rank ended."""
    message = f"rank {rank} says {code}"
    failure = Failure(0, "a", rank, signal=number, exit_code=code, message=message)
    return RankEnd(at_s, was_asked_to_end, is_reported, failure)


def outcome_of(*ends: RankEnd, mpirun: LaunchEnd = FAILED, ranks: int = 4) -> Outcome:
    """Return the outcome of a job whose ranks all started."""
    by_rank = {one.failure.rank or 0: one for one in ends}
    return decide(by_rank, dict.fromkeys(range(ranks), 0), ranks, mpirun)


@pytest.mark.parametrize(
    ("code", "number", "was_asked_to_end", "is_failure"),
    [
        (0, None, False, False),
        (3, None, False, True),
        (143, 15, True, False),
        (3, None, True, True),
        (139, 11, False, True),
    ],
)
def test_a_rank_that_was_stopped_is_not_blamed(
    code: int, number: int | None, was_asked_to_end: bool, is_failure: bool
):
    assert end(0, code, number=number, was_asked_to_end=was_asked_to_end).is_failure == is_failure


def test_a_job_whose_ranks_succeed_ends_with_0():
    assert outcome_of(*(end(rank) for rank in range(4)), mpirun=SUCCEEDED) == Outcome(0)


LOST_DAEMON = (
    "ORTE has lost communication with a remote daemon.",
    "  HNP daemon   : [[56685,0],0] on node worker-0",
    "  Remote daemon: [[56685,0],1] on node worker-1",
)


@pytest.mark.parametrize(
    ("ends", "mpirun_code", "code"),
    [
        # Open MPI 4.1, whose ranks on that node exit with 195 or 205.
        ([], 205, 205),
        ([end(1, 195)], 205, 205),
        ([end(1, 205)], 205, 205),
        # Open MPI 5.0, which stops its own ranks and then exits with 0.
        ([end(0, 137, number=9, was_asked_to_end=True)], 0, 137),
        ([end(2, 137, number=9, is_reported=False)], 0, 137),
    ],
)
def test_the_node_of_a_daemon_that_mpirun_has_lost_is_blamed(
    ends: list[RankEnd], mpirun_code: int, code: int
):
    outcome = outcome_of(*ends, mpirun=LaunchEnd("mpirun", mpirun_code, LOST_DAEMON))

    assert (outcome.exit_code, outcome.cause) == (code, "platform")
    assert outcome.failure is not None
    assert (outcome.failure.host, outcome.failure.rank) == ("worker-1", None)
    assert outcome.failure.message.startswith("mpirun lost its daemon there")


@pytest.mark.parametrize(
    ("started", "cause", "host"), [(4, "platform", "worker-1"), (2, "entry", "")]
)
def test_a_daemon_that_ended_after_all_ranks_had_started_was_lost(
    started: int, cause: str, host: str
):
    """Open MPI 5.0 prints the same about a daemon that never started."""
    lines = (
        "A daemon failed to report back after being spawned. This could",
        "  Local host:    worker-0",
        "  Remote host:   worker-1",
        "  Daemon exit status: 137",
    )
    outcome = decide({}, dict.fromkeys(range(started), 0), 4, LaunchEnd("mpirun", 137, lines))

    assert outcome.cause == cause
    assert outcome.failure is not None
    assert outcome.failure.host == host


def test_a_rank_that_failed_by_itself_is_blamed_and_not_the_daemon_that_was_lost_then():
    outcome = outcome_of(end(2, 3), mpirun=LaunchEnd("mpirun", 205, LOST_DAEMON))

    assert (outcome.exit_code, outcome.cause) == (3, "user")
    assert outcome.failure is not None
    assert outcome.failure.rank == 2


def test_a_daemon_lost_in_the_first_attempt_does_not_fail_the_job():
    every = [end(rank) for rank in range(4)]

    assert outcome_of(*every, mpirun=LaunchEnd("mpirun", 0, LOST_DAEMON)) == Outcome(0)


def test_a_rank_that_never_reported_its_end_is_lost():
    """Open MPI 5.0.11 exits with 0 even if a rank is gone."""
    outcome = outcome_of(end(0), end(1), end(3), mpirun=SUCCEEDED)

    assert (outcome.exit_code, outcome.cause) == (137, "platform")
    assert outcome.failure is not None
    assert outcome.failure.rank == 2


def test_the_first_rank_to_fail_is_blamed():
    outcome = outcome_of(end(0, 5, at_s=100.2), end(1, 3, at_s=100.1), end(2, 4, at_s=100.3))

    assert outcome == Outcome(3, "user", end(1, 3).failure)


def test_a_rank_that_got_sigterm_comes_after_one_that_did_not():
    outcome = outcome_of(end(0, 1, at_s=99.0, was_asked_to_end=True), end(1, 3, at_s=100.0))

    assert outcome.exit_code == 3


def test_a_killed_rank_wrapper_is_blamed_last():
    outcome = outcome_of(
        end(0, 137, at_s=99.0, number=9, is_reported=False), end(1, 3, at_s=100.0), mpirun=FAILED
    )

    assert outcome.exit_code == 3
    only = outcome_of(end(0, 137, number=9, is_reported=False))
    assert (only.exit_code, only.cause) == (137, "user")


def test_a_rank_that_lost_a_connection_is_not_the_cause():
    lines = ("*** An error occurred in Socket closed", "*** reported by process [3221,2]")
    outcome = outcome_of(
        end(2, 14, at_s=100.0),
        end(1, 139, at_s=100.01, number=11),
        mpirun=LaunchEnd("mpirun", 14, lines),
    )

    assert outcome.exit_code == 139


BY_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
SHUT_DOWN = (
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by"
    " an exception on one of the ranks or an attempt to allreduce a tensor after one of the ranks"
    " finished execution."
)


def lost_connection_end(rank: int, *, at_s: float = 100.0, message: str = BY_PEER) -> RankEnd:
    """Return the end of a rank whose connection another rank has closed."""
    one = end(rank, 1, at_s=at_s)
    return one._replace(failure=one.failure._replace(message=message))


@pytest.mark.parametrize("message", [BY_PEER, SHUT_DOWN])
def test_a_rank_that_closed_a_connection_is_blamed_first(message: str):
    outcome = outcome_of(lost_connection_end(0, at_s=99.99, message=message), end(3, 7, at_s=100.0))

    assert outcome == Outcome(7, "user", end(3, 7).failure)


def test_a_lost_connection_is_the_cause_if_no_other_rank_failed():
    """It may be a connection to any other service."""
    lost = lost_connection_end(0, message="ConnectionResetError: Connection reset by peer")

    assert outcome_of(lost, end(1, 0, at_s=99.0)) == Outcome(1, "user", lost.failure)


GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection reset by peer [127.0.0.1]:1"


def test_a_rank_that_left_early_is_blamed_for_the_connection_to_it_that_another_lost():
    """Without MPI nothing but the other rank's message shows that ranks were still needed."""
    outcome = outcome_of(
        lost_connection_end(0, message=GLOO),
        end(1, 0, at_s=99.0),
        mpirun=LaunchEnd("torchrun", 1, ()),
    )

    assert outcome.failure is not None
    assert (outcome.exit_code, outcome.failure.rank) == (1, 1)
    assert outcome.failure.message == "ended with exit code 0 while other ranks continued"


def test_a_rank_that_exits_without_finalize_is_blamed():
    lines = ("mpirun has exited due to process rank 2 with PID 77 on node a exiting improperly",)
    outcome = outcome_of(
        end(2, 0, at_s=99.0),
        end(1, 1, at_s=100.0, is_reported=False),
        mpirun=LaunchEnd("mpirun", 1, lines),
    )

    assert (outcome.exit_code, outcome.cause) == (1, "user")
    assert outcome.failure is not None
    assert outcome.failure.rank == 2
    assert "without MPI_Finalize" in outcome.failure.message


def test_an_mpi_abort_is_named_in_the_message():
    lines = ("MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD",)
    outcome = outcome_of(end(1, 7), mpirun=LaunchEnd("mpirun", 7, lines))

    assert outcome.failure is not None
    assert (outcome.exit_code, outcome.failure.message) == (7, "called MPI_Abort(7)")


def test_a_missing_pmix_of_srun_is_reported_with_a_hint():
    lines = (
        "srun: error: MPI: Unable to load any plugin",
        "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types",
    )

    outcome = decide({}, {}, 2, LaunchEnd("srun", 1, lines))

    assert (outcome.exit_code, outcome.cause) == (125, "entry")
    assert outcome.failure is not None
    assert outcome.failure.last_lines == lines
    assert outcome.failure.message == (
        "srun ended with exit code 1 before all ranks had started: Slurm cannot load its PMIx here:"
        " it needs libpmix.so (Debian has it in libpmix-dev); `slurm.mpi: ssh` does not need it"
    )


def test_a_failing_mpirun_without_a_failed_rank_is_classified():
    """If all ranks had started, the user's code failed; otherwise the entry did."""
    assert decide({}, {0: 0}, 1, LaunchEnd("mpirun", 9, ("a", "b"))) == Outcome(
        9,
        "user",
        Failure(exit_code=9, message="mpirun ended with exit code 9", last_lines=("a", "b")),
    )
    assert decide({}, {}, 1, LaunchEnd("mpirun", -11, ())) == Outcome(
        125,
        "entry",
        Failure(
            exit_code=125,
            message="mpirun ended with exit code 139 before all ranks had started",
        ),
    )


ENDS = st.builds(
    end,
    rank=st.integers(0, 3),
    code=st.sampled_from([0, 1, 3, 14, 137, 139, 143]),
    at_s=st.floats(99, 101),
    number=st.none() | st.sampled_from([9, 11, 15]),
    was_asked_to_end=st.booleans(),
    is_reported=st.booleans(),
)
LINES = st.lists(
    st.sampled_from(
        [
            "reported by process [1,0]",
            "reported by process [1,3]",
            "process rank 2 with PID 7",
            "MPI_ABORT was invoked on rank 1",
            "x",
        ]
    )
)


@given(st.lists(ENDS, max_size=4), st.integers(-15, 255), LINES)
def test_a_job_that_failed_is_never_a_success(ends: list[RankEnd], code: int, lines: list[str]):
    """The exit code is 0 only if mpirun and every rank succeeded; otherwise there is a failure."""
    mpirun = LaunchEnd("mpirun", code, lines)
    outcome = outcome_of(*ends, mpirun=mpirun)
    last = {one.failure.rank: one for one in ends}
    is_well = code == 0 and len(last) == 4 and not any(one.is_failure for one in last.values())

    assert (outcome.exit_code == 0) == is_well
    assert (outcome.failure is None) == is_well
    assert 0 <= outcome.exit_code <= 255


def test_the_exit_of_a_rank_that_lost_its_peer_is_recognised():
    assert end(3, 14).has_lost_connection
    assert not end(3, 7).has_lost_connection
    assert lost_connection_end(3).has_lost_connection


def test_a_rank_that_exits_with_0_may_be_the_cause_of_an_earlier_failure():
    ends = {1: end(1, 0, at_s=100.005), 3: end(3, 14, at_s=100.0)}

    outcome = decide(ends, {0: 0, 1: 0, 2: 1, 3: 1}, 4, LaunchEnd("mpirun", 14, ()))

    assert outcome.failure is not None
    assert outcome.failure.rank == 1


@pytest.mark.parametrize(
    ("named", "text"),
    [(1, ""), (None, ""), (0, "rank 1 on node 0 (a) failed before rank 0: rank 1 says 7")],
)
def test_the_log_names_the_rank_that_the_report_blames(named: int | None, text: str):
    outcome = outcome_of(end(0, 1, at_s=100.5), end(1, 7, at_s=100.0))

    assert correction(outcome, named) == text
    assert correction(Outcome(0), named) == ""


# What libraries print when another rank is gone; the rank then exits, or is aborted.
LOSSES = {
    "gloo": "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by"
    " peer [10.0.0.3]:48101",
    "gloo read": "[../gloo/transport/tcp/pair.cc:553] Read error [10.0.0.3]:4: timed out",
    "nccl": "ncclRemoteError: A call failed possibly due to a network error or a remote process"
    " exiting prematurely.",
    "nccl peer": "socketProgress: Connection closed by remote peer n3<59116>",
    "watchdog": "  what():  [Rank 1] Process group watchdog thread terminated with exception: NCCL"
    " error: remote process exited or there was a network error, NCCL version 2.21.5",
    "hccl": "[ERROR] error code is: 9, detail info: [ HCCL_E_REMOTE ]",
    "horovod": SHUT_DOWN,
    "open mpi": "[n1][[5,1],0][btl_tcp_frag.c:242:mca_btl_tcp_frag_recv] mca_btl_tcp_frag_recv:"
    " readv failed: Connection reset by peer (104)",
    "mindspore": "[ERROR] DISTRIBUTED(9): [meta_server_node.cc:300] UpdateTopoState] The node: 3 is"
    " timed out. It may exit with exception, please check this node's log.",
}


@pytest.mark.parametrize("line", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("number", [None, 6])
def test_a_rank_whose_library_reports_the_loss_of_another_is_not_the_cause(
    line: str, number: int | None
):
    """Its message may not say so: a C++ program exits with a code, or is aborted."""
    first = end(3, 139, at_s=100.0, number=11)
    failure = Failure(0, "a", 0, number, 134 if number else 1, "RuntimeError: step failed", (line,))
    # It reports its end first: the crashed rank still writes its core file.
    victim = RankEnd(99.7, False, True, failure)
    outcome = outcome_of(victim, first)

    assert outcome.failure == first.failure
    assert losses(outcome, {0: victim, 3: first}) == (
        "rank 0 lost rank 3, which had failed at the same time"
    )


@pytest.mark.parametrize(
    "line",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "urllib3: retrying after connection broken by 'Connection closed'",
        "NCCL INFO Channel 00/0 : 1[c5000] -> 0[29000] via P2P/IPC/read",
        "gloo/transport/tcp/pair.cc",
        "train: the node: 3 is slow",
    ],
)
def test_lines_about_other_connections_do_not_excuse_a_rank(line: str):
    failure = Failure(0, "a", 0, None, 1, "ValueError: no data", (line,))
    first = RankEnd(100.0, False, True, failure)

    assert not first.has_lost_connection
    assert outcome_of(first, end(1, 3, at_s=100.4)).failure == failure


def test_ranks_that_lost_the_first_one_are_named_with_the_time():
    ends = {rank: lost_connection_end(rank, at_s=100.4 + rank) for rank in range(3)}
    ends[3] = end(3, 139, at_s=100.0, number=11)
    ends[4] = end(4, 143, at_s=100.5, number=15, was_asked_to_end=True)
    ends[5] = end(5, 3, at_s=100.5)
    outcome = outcome_of(*ends.values(), ranks=6)

    assert losses(outcome, ends) == "ranks 0, 1, 2 lost rank 3, which had failed 0.4 s earlier"


def test_a_rank_that_left_early_is_named_as_lost():
    ends = {0: lost_connection_end(0, message=GLOO), 1: end(1, 0, at_s=99.0)}
    outcome = outcome_of(*ends.values(), mpirun=LaunchEnd("torchrun", 1, ()))

    assert losses(outcome, ends) == "rank 0 lost rank 1, which had ended 1.0 s earlier"


MINDSPORE = (
    "[ERROR] DISTRIBUTED(8102,7f8c4cff96c0,python): [collective_ops_impl.cc:162] RunRingAllReduce]"
    " Ring ReduceScatter wait receiving [1,5] failed.",
    "RuntimeError: Launch kernel failed, name:Default/AllReduce-op0",
)
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"
    " operation to complete",
)
STANDS = "rank 1 on node 1 is stuck in load() at data.py:17 (sleeping)"


@pytest.mark.parametrize(
    ("lines", "stands", "names"),
    [
        (MINDSPORE, STANDS, True),
        (TIMED_OUT, STANDS, True),
        (MINDSPORE, "", False),
        (("ValueError: no data",), STANDS, False),
    ],
)
def test_a_rank_that_has_waited_for_too_long_names_the_one_that_stood(
    lines: tuple[str, ...], stands: str, names: bool
):
    failure = Failure(0, "a", 0, None, 1, lines[-1], lines)
    ends = {0: RankEnd(100.0, False, True, failure), 1: end(1, 143, number=15)}

    outcome = explained(Outcome(1, Cause.USER, failure), ends, stands)

    more = f": it waited for too long; {STANDS}" if names else ""
    assert outcome.failure == failure._replace(message=lines[-1] + more)


def test_only_some_of_many_ranks_are_named():
    ends = {rank: lost_connection_end(rank, at_s=101.0) for rank in range(100)}
    ends[100] = end(100, 9, at_s=100.0)
    text = losses(outcome_of(*ends.values(), ranks=101), ends)

    assert text.startswith("ranks 0, 1, 2, ")
    assert text.endswith(" 15 and 84 more lost rank 100, which had failed 1.0 s earlier")


@pytest.mark.parametrize("failure", [None, Failure(message="mpirun lost"), Failure(rank=9)])
def test_no_rank_has_lost_one_that_is_not_known(failure: Failure | None):
    ends = {0: lost_connection_end(0), 1: end(1, 3)}

    assert losses(Outcome(1, "user", failure), ends) == ""


# -- a start that hangs ---------------------------------------------------------------------------

HOSTS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("nodes", "timeout_s", "attempt", "expected"),
    [
        (2, 600.0, 1, 22.0),
        (2, 600.0, 2, 44.0),
        (32, 600.0, 1, 52.0),
        (1000, 600.0, 1, 600.0),
        (2, 5.0, 1, 5.0),
        (2, 5.0, 2, 5.0),
    ],
)
def test_the_startup_timeout_grows_with_the_nodes(
    nodes: int, timeout_s: float, attempt: int, expected: float
):
    """It is far below the limit for a start, never above it, and doubles at the second attempt."""
    assert start_patience_s(nodes, timeout_s, attempt) == expected


@pytest.mark.parametrize(
    ("attempt", "started", "expected"),
    [(1, {}, True), (2, {}, False), (1, {0: 0}, False), (2, {0: 0}, False)],
)
def test_only_a_start_without_ranks_is_repeated(
    attempt: int, started: dict[int, int], expected: bool
):
    assert may_start_again(attempt, started) is expected


def test_a_node_without_ranks_is_named():
    failure = hung_start("mpirun", NodeEnv(hosts=HOSTS, slots=2), 6, {0: 0, 1: 0, 4: 2}, 1, 23.0)

    assert failure == Failure(
        node=1,
        host="b",
        exit_code=125,
        message="starting the ranks: mpirun started 3 of 6 and then hung for 23 s"
        "; without a rank: node 1 (b)",
    )


def test_when_no_rank_has_started_no_node_is_blamed():
    failure = hung_start("mpirun", NodeEnv(hosts=HOSTS, slots=1), 3, {}, 2, 46.0)

    assert (failure.node, failure.host) == (None, "")
    assert failure.message == (
        "starting the ranks: mpirun started 0 of 3 and then hung for 46 s, at the second try, too"
        "; without a rank: node 0 (a), node 1 (b), node 2 (c)"
    )


def test_a_node_that_may_have_no_rank_is_not_named():
    """If OPENMPI_NP is below the number of slots, it is unknown which nodes get ranks."""
    failure = hung_start("mpirun", NodeEnv(hosts=HOSTS, slots=2), 4, {0: 0}, 1, 23.0)

    assert failure.node is None
    assert "without a rank" not in failure.message


def test_a_node_on_which_every_rank_started_is_not_named():
    """Two ranks are missing, but every node has at least one rank."""
    failure = hung_start("mpirun", NodeEnv(hosts=HOSTS, slots=2), 6, {0: 0, 2: 1, 4: 2}, 1, 23.0)

    assert failure.node is None
    assert failure.message.endswith("hung for 23 s")


def test_a_message_names_only_some_of_many_nodes():
    hosts = tuple("h%d" % index for index in range(1000))
    failure = hung_start("mpirun", NodeEnv(hosts=hosts, slots=1), 1000, {0: 0}, 1, 600.0)

    assert failure.node == 1
    assert failure.message.endswith("node 7 (h7), node 8 (h8) and 991 more")
