"""Detects whether mpirun hangs while it starts the ranks, and decides what to do. No I/O.

Open MPI 5.0.11 sometimes hangs while it starts, and neither version ends such a start by itself (in
experiments, both waited for a hung agent forever, whatever their timeouts).
"""

from __future__ import annotations

from typing import Mapping

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.control import node_table

# Seconds in which no rank starts before a start counts as hung: 32 nodes on two cores took 16 s.
_PATIENCE_S = 20.0
_PER_NODE_S = 1.0
_ATTEMPTS = 2


def patience_s(nodes: int, start_timeout_s: float, attempt: int) -> float:
    """Return the seconds without a new rank after which mpirun counts as hung.

    Args:
        attempt: 1 or 2. A second hang may only be slowness, so the second has twice the time.
    """
    return min(start_timeout_s, attempt * (_PATIENCE_S + _PER_NODE_S * nodes))


def may_try_again(attempt: int, started: Mapping[int, int]) -> bool:
    """Whether mpirun may be started again.

    A rank that has started runs the user's script, which is never run twice behind the user's back.
    """
    return attempt < _ATTEMPTS and not started


def hung(
    launch_end: str,
    node: NodeEnv,
    ranks: int,
    started: Mapping[int, int],
    attempt: int,
    waited_s: float,
) -> Failure:
    """Return the failure to report for a start that hangs.

    Args:
        launch_end: The name of the process that starts the ranks.
        node: The settings of the head.
        ranks: How many there should be.
        started: The ranks that have started, with their nodes.
        waited_s: Seconds since the last rank started.
    """
    hosts, slots = node.hosts, node.slots
    text = "starting the ranks: %s started %d of %d and then hung for %g s" % (
        launch_end,
        len(started),
        ranks,
        waited_s,
    )
    if attempt > 1:
        text += ", at the second try, too"
    # With fewer ranks than slots some nodes may have none to start.
    fills = ranks > slots * (len(hosts) - 1)
    silent = sorted(set(range(len(hosts))) - set(started.values())) if fills else []
    if silent:
        text += "; without a rank: " + node_table.named(silent, hosts)
    blamed = silent[0] if silent and len(silent) < len(hosts) else None
    return Failure(
        node=blamed,
        host="" if blamed is None else hosts[blamed],
        exit_code=exits.ENTRY_FAILED,
        message=text,
    )
