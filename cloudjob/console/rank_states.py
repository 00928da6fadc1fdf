"""What each rank of a job does, or how it ended, from the journals and the status of the job."""

from __future__ import annotations

from enum import Enum

from cloudjob.model.status import Cause, JobState, JobStatus
from cloudjob.tracking.journals import Journals, RankPoint
from jobentry.contract import journal


class RankState(Enum):
    """The state of a rank; the most important one comes first."""

    FAILED_FIRST = "failed first"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped by cloudjob"
    NOT_KNOWN = "not known"
    DEAD = "dead"
    PAUSED = "paused"
    WAITS_FOR_DISK = "waiting for the disk"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended well"

    @property
    def has_ended(self) -> bool:
        """Whether it is the end of a rank."""
        return self in _ENDS


_OF = {
    journal.State.RUNNING: RankState.RUNNING,
    journal.State.WAITING: RankState.WAITING,
    journal.State.IDLE: RankState.WAITING,
    journal.State.WAITS_FOR_DISK: RankState.WAITS_FOR_DISK,
    journal.State.PAUSED: RankState.PAUSED,
    journal.State.TRACED: RankState.PAUSED,
    journal.State.ZOMBIE: RankState.DEAD,
    journal.State.DEAD: RankState.DEAD,
    journal.State.ENDED: RankState.ENDED,
    journal.State.FAILED: RankState.FAILED,
    journal.State.STOPPED: RankState.STOPPED,
    journal.State.LOST: RankState.LOST,
}
_ENDS = {RankState.FAILED_FIRST, *(shown for state, shown in _OF.items() if state.has_ended)}


def rank_states(journals: Journals, status: JobStatus) -> dict[int, RankState]:
    """Return the state of each rank by rank; while the job runs, only of those that have started.

    A rank whose node has not recorded its end is not known, unless the status says how it ended.
    """
    last = {rank: points[-1] for rank, points in journals.ranks.items() if points}
    ranks = set(last)
    if status.state.is_final and last:
        ranks.update(range(status.nodes * status.procs_per_node))
    return {rank: _state(rank, last.get(rank), status) for rank in sorted(ranks)}


def _state(rank: int, last: RankPoint | None, status: JobStatus) -> RankState:
    failure = status.failure
    if status.state is JobState.FAILED and failure and failure.rank == rank:
        return RankState.FAILED_FIRST
    state = journal.state_of(last.sample.state) if last else None
    if (state and state.has_ended) or (last and not status.state.is_final):
        return _OF[state] if state else RankState.NOT_KNOWN
    if status.state is JobState.SUCCEEDED:
        return RankState.ENDED
    is_node_lost = failure and failure.rank is None and status.cause is Cause.PLATFORM
    if failure and is_node_lost and last and failure.node == last.node:
        return RankState.LOST
    return RankState.NOT_KNOWN
