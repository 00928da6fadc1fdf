"""The status of a submitted job, and the JSON that ``status --json`` prints."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from cloudjob.errors import CloudJobError
from cloudjob.model.times import local
from jobentry.contract.exits import Cause as Cause
from jobentry.contract.exits import CutLog as CutLog
from jobentry.contract.exits import Failure as Failure

# The fields of a failure that are lists in JSON.
_LINES = ("last_lines", "stack_lines")


class JobState(str, Enum):
    """The state of a job, in the same words for every backend."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"

    # Python 3.10 and 3.11 format a mixed-in enum differently; this returns the plain word in both.
    def __str__(self) -> str:
        return self.value

    @property
    def is_final(self) -> bool:
        """Whether the job has ended and will never change again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def state_of(cause: Cause) -> JobState:
    """Return the state of a job that has ended, from what ended it."""
    finals = {Cause.NONE: JobState.SUCCEEDED, Cause.CANCELLED: JobState.CANCELLED}
    return finals.get(cause, JobState.FAILED)


class Absence(Enum):
    """Why a job is not on its platform, or cannot be looked for there, in words for people."""

    INTERRUPTED = "the submit was interrupted"
    NO_JOB = "the backend has no such job"
    NO_BACKEND = "this cloudjob has no such backend"
    # A job of others, until its record exists.
    OUT_OF_REACH = "not within reach of your configuration"
    # Jobs of a sweep.
    WAITS = "waits for other jobs of the sweep"
    NEVER_SUBMITTED = "never submitted"


class Code(NamedTuple):
    """The package that a job runs."""

    uri: str
    digest: str
    size_bytes: int
    files: int


class Phase(NamedTuple):
    """One phase of a node's work; ``ended_at`` is None until it has ended.

    Args:
        done_bytes: The bytes transferred so far.
        total_bytes: The size of the transfer; 0 if it is unknown, or nothing is transferred.
    """

    node: int
    name: str
    started_at: str
    ended_at: str | None = None
    done_bytes: int = 0
    total_bytes: int = 0


class Hang(NamedTuple):
    """How a job hangs, or hung when it ended.

    Args:
        rule: What shows it: a value of ``jobentry.contract.hangs.Rule``.
        confidence: How certain it is: ``certain``, ``high``, ``medium`` or ``low``.
        ranks: Those that the others wait for; empty if none stands out.
        since: Since when no rank has moved, by the clock of the head.
        message: Which ranks are where, and for how long.
        details: What the other ranks do, a line for each place.
    """

    rule: str
    confidence: str
    ranks: tuple[int, ...]
    since: str
    message: str
    details: tuple[str, ...] = ()


class Attempt(NamedTuple):
    """Which attempt of a job with retries this is, or was the last.

    Args:
        number: From 1 on.
        most: How many there may be.
        previous_cause: The kind of failure that ended the one before; empty for the first, and on
            Kubernetes.
    """

    number: int
    most: int
    previous_cause: str = ""


class WaitPhase(str, Enum):
    """What kind of thing nodes wait for that have not started, or may be lost."""

    QUEUE = "queue"
    """Its turn: other jobs, or a quota."""
    CREATION = "creation"
    """Its nodes, which the platform has not created, or refuses to create."""
    SCHEDULING = "scheduling"
    """Machines for its nodes."""
    MOUNTING = "mounting"
    """Volumes."""
    PULLING = "pulling"
    """The image."""
    STARTING = "starting"
    """The start of its containers."""
    MACHINE = "machine"
    """A machine that no longer reports."""

    def __str__(self) -> str:
        return self.value


class Outlook(str, Enum):
    """What can end a wait."""

    OPEN = "open"
    """It may end by itself: other jobs end, or a registry answers again."""
    STUCK = "stuck"
    """Somebody must change something: the image, a Secret or the quota does not fit."""
    HOPELESS = "hopeless"
    """Nothing: only another job can start."""

    def __str__(self) -> str:
        return self.value


class Wait(NamedTuple):
    """What nodes wait for that have not started or may be lost, if their platform says so.

    Args:
        since: When it began to wait for that.
        message: What it is, with the platform's reason.
        hint: What to do about it; empty if there is nothing to do, or if it is not known.
        is_trouble: Whether it may never end by itself: a missing image, a full machine, a quota.
        outlook: What can end it, as far as that is known.
    """

    phase: WaitPhase
    since: str
    message: str
    hint: str = ""
    is_trouble: bool = False
    outlook: Outlook = Outlook.OPEN


class SlowRanks(NamedTuple):
    """Ranks that slow a running job down.

    Args:
        ranks: Those for which the others wait.
        nodes: Their nodes.
        cost_percent: The part of the time for which the others wait for them.
        reason: A value of ``jobentry.contract.slow.Reason``.
        place: Where they spend more time than the others: ``augment() at data.py:30``.
        message: Who it is, what it costs, and what shows the reason.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    cost_percent: int
    reason: str
    place: str
    message: str


