"""When a job is over, which node is to blame, and what is done to the nodes that still run.

The controller of the process backend, the docker backend and the emulator tell ``decide`` what they
see, and carry out what it returns. Slurm's scripts follow the same rules in shell, as nothing of
ours but a shell is certain to run there. Values only, no I/O; standard library only, because a
controller must start quickly.

All times are seconds, on the clock that a driver chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

# The exit code of a job whose head has left none.
_NO_CODE = 1


class Lead(Enum):
    """Which nodes decide when a job ends."""

    # The head, as it waits for its workers and knows why it ends.
    HEAD = "head"
    # All alike: the first one that fails, or else the last one that ends.
    ALL = "all"


class Node(NamedTuple):
    """One node of a job.

    Args:
        is_running: Whether it runs, or may not have started yet.
        exit_code: None while it runs, or if it is not known.
        ended_at: When it ended; infinity if that is not known.
        is_reported: Whether the head has been told that this node has failed.
    """

    is_running: bool = True
    exit_code: int | None = None
    ended_at: float = inf
    is_reported: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with another exit code than 0."""
        return not self.is_running and bool(self.exit_code)


class Policy(NamedTuple):
    """How long nodes may take.

    Args:
        leave_s: To end by themselves after the end of the job is decided.
        cancel_s: To end after a cancel, or a head that was asked to end: the grace period, and the
            time for outputs and the record.
        lost_s: For the head to end after a worker has failed, outputs included. It notices by
            itself or reads our report, but not while it stages code and inputs.
    """

    lead: Lead
    leave_s: float
    cancel_s: float
    lost_s: float = inf


class Past(NamedTuple):
    """What has been done to a job already.

    Args:
        cancelled_at: When it was cancelled; None if it was not.
        is_urgent: Whether somebody does not want to wait for the end of its nodes.
        is_cancel_told: Whether its nodes were told about the cancel.
        is_end_told: Whether the nodes that still run were told that the job is over.
        head_asked_at: When the head was asked to end; None if it was not.
        killed_at: When its nodes were last killed; None if they were not.
    """

    cancelled_at: float | None = None
    is_urgent: bool = False
    is_cancel_told: bool = False
    is_end_told: bool = False
    head_asked_at: float | None = None
    killed_at: float | None = None

    @property
    def is_head_asked(self) -> bool:
        """Whether the head was asked to end."""
        return self.head_asked_at is not None


class Deed(Enum):
    """What is done to nodes."""

    # Tell the head how they have ended: it may still wait for them.
    REPORT = "report"
    # Ask the head to end, as it continues without a worker that has failed: SIGTERM.
    ASK_HEAD = "ask-head"
    # Tell them about a cancel: SIGTERM.
    CANCEL = "cancel"
    # Tell them that the job is over: SIGTERM. A worker may wait for a head that never started.
    END = "end"
    KILL = "kill"


class Action(NamedTuple):
    """What is to be done, and to which nodes, by their numbers."""

    deed: Deed
    nodes: tuple[int, ...]


def decide(nodes: Sequence[Node], policy: Policy, past: Past, now: float) -> tuple[Action, ...]:
    """Return what is to be done now, in this order; nothing if no node runs."""
    running = tuple(index for index, node in enumerate(nodes) if node.is_running)
    if not running:
        return ()
    if now >= kill_at(nodes, policy, past):
        return (Action(Deed.KILL, running),)
    if ended_at(nodes, policy) is not None:
        # Equal nodes end in the same way after a cancel and after a failure.
        is_told = past.is_end_told or (policy.lead is Lead.ALL and past.is_cancel_told)
        return () if is_told else (Action(Deed.END, running),)
    return (*_cancel(running, past), *_follow_workers(nodes, policy, past, now))


def _cancel(running: tuple[int, ...], past: Past) -> tuple[Action, ...]:
    # Only once: the entry treats a second signal as a request to hurry.
    is_due = past.cancelled_at is not None and not past.is_cancel_told
    return (Action(Deed.CANCEL, running),) if is_due else ()


def _follow_workers(
    nodes: Sequence[Node], policy: Policy, past: Past, now: float
) -> tuple[Action, ...]:
    """Return what is to be done about failed workers while their head runs."""
    failed = tuple(index for index, node in enumerate(nodes) if node.has_failed)
    # The nodes of a cancelled job end because of that.
    if policy.lead is not Lead.HEAD or not failed or past.cancelled_at is not None:
        return ()
    unreported = tuple(index for index in failed if not nodes[index].is_reported)
    reports = (Action(Deed.REPORT, unreported),) if unreported else ()
    is_late = now - min(nodes[index].ended_at for index in failed) > policy.lost_s
    asks = (Action(Deed.ASK_HEAD, (0,)),) if is_late and not past.is_head_asked else ()
    return (*reports, *asks)


def ended_at(nodes: Sequence[Node], policy: Policy) -> float | None:
    """Return when it was decided that a job ends by itself, at the earliest; None if it was not.

    Nodes that still run have no part in the result.
    """
    if policy.lead is Lead.HEAD:
        return None if nodes[0].is_running else nodes[0].ended_at
    first = first_failed(nodes)
    if first is not None:
        return nodes[first].ended_at
    # The last node ends the job.
    return None if any(node.is_running for node in nodes) else max(n.ended_at for n in nodes)


def kill_at(nodes: Sequence[Node], policy: Policy, past: Past) -> float:
    """Return when the nodes that run are killed, or killed again; infinity if not yet decided."""
    if past.killed_at is not None:
        return past.killed_at + policy.leave_s
    if past.is_urgent:
        return -inf
    ended = ended_at(nodes, policy)
    # A head that hangs ends neither after a cancel nor because it was asked to.
    asked = (at for at in (past.cancelled_at, past.head_asked_at) if at is not None)
    limit = min(asked, default=inf) + policy.cancel_s
    return min(limit, inf if ended is None else ended + policy.leave_s)


def first_failed(nodes: Sequence[Node]) -> int | None:
    """Return the node to blame: the first that failed caused the others to end; None if none."""
    failed = [(node.ended_at, index) for index, node in enumerate(nodes) if node.has_failed]
    return min(failed)[1] if failed else None


def exit_code(nodes: Sequence[Node], lead: Lead, *, is_head_asked: bool = False) -> int:
    """Return the exit code of a job whose nodes have ended.

    Args:
        is_head_asked: Whether the head was asked to end; then the node that failed first counts.
    """
    first = first_failed(nodes)
    if lead is Lead.HEAD and not (is_head_asked and first is not None):
        code = nodes[0].exit_code
        return _NO_CODE if code is None else code
    return 0 if first is None else nodes[first].exit_code or 0
