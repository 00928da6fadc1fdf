"""What a notification says, and where it goes."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from cloudjob.errors import UsageError
from cloudjob.model import grid, summary
from cloudjob.model.rules import END, FAILURE, HANG
from cloudjob.model.status import Hang, JobState, JobStatus
from cloudjob.model.text import hide, one_line

if TYPE_CHECKING:
    from cloudjob.model.sections import Notify

# Services limit a message to a few thousand characters.
_MAX_LINES, _MAX_CHARACTERS, _MAX_JOBS = 10, 300, 20
# The states of jobs in the order in which a sweep's notification shows them.
_ORDER = (JobState.FAILED, JobState.UNKNOWN, JobState.CANCELLED)
_MAX_URL_LENGTH = 4096
# Shorter lines of a secret are not hidden on their own.
_SHORTEST_LINE = 8


class Targets(NamedTuple):
    """Where notifications go, and which events are reported.

    Args:
        webhook: The webhook's URL, which is a secret.
        silent_s: How long no rank prints anything before that is reported; 0 for never.
        masked_texts: Texts that must not occur in any notification.
    """

    events: Sequence[str]
    webhook: str
    command: Sequence[str]
    silent_s: float
    masked_texts: Sequence[str]


def targets_of(notify: Notify, secrets: Sequence[str], environ: Mapping[str, str]) -> Targets:
    """Return the targets that a job description names.

    Args:
        secrets: The values of the job's secrets.

    Raises:
        UsageError: The webhook's URL cannot be read or used.
    """
    url = _url(notify.webhook, environ) if notify.webhook else ""
    masked_texts = {url, *secrets}
    masked_texts |= {
        line for each in secrets for line in each.split("\n") if len(line) > _SHORTEST_LINE
    }
    return Targets(
        events=notify.events,
        webhook=url,
        command=notify.command,
        silent_s=60 * notify.silent_min,
        masked_texts=sorted(masked_texts - {""}, key=len, reverse=True),
    )


def _url(reference: str, environ: Mapping[str, str]) -> str:
    doing = "reading the URL of notify.webhook"
    if reference.startswith("@"):
        try:
            with Path(reference[1:]).open(encoding="utf-8") as file:
                url = file.read(_MAX_URL_LENGTH).strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UsageError(f"{doing}: {reference[1:]}: {reason}") from error
    elif reference in environ:
        url = environ[reference].strip()
    else:
        raise UsageError(
            f"{doing}: {reference} is not set in your environment",
            hint=f"export {reference}=https://..., or name a file: @FILE",
        )
    # Messages must not contain any part of the URL, because it gives access to the channel.
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
        is_open = parts.scheme == "http" and not is_here(parts.hostname or "")
    except ValueError:
        is_usable = is_open = False
    if not is_usable or " " in url:
        raise UsageError(f"{doing}: {reference} does not contain a URL that begins with https://")
    if is_open:
        raise UsageError(
            f"{doing}: {reference} contains an http:// URL, and others could read what is sent",
            hint="use https://; http:// is for services of this machine",
        )
    return url


def is_here(host: str) -> bool:
    """Whether a host name or address means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Notice(NamedTuple):
    """A notification.

    Args:
        event: ``end``, ``failure`` or ``hang``.
        head: The line that a person reads first.
        details: The lines below it: the reason and the last output, or the jobs of a sweep.
        values: The same facts for a program, as JSON values, neither cut nor masked.
    """

    event: str
    head: str
    details: Sequence[str]
    values: Mapping[str, Any]


def of_end(status: JobStatus) -> Notice:
    """Return the notification of a job's end."""
    took = summary.duration(status)
    head = f"job {status.job}: {status.state}" + (f" in {took}" if took else "")
    values = _values(_event(status), status)
    reason = _reason(status)
    lines = [f"| {line}" for line in values["last_lines"]]
    return Notice(values["event"], head, [*([reason] if reason else []), *lines], values)


