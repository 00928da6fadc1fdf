"""Decides how the job ended, which rank is to blame, and whether a start hangs. No I/O."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.contract.lists import some
from jobentry.control import node_table

if TYPE_CHECKING:
    from jobentry.node.local_ranks import End

# A failing rank closes its connections some milliseconds before it is gone. By then another rank
# may have ended because of that, and the signal that followed may have reached the failing rank.
_CLOSE_S = 0.1
_SHOWN_VICTIMS = 16
_REPORTED_LINES = 20
# Seconds in which no rank starts before a start counts as hung: 32 nodes on two cores took 16 s.
_PATIENCE_S = 20.0
_PER_NODE_S = 1.0
_ATTEMPTS = 2
# srun's messages when the plugin is missing, or finds no PMIx.
_NO_PMIX = "Invalid MPI type 'pmix'"
_WITHOUT_PMIX = (
    ": Slurm cannot load its PMIx here: it needs libpmix.so (Debian has it in libpmix-dev);"
    " `slurm.mpi: ssh` does not need it"
)


class RankEnd(NamedTuple):
    """How one rank ended.

    Args:
        at_s: When it ended, by the head's clock.
        was_asked_to_end: Whether it had been asked to end.
        is_reported: Whether its wrapper reported it; False if the wrapper was killed.
        failure: The report on the rank, even if its exit code is 0.
        is_leaving: Whether its program still ran its exit handlers.
    """

    at_s: float
    was_asked_to_end: bool
    is_reported: bool
    failure: Failure
    is_leaving: bool = False

    @classmethod
    def of(cls, end: End, failure: Failure) -> RankEnd:
        """Return how a rank ended, with the report on it."""
        return cls(end.at_s, end.was_asked_to_end, end.is_reported, failure, end.is_leaving)

    def to_values(self) -> dict[str, Any]:
        """Return plain values for ``from_values``."""
        return {**self._asdict(), "failure": self.failure._asdict()}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> RankEnd:
        """Return what ``to_values`` was called on."""
        return cls(**{**values, "failure": Failure(**values["failure"])})

    @property
    def is_failure(self) -> bool:
        """Whether it may be the reason for the job to end."""
        by_request = self.was_asked_to_end and self.failure.signal is not None
        return self.failure.exit_code != 0 and not by_request

    @property
    def has_lost_connection(self) -> bool:
        """Whether it looks like a rank that lost its connection to one that was ending."""
        if self.is_ended_by_mpi or self.has_printed_loss:
            return True
        is_by_itself = self.failure.signal is None
        return is_by_itself and bool(_LOST_CONNECTION.search(self.failure.message))

    @property
    def has_lost_rank(self) -> bool:
        """Whether it lost its connection to another rank, and not to any other service."""
        if self.has_printed_loss:
            return True
        return self.has_lost_connection and bool(_LOST_RANK.search(self.failure.message))

    @property
    def has_printed_loss(self) -> bool:
        """Whether its last lines have a library's message about another rank that is gone.

        A library may also abort the process: PyTorch's watchdog of NCCL does.
        """
        if self.failure.signal not in (None, signal.SIGABRT):
            return False
        return self.failure.exit_code != 0 and any(
            _PEER_IS_GONE.search(line) for line in (self.failure.message, *self.failure.last_lines)
        )

    @property
    def has_given_up(self) -> bool:
        """Whether its last lines say that it has waited for another rank for too long."""
        lines = (self.failure.message, *self.failure.last_lines)
        return any(_GAVE_UP.search(line) for line in lines)

    @property
    def is_ended_by_mpi(self) -> bool:
        """Whether Open MPI ended it because another rank, or mpirun's daemon, was gone."""
        return self.failure.exit_code in _ENDED_BY_MPI and self.failure.signal is None

    @property
    def is_consequence(self) -> bool:
        """Whether it must be the consequence of something else."""
        return self.is_ended_by_mpi or not self.is_reported


class LaunchEnd(NamedTuple):
    """How the process that starts ranks ended: exit code (negative for a signal) and last lines."""

    name: str
    code: int
    lines: Sequence[str]

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell gives it."""
        return self.code if self.code >= 0 else exits.code_of_signal(-self.code)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The lines to report."""
        return tuple(self.lines)[-_REPORTED_LINES:]


