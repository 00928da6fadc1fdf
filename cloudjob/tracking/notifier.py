"""The process that sends the notifications of a job; ``notice`` has their contents.

A submit with a webhook or a command starts one process on this machine, the notifier. It follows
the job and holds the lock of the job's file in ``notify/`` while it runs; it removes the file after
the last notification. A file without a lock therefore belongs to a notifier that failed or was
killed: ``settle`` reports the failure, or sends the notifications itself. A failure stays in the
file until the job is removed, so that ``failure`` finds it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cloudjob import installation
from cloudjob.errors import CloudJobError, JobNotFound, UsageError
from cloudjob.home import hosts, locks, private_folder, writing
from cloudjob.model.text import secret_values
from cloudjob.retries import Limits
from cloudjob.tracking import notice
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.notice import END, FAILURE, HANG, Notice, NotSent, Targets
from jobentry.contract import hangs

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec
    from cloudjob.model.status import JobStatus
    from cloudjob.tracking.job import Job

T = TypeVar("T")
_FOLDER = "notify"
# The first word of the last line of a file whose notifications were not sent.
_FAILED = "failed"
# Seconds between two checks of a log, and the pause after a platform has not answered.
_POLL_S, _PAUSE_S = 0.5, 30.0
# The notifier ends after a platform has not answered for so many seconds.
_RETRY_S = 24 * 3600.0
# Seconds that a command waits at the end of a job: for the notifier, or for its own sending.
_WAIT_S = 5.0
_LOOK_S = 0.05
_SETTLE_LIMITS = Limits(total_s=_WAIT_S, answer_s=_WAIT_S)


@contextmanager
def start_after(spec: JobSpec, home: Path, job: str) -> Iterator[None]:
    """Start the notifier of a job when the body has submitted it.

    Raises:
        UsageError: The webhook cannot be used.
        BackendError: The folder cannot be written to.
    """
    if not (spec.notify.webhook or spec.notify.command):
        yield
        return
    _check_webhook_file(spec)
    targets = notice.targets_of(spec.notify, secret_values(spec.secrets, spec.env), os.environ)
    path = _path(home, job)
    with writing("preparing notifications", path):
        private_folder(path.parent)
        lock = locks.acquire_new(path, hosts.first_line())
    try:
        yield
        _start(home, job, targets, lock)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def _check_webhook_file(spec: JobSpec) -> None:
    """Refuse to read the webhook from a file that is sent to the nodes."""
    webhook = spec.notify.webhook
    source = Path(spec.source).resolve()
    if webhook.startswith("@") and Path(webhook[1:]).resolve().is_relative_to(source):
        raise UsageError(
            f"reading the URL of notify.webhook: {webhook[1:]} is in the source folder",
            hint="move it to another folder, because every node gets the source",
        )


def _path(home: Path, job: str) -> Path:
    return home / _FOLDER / job


def _start(home: Path, job: str, targets: Targets, lock: int) -> None:
    """Start the notifier; it gets its request through a pipe, never in argv."""
    process = subprocess.Popen(
        installation.argv_of("cloudjob.tracking.notifier", f"cloudjob-notifier-{job}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(lock,),
    )
    request = {"home": str(home), "job": job, "lock": lock, **targets._asdict()}
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(request).encode("ascii"))
    # The notifier may outlive this process, or end long before it.
    threading.Thread(target=process.wait, daemon=True).start()


def failure(home: Path, job: str) -> str:
    """Return why notifications of a job were not sent; empty if they were or may still be."""
    try:
        lines = _path(home, job).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kind, _, rest = (lines or [""])[-1].partition(" ")
    return rest if kind == _FAILED else ""


def forget(home: Path, job: str) -> None:
    """Send no further notifications of a job."""
    _path(home, job).unlink(missing_ok=True)


# -- in the notifier ------------------------------------------------------------------------------


def main() -> None:
    """Follow the job whose request is on standard input, and send its notifications."""
    from cloudjob.tracking.lookup import find

    request = json.loads(sys.stdin.buffer.read())
    home, lock, name = Path(request.pop("home")), request.pop("lock"), request.pop("job")
    _Notifier(find(home, name), _path(home, name), Targets(**request), lock).run()


class _Notifier:
    def __init__(self, job: Job, path: Path, targets: Targets, lock: int) -> None:
        self._job = job
        self._path = path
        self._targets = targets
        self._lock = lock
        self._journals = Journals(is_short=True)
        self._failures: list[str] = []
        self._has_reported = self._has_reported_silence = False

    def run(self) -> None:
        if HANG in self._targets.events:
            self._until_answered(self._watch)
        status = self._until_answered(self._job.wait)
        if status is None and self._job.is_over:
            status = self._job.last_status
        if status is None or not self._path.exists():
            return
        if _is_due(status, self._targets.events):
            self._send(notice.of_end(status))
        if self._failures:
            self._note(f"{_FAILED} {'; '.join(self._failures)}")
        else:
            self._path.unlink(missing_ok=True)

    def _send(self, found: Notice) -> None:
        self._note(f"sending {found.event}")
        try:
            notice.send(found, self._targets)
        except NotSent as error:
            self._failures.append(error.message)

    def _note(self, line: str) -> None:
        _write(self._lock, line)

    def _until_answered(self, request: Callable[[], T]) -> T | None:
        """Retry a request and return its result; None if the job is gone or the time is over."""
        end_s = time.monotonic() + _RETRY_S
        while time.monotonic() < end_s and self._path.exists():
            try:
                return request()
            except JobNotFound:
                return None
            except CloudJobError:
                pause_end_s = time.monotonic() + _PAUSE_S
                while time.monotonic() < pause_end_s and self._path.exists():
                    time.sleep(_POLL_S)
        return None

    def _watch(self) -> None:
        """Follow the log until the job has ended, and report hangs."""
        for piece in self._job.pieces(follow=True, on_journal=self._journals.add):
            if not self._path.exists():
                return
            self._report_hang()
            if not piece.data:
                time.sleep(_POLL_S)

    def _report_hang(self) -> None:
        """Report a hang once; a job that moves again may be reported again."""
        if self._journals.hang is not None:
            is_sure = self._journals.hang.confidence != hangs.Confidence.LOW.value
            if is_sure and not self._has_reported:
                self._has_reported = True
                self._send(notice.of_hang(self._status(), self._journals.hang))
        elif self._journals.last_hang is not None:
            self._has_reported = False
        if self._is_silent() and not self._has_reported_silence:
            self._has_reported_silence = True
            first = max(self._journals.running, key=lambda each: each.sample.quiet_s)
            rank, quiet_s = first.sample.rank, first.sample.quiet_s
            self._send(notice.of_silence(self._status(), first.node, rank, quiet_s))

    def _status(self) -> JobStatus:
        return self._job.last_status or self._job.status()

    def _is_silent(self) -> bool:
        """Whether all ranks have printed nothing for longer than the job file allows."""
        limit_s = self._targets.silent_s
        return bool(limit_s and self._journals.running and self._journals.silent_s >= limit_s)


def _write(lock: int, line: str) -> None:
    with suppress(OSError):  # if the disk is full, only the report of a failure is lost
        os.write(lock, f"{line}\n".encode("utf-8", "backslashreplace"))


def _is_due(status: JobStatus, events: Any) -> bool:
    kind = notice.of_end(status).event
    return END in events or (kind == FAILURE and FAILURE in events)


# -- in a command at the end of a job -------------------------------------------------------------


def settle(home: Path, status: JobStatus, described: Mapping[str, Any]) -> str:
    """Send the notifications due after the end of a job; return why that failed, else "".

    If the notifier still runs, because its webhook does not answer, wait a few seconds for it.

    Args:
        described: The job as ``Job.spec`` returns it.
    """
    path = _path(home, status.job)
    if locks.is_unseen(path):
        # The notifier runs on another machine, and sends them.
        return ""
    deadline = time.monotonic() + _WAIT_S
    with suppress(OSError):
        while (lock := locks.acquire(path, 0)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if lock is not None:
            try:
                found = failure(home, status.job)
                if not found:
                    found = _send_due(path, status, described)
                    if found:
                        os.lseek(lock, 0, os.SEEK_END)
                        _write(lock, f"{_FAILED} {found}")
                    else:
                        path.unlink(missing_ok=True)
                return found
            finally:
                os.close(lock)
    return ""


def _send_due(path: Path, status: JobStatus, described: Mapping[str, Any]) -> str:
    from cloudjob.model.sections import Notify

    last = (path.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[-1]
    kind, _, rest = last.partition(" ")
    if kind == "sending" and rest != HANG:
        return f"sending the notification of {status.job}: interrupted, so it may not have arrived"
    try:
        notify = Notify(**described["notify"])
        if _is_due(status, notify.events):
            # The values of the secrets in this shell.
            secrets = [os.environ.get(name, "") for name in described.get("secrets", ())]
            targets = notice.targets_of(notify, secrets, os.environ)
            notice.send(notice.of_end(status), targets, _SETTLE_LIMITS)
    except (LookupError, TypeError, ValueError):
        return f"sending the notification of {status.job}: its description cannot be read"
    except (NotSent, UsageError) as error:
        return error.message
    return ""
