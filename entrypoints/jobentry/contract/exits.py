"""How a job ended: ``dump`` in the container, ``load`` on the laptop; and what exit codes mean."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

ENTRY_FAILED = 125
CANNOT_EXECUTE = 126
NOT_FOUND = 127
# timeout(1) ends with this code too.
TIMED_OUT = 124

# What stands behind a message about SIGKILL; a platform that knows the reason replaces it.
MEMORY_GUESS = " (often the kernel, when memory is short)"

CAUSES = ("", "user", "entry", "platform", "cancelled", "timeout")


class RecordError(Exception):
    """A record cannot be read."""


class Failure(NamedTuple):
    """The first thing that went wrong.

    Args:
        node: The index of the node, None when no node is to blame.
        rank: The rank, None when no rank is to blame.
        signal: The signal that ended the rank, None when it ended by itself.
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
        cause: Who ended it: one of ``CAUSES``, empty for success.
        phases: ``(node, name, started_at, ended_at)`` in the order they began.
        damaged_layers: The keys of the layers of the package that are damaged in the store.
    """

    job: str
    exit_code: int
    cause: str = ""
    failure: Failure | None = None
    started_at: str = ""
    ended_at: str = ""
    phases: tuple[tuple[int, str, str, str], ...] = ()
    damaged_layers: tuple[str, ...] = ()


def code_of_signal(signal: int) -> int:
    """Return the exit code that tells of ``signal``, as a shell does."""
    return 128 + signal


def dump(record: ExitRecord) -> bytes:
    """Return the text of ``record`` from which ``load`` makes it again."""
    value: dict[str, Any] = dict(record._asdict())
    value["failure"] = None if record.failure is None else dict(record.failure._asdict())
    return json.dumps(value, indent=1, sort_keys=True).encode("ascii") + b"\n"


def load(data: bytes) -> ExitRecord:
    """Return the record that ``dump`` wrote.

    Raises:
        RecordError: ``data`` is not a record. Keys that a later version added are passed over.
    """
    try:
        value = json.loads(data.decode("ascii"))
        failure = value.get("failure")
        return ExitRecord(
            job=str(value["job"]),
            exit_code=int(value["exit_code"]),
            cause=str(value.get("cause", "")),
            failure=None if failure is None else _failure(failure),
            started_at=str(value.get("started_at", "")),
            ended_at=str(value.get("ended_at", "")),
            phases=tuple(
                (int(node), str(name), str(start), str(end))
                for node, name, start, end in value.get("phases", ())
            ),
            damaged_layers=tuple(str(key) for key in value.get("damaged_layers", ())),
        )
    # OverflowError is what Infinity ends with.
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise RecordError(f"reading an exit record: it is not one: {error}") from error


def _failure(value: dict[str, Any]) -> Failure:
    return Failure(
        node=_number(value.get("node")),
        host=str(value.get("host", "")),
        rank=_number(value.get("rank")),
        signal=_number(value.get("signal")),
        exit_code=_number(value.get("exit_code")),
        message=str(value.get("message", "")),
        last_lines=tuple(str(line) for line in value.get("last_lines", ())),
    )


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