def decide(
    ends: Mapping[int, RankEnd], started: Mapping[int, int], ranks: int, launch_end: LaunchEnd
) -> Outcome:
    """Return how the job ended.

    Args:
        ends: The ranks that have ended.
        started: The ranks that have started, with their nodes.
        ranks: How many there should be.
    """
    first = _first(ends, launch_end)
    text = "\n".join(launch_end.lines)
    daemon = _LOST_DAEMON.search(text)
    if len(started) >= ranks:
        daemon = daemon or _ENDED_DAEMON.search(text)
    has_succeeded = first is None and launch_end.code == 0 and len(ends) >= ranks
    if daemon and not has_succeeded and (first is None or first.is_consequence):
        return _daemon_lost(daemon[1], launch_end)
    if first is not None:
        failure = _named(first.failure, launch_end)
        return Outcome(failure.exit_code or 1, Cause.USER, failure)
    if launch_end.code == 0:
        return _all_well(ends, started, ranks, launch_end)
    code = launch_end.exit_code
    message = f"{launch_end.name} ended with exit code {code}"
    failure = Failure(exit_code=code, message=message, last_lines=launch_end.last_lines)
    if len(started) >= ranks:
        return Outcome(code, Cause.USER, failure)
    message += " before all ranks had started"
    if any(_NO_PMIX in line for line in launch_end.lines):
        message += _WITHOUT_PMIX
    failure = failure._replace(exit_code=exits.ENTRY_FAILED, message=message)
    return Outcome(exits.ENTRY_FAILED, Cause.ENTRY, failure)


def correction(outcome: Outcome, named: int | None) -> str:
    """Return a correction if the log named a different rank than the outcome, else "".

    Args:
        named: The rank whose failure was reported first.
    """
    failure = outcome.failure
    if failure is None or None in (failure.rank, named) or failure.rank == named:
        return ""
    text = "rank %d on node %s (%s) failed before rank %d: %s"
    return text % (failure.rank, failure.node, failure.host, named, failure.message)


def losses(outcome: Outcome, ends: Mapping[int, RankEnd]) -> str:
    """Return which ranks failed only because the one to blame was gone; else "".

    Args:
        ends: The ranks that have ended, by the head's clock.
    """
    blamed = None if outcome.failure is None else outcome.failure.rank
    if blamed is None or blamed not in ends:
        return ""
    first_s = ends[blamed].at_s
    victims = {
        rank: end.at_s - first_s
        for rank, end in ends.items()
        if rank != blamed and end.is_failure and end.has_lost_connection
    }
    if not victims:
        return ""
    names = some([str(rank) for rank in sorted(victims)], _SHOWN_VICTIMS)
    ranks = "rank" if len(victims) == 1 else "ranks"
    gap_s = min(victims.values())
    earlier = f"{gap_s:.1f} s earlier" if gap_s >= _CLOSE_S else "at the same time"
    what = "failed" if ends[blamed].failure.exit_code else "ended"
    return f"{ranks} {names} lost rank {blamed}, which had {what} {earlier}"


def explained(outcome: Outcome, ends: Mapping[int, RankEnd], standing: str) -> Outcome:
    """Return the outcome with the ranks for which the one to blame has waited for too long.

    Args:
        standing: The ranks that stood still and waited for no other one, in words.
    """
    failure = outcome.failure
    end = ends.get(failure.rank) if failure and failure.rank is not None else None
    if failure is None or end is None or not (standing and end.has_given_up):
        return outcome
    message = f"{failure.message}: it waited for too long; {standing}"
    return outcome._replace(failure=failure._replace(message=message))


def server_ended(server: LaunchEnd, node: int, host: str, have_started: bool) -> Outcome:
    """Return the outcome of a job in which a server of the ranks has ended.

    Args:
        node: The node of the server; ``host`` is its name.
        have_started: Whether all ranks had started by then.
    """
    number = max(0, -server.code)
    code = server.exit_code
    how = (
        f"was killed by {signal.Signals(number).name}" if number else f"ended with exit code {code}"
    )
    message = f"the {server.name} of the ranks {how}"
    if not have_started:
        message += " before all ranks had started"
    code = code if have_started else exits.ENTRY_FAILED
    cause = Cause.PLATFORM if number else Cause.USER if have_started else Cause.ENTRY
    failure = Failure(node, host, None, number or None, code, message, server.last_lines)
    return Outcome(code, cause, failure)


