"""Follows a job to its end, and prints its log and its status."""

from __future__ import annotations

import os
import sys

from cloudjob.cli.say import count, print_error, printable, say, show
from cloudjob.cli.tables import print_table
from cloudjob.errors import BackendError, CloudJobError
from cloudjob.times import seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from cloudjob import Job, LogFilter
    from cloudjob.model.status import Failure, JobStatus

# What Ctrl-C does; a person is asked only about jobs that do not run on this machine.
ASK, CANCEL, DETACH = "ask", "cancel", "detach"
# Exit codes of a submit that leaves its job running: after Ctrl-C, and when the terminal closes.
_DETACHED, _CLOSED = 130, 129
# Seconds between two requests for why a job waits.
_LOOK_S = 10.0


class Interrupts:
    """What Ctrl-C, SIGTERM and a terminal that closes do to a submit from ``hold`` on.

    While the platform is asked for the job, they wait for the answer: a job that is on its way
    cannot be taken back, and a job that nobody has heard of would run on.

    Args:
        on_interrupt: ``cancel`` the job, ``detach`` from it so that it continues, or ``ask``.
    """

    def __init__(self, on_interrupt: str = CANCEL) -> None:
        self._on_interrupt = on_interrupt
        self._asked = 0
        self._is_closed = False
        self._job: Job | None = None

    @property
    def came(self) -> bool:
        """Whether there was one."""
        return self._asked > 0

    def hold(self) -> None:
        """Handle signals from now on."""
        import signal

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)
        # nohup ignores it.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._closed)

    def release(self) -> None:
        """Let signals end the program from now on, as before ``hold``."""
        import signal

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def give(self, job: Job) -> None:
        """Set the job that they are about."""
        self._job = job
        if self._is_closed:
            raise SystemExit(_CLOSED)
        if self.came and self._on_interrupt == DETACH:
            _detach(job)
        elif self.came:
            self._cancel(job)

    def _heard(self, number: int, _frame: object) -> None:
        self._asked += 1
        if self._job is not None:
            if self._is_detach(self._job, number):
                _detach(self._job)
            self._cancel(self._job)
        elif self._asked == 1:
            then = "detaching from" if self._on_interrupt == DETACH else "cancelling"
            say(f"{then} the job once it is sent; press Ctrl-C again to stop without waiting")
        else:
            raise KeyboardInterrupt

    def _closed(self, _number: int, _frame: object) -> None:
        self._is_closed = True
        if self._job is not None:
            raise SystemExit(_CLOSED)

    def _is_detach(self, job: Job, number: int) -> bool:
        """Whether to detach from the job: asks a person once, where there is a terminal."""
        import signal

        is_first = self._on_interrupt == ASK and self._asked == 1
        if not (is_first and number == signal.SIGINT and os.isatty(0) and os.isatty(2)):
            return self._on_interrupt == DETACH
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            show(f"\ndetach from {job.id} (Enter), or cancel it (c, or Ctrl-C again)? ")
            return not sys.stdin.readline().strip().lower().startswith("c")
        except KeyboardInterrupt:
            show("\n")
            return False
        finally:
            signal.signal(signal.SIGINT, self._heard)

    def _cancel(self, job: Job) -> None:
        import threading

        if self._asked == 1:
            say(f"cancelling {job.id}; press Ctrl-C again to end it at once")
        elif self._asked == 2:
            say(f"ending {job.id} at once, without its grace period")
        # Not in the handler: it may have cut into anything, also into a lock that this needs.
        threading.Thread(
            target=_ask_to_end, args=(job,), kwargs={"is_urgent": self._asked > 1}
        ).start()


def say_detached(job: Job) -> None:
    """Print that the job continues, and which commands follow or cancel it."""
    say(f"detached; {job.id} continues: cloudjob logs {job.id} -f, cloudjob cancel {job.id}")


def _detach(job: Job) -> NoReturn:
    say_detached(job)
    raise SystemExit(_DETACHED)


