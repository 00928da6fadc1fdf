"""The exit record, which the head writes and the laptop reads, and the meaning of exit codes."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

from jobentry.contract import hangs
from jobentry.contract.hangs import Hang
from jobentry.contract.malformed import MALFORMED, whole

ENTRY_FAILED = 125
CANNOT_EXECUTE = 126
NOT_FOUND = 127
# The exit code that timeout(1) uses, also for a job that was ended because it hung.
TIMED_OUT = 124

# With these Python ends after an exception of a script, and because of its arguments.
EXCEPTION_CODES = (1, 2)

# Appended to a message about SIGKILL: what the kernel's own counter says, or a guess without one.
# A reason that the platform knows replaces the last two.
OUT_OF_MEMORY = ": out of memory"
NOT_FOR_MEMORY = " (not by the kernel for lack of memory)"
MEMORY_GUESS = " (often the kernel, when memory is short)"

# Limits for reading, since others may write to a store: characters of a text, and last lines.
_TEXT_LIMIT, _LINES_LIMIT = 16 * 1024, 1000


class RecordError(Exception):
    """The bytes are not an exit record."""


class Cause(str, Enum):
    """What ended a job, in the words of records and of ``status --json``."""

    NONE = ""
    USER = "user"
    ENTRY = "entry"
    PLATFORM = "platform"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    HANG = "hang"
    # A word of a later version.
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN

    # Versions of Python format a mixed-in enum differently; this returns the plain word in all.
    def __str__(self) -> str:
        return self.value


class Failure(NamedTuple):
    """Why a job failed: the same value from the end of a rank to the status of its job.

    Args:
        node: The index of the node that failed, None if no node did.
        host: The network name of that node; empty if it is not known.
        rank: The rank that failed, None if no rank did.
        signal: The signal that ended the rank, None if it exited.
        last_lines: The last lines of that rank's log.
        stack_lines: The Python stacks of the process that a signal such as SIGSEGV ended.
    """

    node: int | None = None
    host: str = ""
    rank: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    message: str = ""
    last_lines: tuple[str, ...] = ()
    stack_lines: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """How a job ended."""

    exit_code: int
    cause: Cause = Cause.NONE
    failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether the job has run to its own end, so that it is not restarted in place."""
        return self.cause in (Cause.NONE, Cause.USER, Cause.TIMEOUT, Cause.HANG)


class CutLog(NamedTuple):
    """The log of a node whose end could not be written.

    Args:
        reason: The error of the system.
    """

    node: int
    missing_bytes: int
    reason: str


class ExitRecord(NamedTuple):
    """How a job ended, and when. Times are RFC 3339 UTC.

    Args:
        phases: ``(node, name, started_at, ended_at)`` in order of their start.
        damaged_layers: The keys of the package's layers that are damaged in the store.
        hang: How the job hung when it ended; None if it did not.
        cut_logs: The logs that end too early, which they cannot say themselves.
    """

    job: str
    outcome: Outcome
    started_at: str = ""
    ended_at: str = ""
    phases: tuple[tuple[int, str, str, str], ...] = ()
    damaged_layers: tuple[str, ...] = ()
    hang: Hang | None = None
    cut_logs: tuple[CutLog, ...] = ()


def code_of_signal(signal: int) -> int:
    """Return the exit code for a process ended by ``signal``, as a shell reports it."""
    return 128 + signal


def dump(record: ExitRecord) -> bytes:
    """Serialise ``record`` as JSON for ``load``."""
    value: dict[str, Any] = dict(record._asdict())
    value.update(value.pop("outcome")._asdict())
    failure = record.outcome.failure
    value["failure"] = None if failure is None else dict(failure._asdict())
    if record.hang is None:
        del value["hang"]
    else:
        value["hang"] = hangs.to_values(record.hang)
    return json.dumps(value, indent=1, sort_keys=True).encode("ascii") + b"\n"


def load(data: bytes) -> ExitRecord:
    """Return the record that ``dump`` wrote.

    Raises:
        RecordError: ``data`` is not a record. Unknown keys of later versions are ignored.
    """
    try:
        value = json.loads(data.decode("ascii"))
        failure, hang = value.get("failure"), value.get("hang")
        return ExitRecord(
            job=str(value["job"]),
            outcome=Outcome(
                exit_code=whole(value["exit_code"]),
                cause=Cause(value.get("cause", "")),
                failure=None if failure is None else _failure(failure),
            ),
            started_at=_text(value.get("started_at", "")),
            ended_at=_text(value.get("ended_at", "")),
            phases=tuple(
                (whole(node), str(name), str(start), str(end))
                for node, name, start, end in value.get("phases", ())
            ),
            damaged_layers=tuple(str(key) for key in value.get("damaged_layers", ())),
            hang=None if hang is None else hangs.from_values(hang),
            cut_logs=tuple(
                CutLog(whole(node), whole(missing_bytes), _text(reason))
                for node, missing_bytes, reason in value.get("cut_logs", ())
            ),
        )
    except MALFORMED as error:
        raise RecordError(f"reading an exit record: it is not valid: {error}") from error


def _failure(value: dict[str, Any]) -> Failure:
    return Failure(
        node=_number(value.get("node")),
        host=_text(value.get("host", "")),
        rank=_number(value.get("rank")),
        signal=_number(value.get("signal")),
        exit_code=_number(value.get("exit_code")),
        message=_text(value.get("message", "")),
        last_lines=tuple(_text(line) for line in value.get("last_lines", ())[-_LINES_LIMIT:]),
        stack_lines=tuple(_text(line) for line in value.get("stack_lines", ())[:_LINES_LIMIT]),
    )


def _text(value: Any) -> str:
    return str(value)[:_TEXT_LIMIT]


def _number(value: Any) -> int | None:
    return None if value is None else whole(value)