def _daemon_lost(host: str, launch_end: LaunchEnd) -> Outcome:
    """Return the outcome of a job whose mpirun lost a daemon; 5.0.11 then returns 0."""
    code = launch_end.code if launch_end.code > 0 else exits.code_of_signal(9)
    message = f"{launch_end.name} lost its daemon there: was it killed, or the network cut?"
    failure = Failure(host=host, exit_code=code, message=message, last_lines=launch_end.last_lines)
    return Outcome(code, Cause.PLATFORM, failure)


def _all_well(
    ends: Mapping[int, RankEnd], started: Mapping[int, int], ranks: int, launch_end: LaunchEnd
) -> Outcome:
    """Accept mpirun's 0 only if every rank ended with 0 (5.0.11 returns it in other cases, too)."""
    silent = [rank for rank in range(ranks) if rank not in ends]
    if not silent:
        return Outcome(0)
    rank = silent[0]
    code = exits.code_of_signal(9)
    message = (
        f"rank {rank} was lost: {launch_end.name} reported success, but this rank never reported"
        " its end"
    )
    failure = Failure(started.get(rank), "", rank, exit_code=code, message=message)
    return Outcome(code, Cause.PLATFORM, failure)


def _first(ends: Mapping[int, RankEnd], launch_end: LaunchEnd) -> RankEnd | None:
    """Return the end of the rank that all other ends follow from."""
    failed = {rank: end for rank, end in ends.items() if end.is_failure}
    if not failed:
        return _left_early(ends, launch_end, None)
    earliest = min(end.at_s for end in failed.values())
    victims = {int(rank) for line in launch_end.lines for rank in _VICTIM.findall(line)}

    def order(item: tuple[int, RankEnd]) -> tuple[int, float]:
        rank, end = item
        return _distance(end, earliest, is_victim=rank in victims), end.at_s

    rank, best = min(failed.items(), key=order)
    if best.has_lost_rank or _distance(best, earliest, is_victim=rank in victims) >= _VICTIMS:
        return _left_early(ends, launch_end, best) or best
    return best


# What mpirun 4.1 and 5.0 print about a daemon that is gone.
_LOST_DAEMON = re.compile(r"^\s*Remote daemon\s*: .* on node (\S+)", re.MULTILINE)
# What 5.0 prints if it sees the end of the command that had started a daemon before the end of the
# daemon's connection. It prints the same if the daemon never started, but then no rank runs there.
_ENDED_DAEMON = re.compile(r"^\s*Remote host:\s+(\S+)\s+Daemon exit status:", re.MULTILINE)
# mpirun repeats the message of a rank's MPI library about another rank that is gone.
_VICTIM = re.compile(r"reported by process \[\d+,(\d+)\]")
_IMPROPER = re.compile(r"process rank (\d+) with PID")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)")
_VICTIMS = 3
# What Gloo (PyTorch, Horovod), NCCL and Python say when the other end of a connection is gone.
_LOST_RANK = re.compile(
    r"gloo/transport|nccl|horovod has been shut down|remote process exited", re.I
)
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|aborted|lost)|broken pipe|socket closed"
    r"|remote process exited|horovod has been shut down",
    re.IGNORECASE,
)
# The same in lines of a log, in which other programs may report connections of their own: Gloo,
# NCCL as PyTorch shows it, HCCL, Horovod, Open MPI, and MindSpore's cluster.
_PEER_IS_GONE = re.compile(
    r"gloo/transport/.{0,500}(Connection closed|reset|Broken pipe|Read error|Write error)"
    r"|ncclRemoteError|remote process exited or there was a network error|HCCL_E_REMOTE"
    r"|socketProgress: Connection closed by remote peer"
    r"|Horovod has been shut down"
    r"|mca_btl_tcp_\w{1,40}: .{0,500}Connection reset by peer"
    r"|The node: .{1,80} is timed out\. It may exit with exception"
)
# What MindSpore on CPUs, Gloo and PyTorch say when another rank has not come for long.
_GAVE_UP = re.compile(
    r"(Broadcast|Reduce|ReduceScatter|AllReduce|AllGather) wait (receiving|sending)"
    r"|gloo/transport/.{0,500}Timed out waiting"
    r"|Watchdog caught collective operation timeout"
)
# With 14, Open MPI 5.0.11 ends a rank whose connection another rank has closed, and its message may
# come too late; with 195 or 205, Open MPI 4.1 ends a rank whose daemon is gone.
_ENDED_BY_MPI = frozenset((14, 195, 205))


