"""A job that is followed to its end, and how it is told."""

from __future__ import annotations

import os

from cloudjob.cli.say import printable, say, tell_error
from cloudjob.cli.tables import print_table
from cloudjob.errors import BackendError, CloudJobError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cloudjob.jobs import Job
    from cloudjob.jobs.log_filter import LogFilter
    from cloudjob.model.status import Failure, JobStatus

# Between two looks at what a job waits for.
_LOOK_S = 10.0


class Interrupts:
    """What Ctrl-C and SIGTERM do to a submit from ``hold`` on: they cancel its job.

    While the platform is asked for the job they wait for the answer: a job that is on its way
    cannot be taken back, and one that nobody heard of would run on.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._job: Job | None = None

    @property
    def came(self) -> bool:
        """Whether there was one."""
        return self._asked > 0

    def hold(self) -> None:
        """Take what comes from now on."""
        import signal

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)

    def release(self) -> None:
        """Let what comes from now on end the program, as before ``hold``."""
        import signal

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def give(self, job: Job) -> None:
        """Say which job it is that they cancel."""
        self._job = job
        if self.came:
            self._cancel(job)

    def _heard(self, _number: int, _frame: object) -> None:
        self._asked += 1
        if self._job is not None:
            self._cancel(self._job)
        elif self._asked == 1:
            say("cancelling the job once it is sent; press Ctrl-C again to stop without waiting")
        else:
            raise KeyboardInterrupt

    def _cancel(self, job: Job) -> None:
        import threading

        if self._asked == 1:
            say(f"cancelling {job.id}; press Ctrl-C again to end it at once")
        # Not in the handler: it may have cut into anything, also into a lock that this needs.
        threading.Thread(
            target=_ask_to_end, args=(job,), kwargs={"is_urgent": self._asked > 1}
        ).start()


def _ask_to_end(job: Job, *, is_urgent: bool) -> None:
    try:
        job.cancel(is_urgent=is_urgent)
    except CloudJobError as error:
        tell_error(error)


def attend(job: Job, *, is_json: bool) -> JobStatus:
    """Show the job's log until it has ended."""
    # With --json the one object owns stdout.
    try:
        stream(job, 2 if is_json else 1, follow=True)
    except BrokenPipeError:
        say(f"nobody reads the log any more; job {job.id} goes on")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except BackendError as error:
        # What counts is how the job ends; where the platform itself is away, that fails, too.
        tell_error(error)
    status = job.wait()
    report(status)
    return status


class _Waiting:
    """Says what a job waits for, as long as it has written nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._said = ""
        self._look_at = 0.0

    def heard(self, data: bytes) -> None:
        """Take in what came; nothing is a reason to look, now and then."""
        import time

        if data:
            self._look_at = float("inf")
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            word = self._job.waits_for()
            if word not in ("", self._said):
                say(f"job {self._job.id} waits: {printable(word)}")
                self._said = word


def stream(job: Job, descriptor: int, *, follow: bool, shown: LogFilter | None = None) -> None:
    """Show a job's log as it arrives: the ranks' output there, messages of the entry on stderr."""
    from cloudjob.cli.screen import Screen

    screen = Screen(is_live=os.isatty(descriptor), is_live_words=os.isatty(2))
    waiting = _Waiting(job)
    for piece in shown.pieces(job, follow=follow) if shown else job.pieces(follow=follow):
        waiting.heard(piece.data)
        if piece.data:
            ranks, words = screen.show(piece.data)
            _write(descriptor, ranks)
            _write(2, words)
    _write(descriptor, screen.finish())


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def report(status: JobStatus) -> None:
    """Say how a job ended: where, who and why."""
    seconds = _seconds(status)
    took = f" in {seconds:.1f} s" if seconds is not None else ""
    say(f"job {status.job}: {status.state}{took}")
    failure = status.failure
    if failure is None:
        return
    if failure.message:
        say(f"  {_place(failure)}{printable(failure.message)}{_code(failure)}")
    for line in failure.last_lines:
        say(f"  | {printable(line)}")


def _place(failure: Failure) -> str:
    """Return which rank of which node failed; nothing when the message names the node."""
    if failure.rank is None and failure.message.startswith(
        (f"node {failure.node} ", f"node {failure.node}: ")
    ):
        return ""
    where = [
        f"node {failure.node}" if failure.node is not None else "",
        f"({printable(failure.host)})" if failure.host else "",
        f"rank {failure.rank}" if failure.rank is not None else "",
    ]
    place = " ".join(part for part in where if part)
    return f"{place}: " if place else ""


def _code(failure: Failure) -> str:
    """Return the exit code; nothing when the message names it."""
    words = f"exit code {failure.exit_code}"
    is_said = failure.exit_code is None or failure.message.endswith(words)
    return "" if is_said else f" [{words}]"


def _seconds(status: JobStatus) -> float | None:
    from datetime import datetime

    if status.started_at is None or status.ended_at is None:
        return None
    start, end = (
        datetime.fromisoformat(text.replace("Z", "+00:00"))
        for text in (status.started_at, status.ended_at)
    )
    return (end - start).total_seconds()


def exit_code(status: JobStatus) -> int:
    """Return what cloudjob ends with: the job's own code."""
    if status.state == "SUCCEEDED":
        return status.exit_code or 0
    # Whatever is known or not: only a job that succeeded ends with 0.
    return status.exit_code or 1


def print_status(status: JobStatus) -> None:
    """Print where a job stands, a line a fact."""
    rows: list[tuple[str, object]] = [
        ("job", status.job),
        ("state", status.state),
        ("backend", f"{status.backend} ({status.native_state})"),
        ("size", f"{status.nodes} node(s) x {status.procs_per_node} rank(s)"),
        ("created", status.created_at),
        ("started", status.started_at or "-"),
        ("ended", status.ended_at or "-"),
    ]
    if status.exit_code is not None:
        rows.append(("exit code", status.exit_code))
    if status.cause:
        rows.append(("cause", status.cause))
    print_table(rows)
    if status.failure:
        report(status)


def status_json(status: JobStatus) -> dict[str, Any]:
    """Return a status as `status --json` prints it."""
    from cloudjob.model.status import to_json

    return to_json(status)
