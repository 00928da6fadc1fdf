"""When mpirun counts as hung, whether it is restarted, and what is reported."""

from __future__ import annotations

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.control import startup_timeout

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
    assert startup_timeout.patience_s(nodes, timeout_s, attempt) == expected


@pytest.mark.parametrize(
    ("attempt", "started", "expected"),
    [(1, {}, True), (2, {}, False), (1, {0: 0}, False), (2, {0: 0}, False)],
)
def test_only_a_start_without_ranks_is_repeated(
    attempt: int, started: dict[int, int], expected: bool
):
    assert startup_timeout.may_try_again(attempt, started) is expected


def test_a_node_without_ranks_is_named():
    failure = startup_timeout.hung(
        "mpirun", NodeEnv(hosts=HOSTS, slots=2), 6, {0: 0, 1: 0, 4: 2}, 1, 23.0
    )

    assert failure == Failure(
        node=1,
        host="b",
        exit_code=125,
        message="starting the ranks: mpirun started 3 of 6 and then hung for 23 s"
        "; without a rank: node 1 (b)",
    )


def test_when_no_rank_has_started_no_node_is_blamed():
    failure = startup_timeout.hung("mpirun", NodeEnv(hosts=HOSTS, slots=1), 3, {}, 2, 46.0)

    assert (failure.node, failure.host) == (None, "")
    assert failure.message == (
        "starting the ranks: mpirun started 0 of 3 and then hung for 46 s, at the second try, too"
        "; without a rank: node 0 (a), node 1 (b), node 2 (c)"
    )


def test_a_node_that_may_have_no_rank_is_not_named():
    """If OPENMPI_NP is below the number of slots, it is unknown which nodes get ranks."""
    failure = startup_timeout.hung("mpirun", NodeEnv(hosts=HOSTS, slots=2), 4, {0: 0}, 1, 23.0)

    assert failure.node is None
    assert "without a rank" not in failure.message


def test_a_node_on_which_every_rank_started_is_not_named():
    """Two ranks are missing, but every node has at least one rank."""
    failure = startup_timeout.hung(
        "mpirun", NodeEnv(hosts=HOSTS, slots=2), 6, {0: 0, 2: 1, 4: 2}, 1, 23.0
    )

    assert failure.node is None
    assert failure.message.endswith("hung for 23 s")


def test_a_message_names_only_some_of_many_nodes():
    hosts = tuple("h%d" % index for index in range(1000))
    failure = startup_timeout.hung("mpirun", NodeEnv(hosts=hosts, slots=1), 1000, {0: 0}, 1, 600.0)

    assert failure.node == 1
    assert failure.message.endswith("node 7 (h7), node 8 (h8) and 991 more")
