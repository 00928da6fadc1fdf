"""The columns of a job list: age, duration, and why a job failed."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cloudjob.model import times
from cloudjob.model.status import Absence, Failure, JobState, JobStatus
from cloudjob.model.text import size_text

_MINUTE, _HOUR, _DAY = 60, 3600, 24 * 3600
# Below this many seconds, tenths are shown.
_SHORT_S = 10
_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))


def span(seconds: float) -> str:
    """Return a duration as all views show it: ``4.2 s``, ``42 s``, ``1 h 05 min``.

    It is cut, not rounded, so that a counter never shows a second that is not over. A whole number
    has neither tenths nor ``00 s``: its source is hardly more precise.
    """
    whole = max(int(seconds), 0)
    if whole < _SHORT_S and not isinstance(seconds, int):
        return f"{max(int(10 * seconds), 0) / 10} s"
    for limit, unit, part, small in _UNITS:
        if whole >= limit:
            rest = whole % limit // part
            more = f" {rest:02d} {small}" if rest or not isinstance(seconds, int) else ""
            return f"{whole // limit} {unit}{more}"
    return f"{whole} s"


def age(status: JobStatus) -> str:
    """Return how long ago a job was submitted, in its largest unit: ``3 min``."""
    seconds = time.time() - times.seconds_of(status.created_at)
    for limit, unit, _, _ in _UNITS:
        if seconds >= limit:
            return f"{int(seconds // limit)} {unit}"
    return f"{max(int(seconds), 0)} s"


def duration(status: JobStatus) -> str:
    """Return how long a job has run or ran; empty if unknown, as after a clock was set back."""
    if status.started_at is None or (status.ended_at is None and status.state.is_final):
        return ""
    end = status.ended_at or times.rfc3339(time.time())
    seconds = times.seconds_of(end) - times.seconds_of(status.started_at)
    return span(seconds) if seconds >= 0 else ""


def reason(status: JobStatus) -> str:
    """Return why a job failed or its state is unknown; empty for all other states."""
    failure = status.failure
    if failure is None or not failure.message:
        return status.native_state if status.state is JobState.UNKNOWN else ""
    where = place(failure)
    return f"{failure.message} ({where})" if where else failure.message


def wait(status: JobStatus) -> str:
    """Return for how long a job has waited, and for what; empty if its platform does not say so."""
    if status.wait is None:
        return ""
    hint = f"; {status.wait.hint}" if status.wait.hint else ""
    what = f"{status.wait.message}{hint}"
    since_s = times.seconds_of(status.wait.since)
    return f"{span(int(time.time() - since_s))}: {what}" if since_s else what


def cut_logs(status: JobStatus) -> list[str]:
    """Return which logs end too early, and why, a line for each."""
    return [
        f"the log of node {each.node} ends too early: {size_text(each.missing_bytes)} of output"
        f" could not be written ({each.reason}); `logs --stored` reads the copy in the store"
        for each in status.cut_logs
    ]


def attempt(status: JobStatus) -> str:
    """Return which attempt of a job with retries this is; empty for a job without retries."""
    if status.attempt is None:
        return ""
    before = status.attempt.previous_cause
    text = f"{status.attempt.number} of {status.attempt.most}"
    return f"{text}; the one before failed (cause: {before})" if before else text


def command(spec: Mapping[str, Any]) -> str:
    """Return the script of a job with its arguments; others may have written the description."""
    args = spec.get("args")
    words = [spec.get("script") or "", *(args if isinstance(args, (list, tuple)) else ())]
    return shlex.join(filter(None, map(str, words)))


def states(statuses: Sequence[JobStatus]) -> str:
    """Return the number of jobs by state: ``4 SUCCEEDED, 1 FAILED, 1 never submitted``."""
    never = Absence.NEVER_SUBMITTED
    words = [never.value if each.absence is never else str(each.state) for each in statuses]
    return ", ".join(f"{number} {word}" for word, number in Counter(words).items()) or "no jobs"


def place(failure: Failure) -> str:
    """Return which rank of which node failed, without what the message says of it."""
    # A platform names a node with its host in parentheses.
    is_unnamed = failure.node is not None and f"node {failure.node} (" not in failure.message
    parts = (
        f"node {failure.node}" if is_unnamed else "",
        f"rank {failure.rank}" if failure.rank is not None else "",
    )
    text = " ".join(filter(None, parts))
    is_named = failure.message.startswith((f"{text} ", f"{text}: "))
    return "" if is_named else text