class JobStatus(NamedTuple):
    """Everything known about one job; times are RFC 3339 UTC, and None before the event.

    Args:
        native_state: The platform's own name of the state, also if ``state`` is UNKNOWN.
        cause: What ended the job; None until it has failed.
        attempt: None for a job without retries, and on platforms that do not count attempts.
        absence: Why the job is not on its platform; None if it is, or may be.
        slow: The ranks that slow a running job down; None if none stands out.
        wait: What a job waits for, or the nodes that have not started; None if it is not known.
        cut_logs: The logs of nodes whose last output could not be written, as on a full disk.
    """

    job: str
    name: str
    backend: str
    state: JobState
    native_state: str
    nodes: int
    procs_per_node: int
    created_at: str
    started_at: str | None = None
    ended_at: str | None = None
    exit_code: int | None = None
    cause: Cause | None = None
    failure: Failure | None = None
    code: Code | None = None
    phases: tuple[Phase, ...] = ()
    absence: Absence | None = None
    hang: Hang | None = None
    attempt: Attempt | None = None
    slow: SlowRanks | None = None
    wait: Wait | None = None
    cut_logs: tuple[CutLog, ...] = ()

    @property
    def is_gone(self) -> bool:
        """Whether the job is not on its platform and will never be there again."""
        return self.absence not in (None, Absence.OUT_OF_REACH, Absence.WAITS)

    @property
    def is_over(self) -> bool:
        """Whether the status will never change again."""
        return self.state.is_final or self.is_gone

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        from cloudjob.model import html

        return html.table(self.facts())

    def facts(self, handle: str = "") -> list[tuple[str, object]]:
        """Return what a notebook shows of the job, each with its name."""
        failure = self.failure
        return [
            ("job", self.job),
            ("handle", handle),
            ("state", self.state),
            ("backend", f"{self.backend} ({self.native_state})"),
            ("nodes", self.nodes),
            ("ranks per node", self.procs_per_node),
            ("created", local(self.created_at)),
            ("started", local(self.started_at or "")),
            ("ended", local(self.ended_at or "")),
            ("exit code", self.exit_code),
            ("cause", self.cause),
            ("failed on node", failure and failure.node),
            ("failed rank", failure and failure.rank),
            ("message", failure and failure.message),
            ("stacks", failure and "\n".join(failure.stack_lines)),
            ("last lines", failure and "\n".join(failure.last_lines)),
        ]