def of_sweep(
    sweep: str, statuses: Sequence[JobStatus], values_of: Callable[[str], Mapping[str, str]]
) -> Notice:
    """Return the notification of the end of a sweep; the jobs that failed come first.

    Args:
        statuses: The status of each of its jobs; at least one.
        values_of: Returns the values of a job by its id.
    """
    precedence = {state: number for number, state in enumerate(_ORDER)}
    ordered = sorted(statuses, key=lambda status: precedence.get(status.state, len(_ORDER)))
    first = ordered[0]
    started = [each.started_at for each in statuses if each.started_at]
    ended = [each.ended_at for each in statuses if each.ended_at]
    if started and ended:
        first = first._replace(started_at=min(started), ended_at=max(ended))
    took = summary.duration(first)
    head = f"sweep {sweep}: {summary.states(ordered)}" + (f" in {took}" if took else "")
    jobs = [
        {
            "job": each.job,
            "values": dict(values_of(each.job)),
            "state": each.state.value,
            "exit_code": each.exit_code,
            "message": _reason(each),
        }
        for each in ordered[:_MAX_JOBS]
    ]
    details = [_line_of(job) for job in jobs]
    if len(ordered) > len(jobs):
        details.append(f"and {len(ordered) - len(jobs)} more jobs")
    values = {**_values(_event(first), first), "job": sweep, "jobs": jobs}
    return Notice(values["event"], head, details, values)


def _line_of(job: Mapping[str, Any]) -> str:
    values, reason = grid.text_of(job["values"]), job["message"]
    name = f"{job['job']} ({values})" if values else job["job"]
    return f"{name}: {job['state']}" + (f": {reason}" if reason else "")


def _event(status: JobStatus) -> str:
    return FAILURE if status.state in (JobState.FAILED, JobState.UNKNOWN) else END


def _reason(status: JobStatus) -> str:
    """Return why a job failed, if only as its exit code or its platform's word; else empty."""
    reason = summary.reason(status)
    if reason or status.state is not JobState.FAILED:
        return reason
    code = f"exit code {status.exit_code}" if status.exit_code is not None else status.native_state
    return f"{code} ({status.cause})" if status.cause else code


def of_hang(status: JobStatus, hang: Hang) -> Notice:
    """Return the notification of a job that hangs."""
    rank = hang.ranks[0] if len(hang.ranks) == 1 else None
    why = "; ".join((hang.message, *hang.details))
    return _of_hang(status, f"hangs: {why}", {"rank": rank, "message": why})


def of_silence(status: JobStatus, node: int, rank: int, silent_s: float) -> Notice:
    """Return the notification of a job none of whose ranks prints anything.

    Args:
        rank: The rank that has been silent for the longest, for ``silent_s``.
    """
    why = f"no rank prints anything; rank {rank} on node {node} stopped first"
    why = f"{why}, {summary.span(silent_s)} ago"
    return _of_hang(status, f"may hang: {why}", {"node": node, "rank": rank, "message": why})


def _of_hang(status: JobStatus, what: str, more: Mapping[str, Any]) -> Notice:
    values = {**_values(HANG, status), **more, "last_lines": []}
    return Notice(HANG, f"job {status.job}: {what}", (), values)


def _values(event: str, status: JobStatus) -> dict[str, Any]:
    failure = status.failure
    return {
        "event": event,
        "job": status.job,
        "name": status.name,
        "backend": status.backend,
        "state": status.state.value,
        "nodes": status.nodes,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "exit_code": status.exit_code,
        "cause": status.cause,
        "node": failure.node if failure else None,
        "host": (failure.host or None) if failure else None,
        "rank": failure.rank if failure else None,
        "message": failure.message if failure else "",
        "last_lines": list(failure.last_lines)[-_MAX_LINES:] if failure else [],
    }


def body(notice: Notice, masked_texts: Sequence[str]) -> dict[str, Any]:
    """Return the object that is sent: ``text``, which a person reads, and the values."""
    # Secrets are masked before texts are cut, because a cut could leave the start of a secret.
    head, details, values = hide((notice.head, notice.details, notice.values), masked_texts)
    text = "\n".join([head, *map(_cut, details)])
    return {**_cut_all(values), "text": text}


def _cut_all(value: Any) -> Any:
    """Return JSON values with their texts cut."""
    if isinstance(value, Mapping):
        return {_cut(name): _cut_all(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut_all(each) for each in value]
    return _cut(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = one_line(text)
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."
