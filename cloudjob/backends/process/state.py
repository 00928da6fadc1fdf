"""The status of a job, from the last state that its controller has written."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudjob.backends.base import NativeStatus
from cloudjob.backends.process import STATE
from cloudjob.errors import BackendError
from cloudjob.model import times
from cloudjob.model.status import JobState


def read(folder: Path) -> dict[str, Any] | None:
    """Return the last state that the controller has written; None if there is none yet.

    Raises:
        BackendError: The file cannot be read.
    """
    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        if not set(state) >= _EXPECTED:
            raise ValueError("values are missing")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise BackendError(f"reading the state of a job: {path}: {error}") from error
    return state


_EXPECTED = {"started_at", "ended_at", "exit_code", "is_cancelled", "nodes"}
LOST = "the controller of the job was killed, or the machine was restarted"


def lost_status(folder: Path, found: dict[str, Any] | None, message: str) -> NativeStatus:
    """Return the status of a job whose processes were killed; the head's record has precedence."""
    begin_s = (folder / STATE).stat().st_mtime
    # A keeper touches its log when its node ends; if none has done so, that time is unknown.
    end_s = max((path.stat().st_mtime for path in folder.glob("node-*.log")), default=begin_s)
    return NativeStatus(
        JobState.FAILED,
        "lost",
        started_at=times.rfc3339(found["started_at"]) if found else None,
        ended_at=times.rfc3339(end_s) if end_s > begin_s else None,
        exit_code=137,
        message=message,
        attempt_at=times.rfc3339(found["nodes"][0]["started_at"]) if found else "",
        # An entry is sent SIGTERM when its keeper is gone; that is not a cancel.
        has_asked=not (found and found["is_cancelled"]),
        is_unwatched=True,
    )


def ended_status(found: dict[str, Any]) -> NativeStatus:
    """Return the status of a job whose controller has written how it ended."""
    nodes = found["nodes"]
    status = NativeStatus(
        JobState.CANCELLED,
        "cancelled",
        started_at=times.rfc3339(found["started_at"]),
        ended_at=times.rfc3339(found["ended_at"]),
        exit_code=found["exit_code"],
        attempt_at=times.rfc3339(nodes[0]["started_at"]),
    )
    # The first node that failed caused the others to end.
    bad = [(node["ended_at"], index) for index, node in enumerate(nodes) if node["exit_code"]]
    first = min(bad)[1] if bad else 0
    has_asked = found.get("has_asked_head", False)
    # If the head was asked to end, that node is the reason.
    code = nodes[first]["exit_code"] if has_asked else found["exit_code"]
    if found["is_cancelled"]:
        return replace(status, exit_code=code)
    if code == 0:
        return replace(status, state=JobState.SUCCEEDED, native="succeeded", exit_code=0)
    return replace(
        status,
        state=JobState.FAILED,
        native="failed",
        exit_code=code,
        message=found.get("message") or _how(code),
        node=first,
        has_asked=has_asked,
        knows_cancels=True,
    )


def _how(code: int) -> str:
    """Return how a node without a record ended."""
    try:
        return f"ended by {signal.Signals(code - 128).name}, without a record"
    except ValueError:
        return f"ended without a record, with exit code {code}"