class JobFailed(CloudJobError):
    """A job that was waited for did not succeed; ``status`` says how it ended."""

    def __init__(self, message: str, status: JobStatus, exit_code: int) -> None:
        super().__init__(message, hint="job.logs() yields the lines of its log")
        self.status = status
        self.exit_code = exit_code

    @property
    def node(self) -> int | None:
        """The node that failed; None if none is to blame."""
        return self.status.failure.node if self.status.failure else None

    @property
    def rank(self) -> int | None:
        """The rank that made the job fail; None if none did."""
        return self.status.failure.rank if self.status.failure else None

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that this rank printed."""
        return tuple(self.status.failure.last_lines) if self.status.failure else ()


def exit_code(status: JobStatus) -> int:
    """Return the exit code of a job: its own, but never 0 if it did not succeed."""
    if status.state is JobState.SUCCEEDED:
        return status.exit_code or 0
    return status.exit_code or 1


def to_json(status: JobStatus) -> dict[str, Any]:
    """Return the object that ``status --json`` prints, of plain JSON values."""
    values = status._asdict()
    del values["absence"]
    values["state"] = status.state.value
    values["cause"] = None if status.cause is None else str(status.cause)
    values["phases"] = [phase._asdict() for phase in status.phases]
    values["hang"] = status.hang and {
        **status.hang._asdict(),
        "ranks": list(status.hang.ranks),
        "details": list(status.hang.details),
    }
    values["slow"] = status.slow and {
        **status.slow._asdict(),
        "ranks": list(status.slow.ranks),
        "nodes": list(status.slow.nodes),
    }
    values["code"] = status.code and status.code._asdict()
    values["attempt"] = status.attempt and status.attempt._asdict()
    values["cut_logs"] = [each._asdict() for each in status.cut_logs]
    wait = status.wait
    values["wait"] = wait and {
        **wait._asdict(),
        "phase": wait.phase.value,
        "outlook": wait.outlook.value,
    }
    if status.failure is not None:
        failure = status.failure._asdict()
        lists = {name: list(failure[name]) for name in _LINES}
        values["failure"] = {**failure, "host": status.failure.host or None, **lists}
    return values


def from_json(values: dict[str, Any]) -> JobStatus:
    """Return the status from the values that ``to_json`` returned."""
    failure, code, hang = values["failure"], values["code"], values.get("hang")
    attempt = values.get("attempt")
    slow, wait = values.get("slow"), values.get("wait")
    changed = {
        "slow": slow
        and SlowRanks(**{**slow, "ranks": tuple(slow["ranks"]), "nodes": tuple(slow["nodes"])}),
        "state": JobState(values["state"]),
        "cause": None if values["cause"] is None else Cause(values["cause"]),
        "failure": failure and _failure(failure),
        "code": code and Code(**code),
        "attempt": attempt and Attempt(**attempt),
        "wait": wait and _wait(wait),
        "cut_logs": tuple(CutLog(**each) for each in values.get("cut_logs", ())),
        "phases": tuple(Phase(**phase) for phase in values["phases"]),
        "hang": hang
        and Hang(**{**hang, "ranks": tuple(hang["ranks"]), "details": tuple(hang["details"])}),
    }
    return JobStatus(**{**values, **changed})


def is_current(values: dict[str, Any]) -> bool:
    """Whether ``to_json`` returns these values for their status, and not more: of this version.

    A list prints such values as they are; 10,000 statuses only for that would take a second.
    """
    phases = values["phases"]
    return (
        tuple(values) == _KEYS
        and all(not values[name] or tuple(values[name]) == keys for name, keys in _PARTS.items())
        and [*map(tuple, phases)].count(Phase._fields) == len(phases)
        and all(tuple(each) == CutLog._fields for each in values["cut_logs"])
        and values["state"] in _STATES
        and (values["cause"] is None or values["cause"] in _CAUSES)
    )


# What ``is_current`` compares with, in the order of ``to_json``.
_KEYS = tuple(name for name in JobStatus._fields if name != "absence")
_PARTS: dict[str, tuple[str, ...]] = {
    "failure": Failure._fields,
    "code": Code._fields,
    "hang": Hang._fields,
    "attempt": Attempt._fields,
    "slow": SlowRanks._fields,
    "wait": Wait._fields,
}
_STATES, _CAUSES = {each.value for each in JobState}, {str(each) for each in Cause}


def _wait(values: dict[str, Any]) -> Wait:
    # The records of earlier versions have no outlook.
    outlook = Outlook(values.get("outlook", Outlook.OPEN))
    return Wait(**{**values, "phase": WaitPhase(values["phase"]), "outlook": outlook})


def _failure(values: dict[str, Any]) -> Failure:
    # The records of earlier versions have no stacks.
    lines = {name: tuple(values.get(name, ())) for name in _LINES}
    return Failure(**{**values, "host": values["host"] or "", **lines})
