"""Decides whether a job hangs, and which ranks the others wait for. No I/O and no clock.

A wrong name is worse than none: if no rank stands out, the verdict says so, and as long as one rank
moves, or cannot be read, there is none.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Sequence

from jobentry.contract import waits
from jobentry.contract.hangs import (
    Activity,
    Confidence,
    Group,
    Hang,
    Progress,
    Rule,
    Standing,
)
from jobentry.contract.waits import Wait

# A stay counts as long only beyond so many times the longest one that ended by itself.
_LEARNED = 5.0
# After a job has moved again, the next report needs a stay of so many times the last one.
_AGAIN = 2.0
# What a library says about another rank may be noticed so much later than that rank's next step.
_NOTICED_S = 5.0
# A collective that moves more bytes a second in a rank than this is slow, not hung.
_MOVED_BYTES_S = 10_000.0
# What programs do for long without being hung: they sleep between polls, or wait for a program that
# they have started.
_PATIENT = frozenset((Wait.SLEEP, Wait.CHILD, Wait.OTHER))
_KINDS = (Activity.WAITING, Activity.IDLE, Activity.BUSY, Activity.GONE)
# The rules that rest on ranks for which the kernel says that they do not run.
_OF_NATIVE = (Rule.STOPPED, Rule.ONE_IDLE)
# The innermost call may belong to a server or a poll loop.
_UNSURE = frozenset((Wait.EVENTS, Wait.CHILD, Wait.OTHER))


class Limits(NamedTuple):
    """After how many seconds each kind of stay counts as a hang.

    Args:
        stopped_s: Of a stopped rank for which others wait.
        wait_s: Of ranks that wait for each other, or for one that idles.
        idle_s: Of a job all of whose ranks idle.
        patient_s: The same if they sleep or serve, as many programs do for long.
        busy_s: Of a rank that computes while the others wait.
        start_s: Of ranks that wait until the others have started.
        confirm_s: For how long a verdict must hold.
        repeat_s: Until a hang is reported again; then this doubles.
    """

    stopped_s: float = 30.0
    wait_s: float = 120.0
    idle_s: float = 300.0
    patient_s: float = 900.0
    busy_s: float = 600.0
    start_s: float = 300.0
    confirm_s: float = 15.0
    repeat_s: float = 600.0

    def scaled(self, factor: float) -> Limits:
        """Return all limits multiplied by a factor."""
        return Limits(*(factor * limit_s for limit_s in self))


LIMITS = Limits()


class _Job(NamedTuple):
    """The running ranks of a job none of which moves.

    Args:
        still_s: How long none of them has moved.
    """

    waiting: tuple[Standing, ...]
    idle: tuple[Standing, ...]
    busy: tuple[Standing, ...]
    gone: tuple[Standing, ...]
    still_s: float

    @property
    def others(self) -> tuple[Standing, ...]:
        """The ranks that do not wait for others."""
        return (*self.gone, *self.busy, *self.idle)

    @property
    def do_most_wait(self) -> bool:
        """Whether at least half of the ranks wait for the rest."""
        return bool(self.waiting) and len(self.waiting) >= len(self.others)


def judge(running: frozenset[int], standing: Sequence[Standing], limits: Limits) -> Hang | None:
    """Return the verdict on a job; None if it does not count as hung.

    Args:
        running: The ranks that have not ended.
        standing: The ranks that have been at one place for long.
    """
    present = _informed([each for each in standing if each.rank in running])
    if not running or len({each.rank for each in present}) < len(running):
        return None
    waiting, idle, busy, gone = (
        tuple(each for each in present if each.activity is kind) for kind in _KINDS
    )
    job = _Job(waiting, idle, busy, gone, min(each.still_s for each in present))
    hang = _verdict_on(job, limits)
    # Two waits of a program without Python in the same function may look like one.
    is_native = any(each.place.file and not each.place.line for each in present)
    return hang if hang and (hang.rule in _OF_NATIVE or not is_native) else None


def not_waiting(standing: Sequence[Standing]) -> tuple[Group, ...]:
    """Return the ranks that have stopped, or idle without a wait for others."""
    return _groups([each for each in standing if each.activity in (Activity.GONE, Activity.IDLE)])


def _informed(standing: Sequence[Standing]) -> Sequence[Standing]:
    """Add to each rank what the libraries of others say that it has not launched."""
    still_s = {each.rank: each.still_s for each in standing}
    late: dict[int, tuple[str, ...]] = {}
    for informant in standing:
        since_s = min((still_s.get(each.rank, 0.0) for each in informant.late), default=0.0)
        # A rank that has moved since may have launched what it had not.
        if informant.late_s + _NOTICED_S < since_s:
            late.update(informant.late)
    stalled = {name for names in late.values() for name in names}

    def informed(each: Standing) -> Standing:
        names = late.get(each.rank, ())
        # One that has launched something that others have not waits for those.
        progress = Progress.BEHIND if stalled.issubset(names) else Progress.BOTH
        return each._replace(progress=progress, missing=names[0]) if names else each

    return [informed(each) for each in standing]


def _verdict_on(job: _Job, limits: Limits) -> Hang | None:
    if job.gone:
        return _stopped(job, limits)
    if job.waiting and all(each.wait is Wait.START for each in job.waiting):
        return _no_start(job, limits)
    if not job.others:
        on_devices = any(each.wait is Wait.DEVICE for each in job.waiting)
        return _devices_wait(job, limits) if on_devices else _deadlock(job, limits)
    return _others_wait(job, limits) if job.do_most_wait else _nothing_moves(job, limits)


def _stopped(job: _Job, limits: Limits) -> Hang | None:
    """A rank was stopped, or is a zombie, and the others wait."""
    is_alone = not (job.waiting or job.idle or job.busy) and len(job.gone) == 1
    if job.still_s < limits.stopped_s or not (job.do_most_wait or is_alone):
        return None
    return _hang(Rule.STOPPED, Confidence.CERTAIN, job, job.gone)


def _no_start(job: _Job, limits: Limits) -> Hang | None:
    """Ranks wait until the others have started."""
    if job.still_s < max(limits.start_s, _learned_s(job.others)):
        return None
    confidence = Confidence.HIGH if job.idle and not job.busy else Confidence.MEDIUM
    return _hang(Rule.NO_START, confidence, job, job.others if job.do_most_wait else ())


def _deadlock(job: _Job, limits: Limits) -> Hang | None:
    """All ranks wait for others."""
    if any(each.missing for each in job.waiting):
        # A library that says so prints that again and again, and talks to its other ranks.
        return _some_are_late(job) if job.still_s >= limits.idle_s else None
    if any(each.moved_bytes_s >= _MOVED_BYTES_S for each in job.waiting):
        return None
    if len({_kind_of_call(each) for each in job.waiting} - {""}) > 1:
        # Ranks that still start are often only late.
        is_starting = any(each.wait is Wait.START for each in job.waiting)
        if job.still_s < (limits.start_s if is_starting else limits.wait_s):
            return None
        # A thread of any rank may add the key to the store.
        in_store = any(each.operation == waits.STORE for each in job.waiting)
        return _hang(Rule.DEADLOCK, Confidence.MEDIUM if in_store else Confidence.HIGH, job, ())
    quiet_s = min(each.quiet_s for each in job.waiting)
    limit_s = max(limits.wait_s, _learned_s(job.waiting))
    if min(job.still_s, quiet_s) < limit_s:
        return None
    return _hang(Rule.ALL_WAIT, Confidence.MEDIUM, job, ())


def _devices_wait(job: _Job, limits: Limits) -> Hang | None:
    """All ranks wait, at least one of them for its device, which may wait for other ranks."""
    if any(each.computes or each.moved_bytes_s >= _MOVED_BYTES_S for each in job.waiting):
        return None
    late = [each for each in job.waiting if each.missing]
    if not late and any(each.computes is None for each in job.waiting):
        return None
    limit_s = max(limits.idle_s if late else limits.patient_s, _learned_s(job.waiting))
    if min(job.still_s, min(each.quiet_s for each in job.waiting)) < limit_s:
        return None
    if not late:
        return _hang(Rule.ALL_WAIT, Confidence.MEDIUM, job, ())
    return _some_are_late(job)


def _some_are_late(job: _Job) -> Hang:
    """All ranks wait, and some have not launched what others have."""
    # One that is late somewhere and early elsewhere waits for another one.
    culprits = [each for each in job.waiting if each.missing and each.progress is Progress.BEHIND]
    if not culprits:
        return _hang(Rule.DEADLOCK, Confidence.HIGH, job, ())
    # A device that nobody can read may still compute what comes before that collective.
    is_unsure = any(each.wait is Wait.DEVICE and each.computes is None for each in culprits)
    confidence = Confidence.MEDIUM if is_unsure else Confidence.HIGH
    return _hang(Rule.NOT_JOINED, confidence, job, culprits)


def _kind_of_call(standing: Standing) -> str:
    """Return what must be equal in calls that can belong together; empty if it is not known."""
    if standing.wait is Wait.START:
        return "start"
    return "message" if waits.is_message(standing.operation) else standing.operation


def _others_wait(job: _Job, limits: Limits) -> Hang | None:
    """Most ranks wait for one that idles or computes."""
    if job.busy:
        if job.still_s < max(limits.busy_s, _learned_s(job.others)):
            return None
        return _hang(Rule.ONE_BUSY, Confidence.LOW, job, job.others)
    if job.still_s < max(limits.wait_s, _learned_s(job.idle)):
        return None
    # What a device waits for is often not known: usually ranks that have not joined a collective.
    is_unsure = any(each.wait in _UNSURE for each in job.idle)
    is_unsure |= any(each.wait is Wait.DEVICE for each in job.waiting)
    is_unsure &= not all(each.progress is Progress.BEHIND for each in job.idle)
    confidence = Confidence.MEDIUM if is_unsure else Confidence.HIGH
    return _hang(Rule.ONE_IDLE, confidence, job, job.idle)


def _nothing_moves(job: _Job, limits: Limits) -> Hang | None:
    """All ranks idle, or too few wait to say for which."""
    others = (*job.idle, *job.waiting)
    # An event loop without events is a server without requests.
    if job.busy or any(each.wait in (Wait.DEVICE, Wait.EVENTS) for each in others):
        return None
    is_patient = any(each.wait in _PATIENT for each in job.idle)
    limit_s = max(limits.patient_s if is_patient else limits.idle_s, _learned_s(job.idle))
    quiet_s = min(each.quiet_s for each in others)
    if min(job.still_s, quiet_s) < limit_s:
        return None
    is_alone = len(job.idle) == 1 and not job.waiting
    return _hang(Rule.NOTHING_MOVES, Confidence.MEDIUM, job, job.idle if is_alone else ())


def _learned_s(ranks: Sequence[Standing]) -> float:
    """Return the shortest stay at the places of these ranks that is longer than usual."""
    return _LEARNED * max((each.longest_s for each in ranks), default=0.0)


def _hang(rule: Rule, confidence: Confidence, job: _Job, culprits: Sequence[Standing]) -> Hang:
    named = _groups(culprits)
    numbers = {each.rank for each in culprits}
    rest = [each for each in (*job.others, *job.waiting) if each.rank not in numbers]
    return Hang(rule, confidence, 0.0, job.still_s, (*named, *_groups(rest)), len(named))


def _groups(ranks: Sequence[Standing]) -> tuple[Group, ...]:
    """Return ranks that do the same at the same place together, small groups first."""
    members: dict[object, list[Standing]] = {}
    for each in sorted(ranks, key=lambda standing: standing.rank):
        key = (each.activity, each.wait, each.place[:3], each.operation, each.missing)
        members.setdefault(key, []).append(each)
    groups = [
        Group(
            tuple(each.rank for each in group),
            tuple(sorted({each.node for each in group})),
            group[0].activity,
            group[0].wait,
            _does(group[0]),
            group[0].place,
            group[0].operation,
            max(each.cpu_percent for each in group),
        )
        for group in members.values()
    ]
    return tuple(sorted(groups, key=lambda group: (len(group.ranks), group.ranks)))


def _does(standing: Standing) -> str:
    missing = f"has not launched {standing.missing}" if standing.missing else ""
    return "; ".join(filter(None, (standing.does, missing)))


# ---- from a verdict to an event ------------------------------------------------------------------


class Event(Enum):
    """What a verdict changes."""

    NONE = "none"
    BEGINS = "begins"
    LASTS = "lasts"
    ENDS = "ends"


class Suspicion(NamedTuple):
    """What was concluded so far.

    Args:
        suspect: The verdict that must still hold for a while, and since when, on any clock.
        confirmed: The verdict that was reported, as it last was; None if the job moves.
        updated_s: When it last was so.
        began_s: When it was reported.
        repeat_s: How long after that it is reported again.
        floor_s: Shorter stays are not reported, as a longer one ended by itself.
    """

    suspect: Hang | None = None
    suspected_s: float = 0.0
    confirmed: Hang | None = None
    updated_s: float = 0.0
    began_s: float = 0.0
    repeat_s: float = 0.0
    floor_s: float = 0.0


NOT_SUSPECTED = Suspicion()


def advance(
    state: Suspicion,
    verdict: Hang | None,
    now_s: float,
    limits: Limits,
    *,
    is_moving: bool,
    reported_s: float,
) -> tuple[Suspicion, Event]:
    """Return what is concluded from the next verdict, and what has changed.

    Args:
        is_moving: Whether a rank has moved, which ends a hang.
        reported_s: When the oldest report was made that the verdict is from. Until a node reports
            again, a rank seems to stand where it has left.
    """
    if verdict is not None and verdict.rule is not Rule.STOPPED:
        verdict = verdict if verdict.lasted_s >= state.floor_s else None
    if verdict is None:
        return _without_verdict(state, now_s, is_moving=is_moving)
    if _is_same(verdict, state.confirmed):
        state = state._replace(suspect=None, confirmed=verdict, updated_s=now_s)
        if now_s - state.began_s < state.repeat_s:
            return state, Event.NONE
        return state._replace(repeat_s=2 * state.repeat_s), Event.LASTS
    if not _is_same(verdict, state.suspect):
        return state._replace(suspect=verdict, suspected_s=now_s), Event.NONE
    if now_s - state.suspected_s < limits.confirm_s or reported_s <= state.suspected_s:
        return state, Event.NONE
    begun = Suspicion(
        confirmed=verdict,
        updated_s=now_s,
        began_s=now_s,
        repeat_s=limits.repeat_s,
        floor_s=state.floor_s,
    )
    return begun, Event.BEGINS


def _without_verdict(state: Suspicion, now_s: float, *, is_moving: bool) -> tuple[Suspicion, Event]:
    state = state._replace(suspect=None)
    if state.confirmed is None or not is_moving:
        return state, Event.NONE
    return Suspicion(floor_s=_AGAIN * lasted_s(state, now_s)), Event.ENDS


def lasted_s(state: Suspicion, now_s: float) -> float:
    """Return how long no rank has moved in a hang that was reported; 0 if there is none."""
    if state.confirmed is None:
        return 0.0
    return state.confirmed.lasted_s + now_s - state.updated_s


def _is_same(verdict: Hang, other: Hang | None) -> bool:
    """Whether two verdicts name the same ranks for the same reason."""
    if other is None or verdict.rule is not other.rule:
        return False
    return [each.ranks for each in verdict.culprits] == [each.ranks for each in other.culprits]
