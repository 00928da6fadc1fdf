"""The exit record, which the head writes and the laptop reads, and the meaning of exit codes."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from jobentry.contract import hangs
from jobentry.contract.hangs import Hang

ENTRY_FAILED = 125
CANNOT_EXECUTE = 126
NOT_FOUND = 127
# The exit code that timeout(1) uses, also for a job that was ended because it hung.
TIMED_OUT = 124

# Appended to a message about SIGKILL, unless the platform knows the reason.
MEMORY_GUESS = " (often the kernel, when memory is short)"

# Limits for reading, since others may write to a store: characters of a text, and last lines.
_TEXT_LIMIT, _LINES_LIMIT = 16 * 1024, 1000

CAUSES = ("", "user", "entry", "platform", "cancelled", "timeout", "hang")


class RecordError(Exception):
    """The bytes are not an exit record."""


class Failure(NamedTuple):
    """The first failure of a job.

    Args:
        node: The index of the node that failed, None if no node did.
        rank: The rank that failed, None if no rank did.
        signal: The signal that ended the rank, None if it exited.
        last_lines: The last lines of that rank's log.
    """

    node: int | None = None
    host: str = ""
    rank: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    message: str = ""
    last_lines: tuple[str, ...] = ()


class ExitRecord(NamedTuple):
    """How a job ended. Times are RFC 3339 UTC.

    Args:
        cause: What ended the job: one of ``CAUSES``, empty for success.
        phases: ``(node, name, started_at, ended_at)`` in order of their start.
        damaged_layers: The keys of the package's layers that are damaged in the store.
        hang: How the job hung when it ended; None if it did not.
    """

    job: str
    exit_code: int
    cause: str = ""
    failure: Failure | None = None
    started_at: str = ""
    ended_at: str = ""
    phases: tuple[tuple[int, str, str, str], ...] = ()
    damaged_layers: tuple[str, ...] = ()
    hang: Hang | None = None


def code_of_signal(signal: int) -> int:
    """Return the exit code for a process ended by ``signal``, as a shell reports it."""
    return 128 + signal


def dump(record: ExitRecord) -> bytes:
    """Serialise ``record`` as JSON for ``load``."""
    value: dict[str, Any] = dict(record._asdict())
    value["failure"] = None if record.failure is None else dict(record.failure._asdict())
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
            exit_code=int(value["exit_code"]),
            cause=_text(value.get("cause", "")),
            failure=None if failure is None else _failure(failure),
            started_at=_text(value.get("started_at", "")),
            ended_at=_text(value.get("ended_at", "")),
            phases=tuple(
                (int(node), str(name), str(start), str(end))
                for node, name, start, end in value.get("phases", ())
            ),
            damaged_layers=tuple(str(key) for key in value.get("damaged_layers", ())),
            hang=None if hang is None else hangs.from_values(hang),
        )
    # OverflowError: a number is Infinity.
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
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
    )


def _text(value: Any) -> str:
    return str(value)[:_TEXT_LIMIT]


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