def _ask_to_end(job: Job, *, is_urgent: bool) -> None:
    try:
        job.cancel(is_urgent=is_urgent)
    except CloudJobError as error:
        print_error(error)


def attend(job: Job, *, is_json: bool) -> JobStatus:
    """Show the job's log until it has ended."""
    # With --json the one object owns stdout.
    try:
        stream(job, 2 if is_json else 1, follow=True)
    except BrokenPipeError:
        say(f"nobody reads the log any more; job {job.id} continues")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except BackendError as error:
        # What counts is how the job ends; if the platform cannot be reached, `wait` reports it.
        print_error(error)
    status = job.wait()
    report(status)
    return status


class _Waiting:
    """Prints why a job waits, until it has written something."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._said = ""
        self._look_at = 0.0

    def heard(self, data: bytes) -> None:
        """Note what the job has written; while it writes nothing, ask why, at intervals."""
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
    from cloudjob import LogFilter
    from cloudjob.cli.screen import Screen
    from cloudjob.cli.silence import Silence

    screen = Screen(is_live=os.isatty(descriptor), is_live_words=os.isatty(2))
    several = job.nodes > 1
    waiting, silence = _Waiting(job), Silence(job)
    # Of a job whose lines are searched, no line may match for long.
    report = str if shown and shown.pattern else silence.report
    every = shown or LogFilter()
    for piece in every.pieces(job, follow=follow, on_journal=silence.add):
        waiting.heard(piece.data)
        if piece.data:
            silence.end()
            ranks, words = screen.show(piece.data)
            if several and words:
                words = _with_node(piece.node, words)
            _write(descriptor, ranks)
            _write(2, words)
        elif message := report():
            say(message)
    _write(descriptor, screen.finish())


def _with_node(node: int, words: bytes) -> bytes:
    """Return lines of a node's entry, or of its platform, with the node that they are from."""
    mark = b"[node %d] " % node
    return b"".join(mark + line for line in words.splitlines(keepends=True))


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def report(status: JobStatus) -> None:
    """Print how a job ended: on which node, in which rank and why."""
    took = ""
    if status.started_at and status.ended_at:
        took = f" in {seconds_of(status.ended_at) - seconds_of(status.started_at):.1f} s"
    say(f"job {status.job}: {status.state}{took}")
    failure = status.failure
    if failure is None:
        return
    if failure.message:
        say(f"  {_place(failure)}{printable(failure.message)}{_code(failure)}")
    if failure.host and failure.host not in failure.message and failure.message:
        say(f"  host {printable(failure.host)}")
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
        f"rank {failure.rank}" if failure.rank is not None else "",
    ]
    place = " ".join(part for part in where if part)
    return f"{place}: " if place else ""


def _code(failure: Failure) -> str:
    """Return the exit code; nothing when the message names it."""
    words = f"exit code {failure.exit_code}"
    is_said = failure.exit_code is None or failure.message.endswith(words)
    return "" if is_said else f" [{words}]"


def print_status(status: JobStatus) -> None:
    """Print the status of a job, one line for each fact."""
    rows: list[tuple[str, object]] = [
        ("job", status.job),
        ("state", status.state),
        ("backend", f"{status.backend} ({status.native_state})"),
        ("size", f"{count(status.nodes, 'node')} with {_ranks(status.procs_per_node)}"),
        ("created", status.created_at),
        ("started", status.started_at or "-"),
        ("ended", status.ended_at or "-"),
    ]
    if status.exit_code is not None:
        rows.append(("exit code", status.exit_code))
    if status.cause:
        rows.append(("cause", status.cause))
    print_table(rows)
    if status.phases:
        from cloudjob.cli.phases import print_phases

        print_phases(status)
    if status.failure:
        report(status)


def _ranks(procs_per_node: int) -> str:
    return f"{count(procs_per_node, 'rank')} each" if procs_per_node else "a rank for each device"


def status_json(status: JobStatus) -> dict[str, Any]:
    """Return a status as `status --json` prints it."""
    from cloudjob.model.status import to_json

    return to_json(status)
