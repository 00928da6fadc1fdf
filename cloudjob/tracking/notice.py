"""The contents of a notification, and how it is sent to a webhook or a command."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from cloudjob.errors import CloudJobError, UsageError
from cloudjob.model import summary
from cloudjob.model.status import Hang, JobState, JobStatus
from cloudjob.model.text import hide
from cloudjob.retries import Limits

if TYPE_CHECKING:
    from cloudjob.model.sections import Notify

END, FAILURE, HANG = "end", "failure", "hang"
# The variable that gives a command everything as one JSON object.
VARIABLE = "CLOUDJOB_NOTIFICATION"
# Services limit a message to a few thousand characters.
_MAX_LINES, _MAX_CHARACTERS = 10, 300
_MAX_URL_LENGTH = 4096
# Shorter lines of a secret are not hidden on their own.
_SHORTEST_LINE = 8
_COMMAND_S = 60.0
# Seconds between two checks of a command's output, and the number of bytes kept of it.
_LOOK_S, _MAX_BYTES = 0.1, 1_000_000
_MAX_STDERR_BYTES = 64 * 1024
# How long to try to reach a webhook.
LIMITS = Limits(total_s=60.0, answer_s=10.0, pause_s=1.0, longest_pause_s=15.0)


class NotSent(CloudJobError):
    """A notification was not sent.

    Args:
        is_refused: Whether it certainly did not arrive, so that a retry is safe.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


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
            found = getattr(error, "strerror", None) or "it is not text"
            raise UsageError(f"{doing}: {reference[1:]}: {found}") from error
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
        why: The reason; empty if it is unknown, or ``head`` contains it.
        values: The same facts for a program, as JSON values, neither cut nor masked.
    """

    event: str
    head: str
    why: str
    values: Mapping[str, Any]


def of_end(status: JobStatus) -> Notice:
    """Return the notification of a job's end."""
    is_failure = status.state in (JobState.FAILED, JobState.UNKNOWN)
    took = summary.duration(status)
    head = f"job {status.job}: {status.state}" + (f" in {took}" if took else "")
    failure = status.failure
    lines = list(failure.last_lines)[-_MAX_LINES:] if failure else []
    return _notice(FAILURE if is_failure else END, status, head, summary.reason(status), lines)


def of_hang(status: JobStatus, hang: Hang) -> Notice:
    """Return the notification of a job that hangs."""
    rank = hang.ranks[0] if len(hang.ranks) == 1 else None
    why = "; ".join((hang.message, *hang.details))
    return _hang_notice(status, f"hangs: {why}", {"rank": rank, "message": why})


def of_silence(status: JobStatus, node: int, rank: int, silent_s: float) -> Notice:
    """Return the notification of a job none of whose ranks prints anything.

    Args:
        rank: The rank that has been silent for the longest, for ``silent_s``.
    """
    why = f"no rank prints anything; rank {rank} on node {node} stopped first"
    why = f"{why}, {summary.span(silent_s)} ago"
    return _hang_notice(status, f"may hang: {why}", {"node": node, "rank": rank, "message": why})


def _hang_notice(status: JobStatus, what: str, values: Mapping[str, Any]) -> Notice:
    notice = _notice(HANG, status, f"job {status.job}: {what}", "", [])
    return notice._replace(values={**notice.values, **values})


def _notice(event: str, status: JobStatus, head: str, why: str, lines: Sequence[str]) -> Notice:
    failure = status.failure
    values = {
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
        "last_lines": lines,
    }
    return Notice(event, head, why, values)


def body(notice: Notice, masked_texts: Sequence[str]) -> dict[str, Any]:
    """Return the object that is sent: ``text``, which a person reads, and the values."""
    # Secrets are masked before texts are cut, because a cut could leave the start of a secret.
    head, why, values = hide((notice.head, notice.why, notice.values), masked_texts)
    why, lines = _cut(why), [_cut(line) for line in values["last_lines"]]
    text = "\n".join([head, *([why] if why else []), *(f"| {line}" for line in lines)])
    return {**values, "message": _cut(values["message"]), "last_lines": lines, "text": text}


def _cut(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."


# -- sending --------------------------------------------------------------------------------------


def send(notice: Notice, targets: Targets, limits: Limits = LIMITS) -> None:
    """Send a notification to every target.

    Raises:
        NotSent: With the error of each target that it did not reach.
    """
    # Importing an HTTP client would slow down every command that works with jobs.
    from cloudjob.tracking import webhook

    sent = body(notice, targets.masked_texts)
    failures = []
    if targets.webhook:
        try:
            webhook.call(targets.webhook, sent, limits)
        except NotSent as error:
            failures.append(f"webhook: {error.message}")
    if targets.command:
        try:
            _run(targets.command, sent, targets.masked_texts)
        except NotSent as error:
            failures.append(f"command {targets.command[0]}: {error.message}")
    if failures:
        found = hide("; ".join(failures), targets.masked_texts)
        job = notice.values["job"]
        raise NotSent(f"sending the notification of the {notice.event} of {job}: {found}")


def _run(command: Sequence[str], sent: Mapping[str, Any], masked_texts: Sequence[str]) -> None:
    """Run the user's command once, with the text on its standard input.

    Raises:
        NotSent: It failed, or took too long.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(f"{sent['text']}\n".encode("utf-8", "backslashreplace"))
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, VARIABLE: json.dumps(sent)},
                start_new_session=True,
            )
        except OSError as error:
            raise NotSent(str(error.strerror)) from None
        code = _exit_code(process, stderr.fileno())
        end = stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, end - _MAX_STDERR_BYTES))
        last = hide(stderr.read().decode("utf-8", "replace").strip("\0\n "), masked_texts)
        last = last.split("\n")[-1][-_MAX_CHARACTERS:]
    if code:
        raise NotSent(f"exit code {code}" + (f": {last}" if last else ""))


def _exit_code(process: subprocess.Popen[bytes], stderr: int) -> int:
    """Wait for a command and return its exit code; its output must not fill the disk."""
    deadline = time.monotonic() + _COMMAND_S
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        if os.fstat(stderr).st_blocks * 512 > _MAX_BYTES:
            os.truncate(stderr, 0)  # the file becomes sparse: the command keeps its offset
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise NotSent(f"it ran for {_COMMAND_S:g} s and was ended")
