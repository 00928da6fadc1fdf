"""Starts the notifier of a job or of a sweep, and sends what one that was killed has not sent.

A submit with a webhook or a command starts one process on this machine, the notifier: one for each
job that is on its own, and one for a sweep. It follows them and holds the lock of its file in
``notify/`` while it runs; it removes the file after the last notification. A file without a lock
therefore belongs to a notifier that failed or was killed: ``settle`` reports the failure, or sends
the notifications itself. A failure stays in the file until the job is removed, so that ``failure``
finds it.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob import installation
from cloudjob.errors import UsageError
from cloudjob.home import hosts, locks, private_folder, writing
from cloudjob.model import grid
from cloudjob.model.rules import END, FAILURE, HANG
from cloudjob.model.sections import Notify
from cloudjob.model.text import secret_values
from cloudjob.retries import RequestLimits

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec
    from cloudjob.notify.message import Notice, Targets

_FOLDER = "notify"
# The first words of the lines of a file: what is being sent, and why something was not sent.
SENDING, FAILED = "sending", "failed"
# Seconds that a command waits at the end of a job: for the notifier, or for its own sending.
_WAIT_S = 5.0
_LOOK_S = 0.05
_SETTLE_LIMITS = RequestLimits(total_s=_WAIT_S, answer_s=_WAIT_S)


@contextmanager
def start_after(spec: JobSpec, home: Path, job: str) -> Iterator[None]:
    """Start the notifier of a job when the body has submitted it.

    Raises:
        UsageError: The webhook cannot be used.
        BackendError: The folder cannot be written to.
    """
    targets = _targets(spec, events_of(spec.notify, job))
    if targets is None:
        yield
        return
    path = path_of(home, job)
    lock = _new_lock(path)
    try:
        yield
        _start(home, job, targets, lock, is_sweep=False)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def start_of_sweep(spec: JobSpec, home: Path, sweep: str) -> None:
    """Start the notifier of a sweep, unless an earlier submit of the sweep has.

    Raises:
        UsageError: The webhook cannot be used.
        BackendError: The folder cannot be written to.
    """
    targets, path = _targets(spec, events_of_sweep(spec.notify)), path_of(home, sweep)
    if targets is None or locks.is_held(path):
        return
    path.unlink(missing_ok=True)
    lock = _new_lock(path)
    try:
        _start(home, sweep, targets, lock, is_sweep=True)
    finally:
        os.close(lock)


def _targets(spec: JobSpec, events: tuple[str, ...]) -> Targets | None:
    """Return where notifications of these events go; None if there are none."""
    notify = spec.notify
    if not (notify.webhook or notify.command) or not events:
        return None
    from cloudjob.notify import message

    _check_webhook_file(spec)
    targets = message.targets_of(notify, secret_values(spec.secrets, spec.env), os.environ)
    return targets._replace(events=events)


def events_of(notify: Notify, job: str) -> tuple[str, ...]:
    """Return the events that the notifier of a job reports; in a sweep, only that it hangs."""
    is_member = bool(grid.sweep_of(job))
    return tuple(event for event in notify.events if event == HANG or not is_member)


def events_of_sweep(notify: Notify) -> tuple[str, ...]:
    """Return the events that the notifier of a sweep reports: how its jobs ended."""
    return tuple(event for event in notify.events if event != HANG)


def _check_webhook_file(spec: JobSpec) -> None:
    """Refuse to read the webhook from a file that is sent to the nodes."""
    webhook = spec.notify.webhook
    source = Path(spec.source).resolve()
    if webhook.startswith("@") and Path(webhook[1:]).resolve().is_relative_to(source):
        raise UsageError(
            f"reading the URL of notify.webhook: {webhook[1:]} is in the source folder",
            hint="move it to another folder, because every node gets the source",
        )


def path_of(home: Path, name: str) -> Path:
    """Return the file of the notifier of a job or a sweep."""
    return home / _FOLDER / name


def _new_lock(path: Path) -> int:
    with writing("preparing notifications", path):
        private_folder(path.parent)
        return locks.acquire_new(path, hosts.first_line())


def _start(home: Path, name: str, targets: Targets, lock: int, *, is_sweep: bool) -> None:
    """Start the notifier; it gets its request through a pipe, never in argv."""
    process = subprocess.Popen(
        installation.argv_of("cloudjob.notify.process", f"cloudjob-notifier-{name}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(lock,),
    )
    request = {"home": str(home), "name": name, "lock": lock, "is_sweep": is_sweep}
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps({**request, **targets._asdict()}).encode("ascii"))
    # The notifier may outlive this process, or end long before it.
    threading.Thread(target=process.wait, daemon=True).start()


def is_due(notice: Notice, events: Sequence[str]) -> bool:
    """Whether the notification of an end is wanted."""
    return END in events or (notice.event == FAILURE and FAILURE in events)


def failure(home: Path, name: str) -> str:
    """Return why notifications were not sent; empty if they were or may still be."""
    try:
        lines = path_of(home, name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kind, _, rest = (lines or [""])[-1].partition(" ")
    return rest if kind == FAILED else ""


def forget(home: Path, name: str) -> None:
    """Send no further notifications of a job or a sweep."""
    path_of(home, name).unlink(missing_ok=True)


def note(lock: int, kind: str, text: str) -> None:
    """Note in the file of a notifier what it is ``SENDING``, or why sending has ``FAILED``."""
    with suppress(OSError):  # if the disk is full, only the report of a failure is lost
        os.write(lock, f"{kind} {text}\n".encode("utf-8", "backslashreplace"))


# -- in a command at the end of a job -------------------------------------------------------------


def settle(home: Path, notice: Notice, described: Mapping[str, Any]) -> str:
    """Send the notification of an end if it is due; return why that failed, else "".

    If the notifier still runs, because its webhook does not answer, wait a few seconds for it.

    Args:
        described: The job as ``Job.spec`` returns it, or the sweep as its file has it.
    """
    name = notice.values["job"]
    path = path_of(home, name)
    if locks.is_unseen(path):
        # The notifier runs on another machine, and sends them.
        return ""
    deadline = time.monotonic() + _WAIT_S
    with suppress(OSError):
        while (lock := locks.acquire(path, 0)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if lock is not None:
            try:
                reason = failure(home, name)
                if not reason:
                    reason = _send_due(path, notice, described)
                    if reason:
                        os.lseek(lock, 0, os.SEEK_END)
                        note(lock, FAILED, reason)
                    else:
                        path.unlink(missing_ok=True)
                return reason
            finally:
                os.close(lock)
    return ""


def _send_due(path: Path, notice: Notice, described: Mapping[str, Any]) -> str:
    # Importing an HTTP client would slow down every command that works with jobs.
    from cloudjob.notify import message, send

    name = notice.values["job"]
    last = (path.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[-1]
    kind, _, rest = last.partition(" ")
    if kind == SENDING and rest != HANG:
        return f"sending the notification of {name}: interrupted, so it may not have arrived"
    try:
        notify = Notify(**described["notify"])
        is_sweep = "jobs" in notice.values
        if is_due(notice, events_of_sweep(notify) if is_sweep else events_of(notify, name)):
            # The values of the secrets in this shell.
            secrets = [os.environ.get(each, "") for each in described.get("secrets", ())]
            targets = message.targets_of(notify, secrets, os.environ)
            send.send(notice, targets, _SETTLE_LIMITS)
    except (LookupError, TypeError, ValueError):
        return f"sending the notification of {name}: its description cannot be read"
    except (send.NotSent, UsageError) as error:
        return error.message
    return ""