def _distance(end: RankEnd, earliest: float, *, is_victim: bool) -> int:
    """Return how far an end is likely to be from the first cause."""
    if not end.is_reported:
        return 5
    # A script's own report, a signal or its own exit code is more reliable than the library's code.
    if is_victim or end.is_ended_by_mpi:
        return _VICTIMS
    # It may be a connection of the script itself, so it is the cause if no other rank is to blame.
    if end.has_lost_connection:
        return 2
    if not end.was_asked_to_end:
        return 0
    return 1 if end.at_s - earliest <= _CLOSE_S else 4


def _left_early(
    ends: Mapping[int, RankEnd], launch_end: LaunchEnd, failed: RankEnd | None
) -> RankEnd | None:
    """Return the end of a rank that left with 0 and without MPI_Finalize, if that is the cause.

    Args:
        failed: The first of those that ended because of it; if there is none,
            mpirun must have reported the rank.
    """
    named = [int(rank) for line in launch_end.lines for rank in _IMPROPER.findall(line)]
    early = [
        (rank not in named, end.at_s, end)
        for rank, end in ends.items()
        if end.failure.exit_code == 0
        and not end.was_asked_to_end
        and (rank in named if failed is None else end.at_s <= failed.at_s + _CLOSE_S)
    ]
    if not early:
        return None
    end = min(early, key=lambda item: item[:2])[2]
    code = failed.failure.exit_code if failed and failed.is_reported else abs(launch_end.code)
    message = "ended with exit code 0 while other ranks continued"
    if failed is None or not failed.has_lost_rank:
        message += ": without MPI_Finalize?"
    # A signal that ended its exit handlers came later, because of the others.
    failure = end.failure._replace(exit_code=code or 1, signal=None, message=message)
    return end._replace(failure=failure)


def _named(failure: Failure, launch_end: LaunchEnd) -> Failure:
    aborted = [int(rank) for line in launch_end.lines for rank in _ABORTED.findall(line)]
    if failure.rank in aborted and failure.signal is None:
        return failure._replace(message=f"called MPI_Abort({failure.exit_code})")
    return failure


# ---- a start that hangs --------------------------------------------------------------------------

# Open MPI 5.0.11 sometimes hangs while it starts, and neither version ends such a start by itself
# (in experiments, both waited for a hung agent forever, whatever their timeouts).


def start_patience_s(nodes: int, start_timeout_s: float, attempt: int) -> float:
    """Return the seconds without a new rank after which mpirun counts as hung.

    Args:
        attempt: 1 or 2. A second hang may only be slowness, so the second has twice the time.
    """
    return min(start_timeout_s, attempt * (_PATIENCE_S + _PER_NODE_S * nodes))


def may_start_again(attempt: int, started: Mapping[int, int]) -> bool:
    """Whether mpirun may be started again.

    A rank that has started runs the user's script, which is never run twice behind the user's back.
    """
    return attempt < _ATTEMPTS and not started


def hung_start(
    launcher: str,
    node: NodeEnv,
    ranks: int,
    started: Mapping[int, int],
    attempt: int,
    waited_s: float,
) -> Failure:
    """Return the failure to report for a start that hangs.

    Args:
        launcher: The name of the process that starts the ranks.
        node: The settings of the head.
        ranks: How many there should be.
        started: The ranks that have started, with their nodes.
        waited_s: Seconds since the last rank started.
    """
    hosts, slots = node.hosts, node.slots
    text = "starting the ranks: %s started %d of %d and then hung for %g s" % (
        launcher,
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
