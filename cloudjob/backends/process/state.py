"""The status of a job, from the last state that its controller has written."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from cloudjob.backends import supervision
from cloudjob.backends.native import Ended, Stop
from cloudjob.backends.process import STATE
from cloudjob.backends.supervision import Lead
from cloudjob.errors import BackendError
from cloudjob.model import times
from cloudjob.model.status import Attempt
from jobentry.contract.exits import Cause, Failure


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


def attempt_of(written: dict[str, Any] | None) -> Attempt | None:
    """Return which attempt of a job with retries this is; None for a job without retries."""
    values = written.get("attempts") if written else None
    try:
        return Attempt(**values) if values else None
    except TypeError:  # a later version may say more
        return None


def lost_status(folder: Path, written: dict[str, Any] | None, message: str) -> Ended:
    """Return the status of a job whose processes were killed; the head's record has precedence."""
    begin_s = (folder / STATE).stat().st_mtime
    # A keeper touches its log when its node ends; if none has done so, that time is unknown.
    end_s = max((path.stat().st_mtime for path in folder.glob("node-*.log")), default=begin_s)
    is_cancelled = written is not None and written["is_cancelled"]
    return Ended(
        "lost",
        failure=Failure(exit_code=137, message=message),
        started_at=times.rfc3339(written["started_at"]) if written else None,
        ended_at=times.rfc3339(end_s) if end_s > begin_s else None,
        attempt_at=times.rfc3339(written["nodes"][0]["started_at"]) if written else "",
        # An entry is sent SIGTERM when its keeper is gone; that is not a cancel.
        stop=Stop.CANCEL if is_cancelled else Stop.PLATFORM,
        is_unwatched=True,
        attempt=attempt_of(written),
    )


def ended_status(written: dict[str, Any]) -> Ended:
    """Return the status of a job whose controller has written how it ended."""
    nodes = written["nodes"]
    seen = [supervision.Node(False, node["exit_code"], node["ended_at"]) for node in nodes]
    first = supervision.first_failed(seen) or 0
    has_asked = written.get("has_asked_head", False)
    code = written["exit_code"]
    if has_asked:
        code = supervision.exit_code(seen, Lead.HEAD, is_head_asked=True)
    if written["is_cancelled"]:
        native, cause, failure = "cancelled", Cause.CANCELLED, Failure(exit_code=code)
    elif code == 0:
        native, cause, failure = "succeeded", Cause.NONE, None
    else:
        message = written.get("message") or _how(code)
        native, cause = "failed", Cause.PLATFORM
        failure = Failure(first, exit_code=code, message=message)
    stop_of_failure = Stop.PLATFORM if has_asked else Stop.OUTSIDE
    return Ended(
        native,
        cause,
        failure,
        started_at=times.rfc3339(written["started_at"]),
        ended_at=times.rfc3339(written["ended_at"]),
        attempt_at=times.rfc3339(nodes[0]["started_at"]),
        stop=stop_of_failure if cause is Cause.PLATFORM else Stop.CANCEL,
        attempt=attempt_of(written),
    )


def _how(code: int) -> str:
    """Return how a node without a record ended."""
    try:
        return f"ended by {signal.Signals(code - 128).name}, without a record"
    except ValueError:
        return f"ended without a record, with exit code {code}"
