"""Follows a job to its end, and prints its log and its status."""

from __future__ import annotations

import os
import sys

import cloudjob
from cloudjob.cli.messages import print_error, print_message, printable, write_stderr
from cloudjob.cli.tables import print_table
from cloudjob.errors import BackendError, CloudJobError
from cloudjob.model.text import counted
from cloudjob.times import local, rfc3339, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any, NoReturn

    from cloudjob import Job, JobSpec, LogFilter, Sweep
    from cloudjob.model.status import Failure, JobStatus

# What Ctrl-C does; a person is asked only about jobs that do not run on this machine.
ASK, CANCEL, DETACH = "ask", "cancel", "detach"
# Exit codes of a submit that leaves its job running: after Ctrl-C, and when the terminal closes.
_DETACHED, _CLOSED = 130, 129
# Less bright than the log above it.
_DIM = b"\x1b[2m%s"


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
        self._job: Job | Sweep | None = None

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

    def give(self, job: Job | Sweep) -> None:
        """Set the job that the signals apply to."""
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
            print_message(
                f"{then} the job once it is sent; press Ctrl-C again to stop without waiting"
            )
        else:
            raise KeyboardInterrupt

    def _closed(self, _number: int, _frame: object) -> None:
        self._is_closed = True
        if self._job is not None:
            raise SystemExit(_CLOSED)

    def _is_detach(self, job: Job | Sweep, number: int) -> bool:
        """Whether to detach from the job: asks a person once, where there is a terminal."""
        import signal

        is_first = self._on_interrupt == ASK and self._asked == 1
        if not (is_first and number == signal.SIGINT and os.isatty(0) and os.isatty(2)):
            return self._on_interrupt == DETACH
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            write_stderr(f"\ndetach from {job.id} (Enter), or cancel it (c, or Ctrl-C again)? ")
            return not sys.stdin.readline().strip().lower().startswith("c")
        except KeyboardInterrupt:
            write_stderr("\n")
            return False
        finally:
            signal.signal(signal.SIGINT, self._heard)

    def _cancel(self, job: Job | Sweep) -> None:
        import threading

        if self._asked == 1:
            print_message(f"cancelling {job.id}; press Ctrl-C again to end it at once")
        elif self._asked == 2:
            print_message(f"ending {job.id} at once, without its grace period")
        # Not in the handler: it may have cut into anything, also into a lock that this needs.
        threading.Thread(
            target=_ask_to_end, args=(job,), kwargs={"is_urgent": self._asked > 1}
        ).start()


def interrupts_of(spec: JobSpec, options: argparse.Namespace) -> Interrupts:
    """Return what Ctrl-C does to a submit."""
    from cloudjob.model.rules import REMOTE_BACKENDS

    # A job on this machine rarely should continue; with a remote job only its user knows.
    usual = ASK if spec.backend in REMOTE_BACKENDS else CANCEL
    return Interrupts(options.on_interrupt or usual)


def print_detached(job: Job | Sweep) -> None:
    """Print that the job continues, and which commands follow or cancel it."""
    from cloudjob import Sweep

    if isinstance(job, Sweep):
        more = f"cloudjob list --sweep {job.id}, cloudjob wait {job.id}, cloudjob cancel {job.id}"
        print_message(f"detached; the jobs of {job.id} that were submitted continue: {more}")
        return
    more = f"cloudjob logs {job.id} -f, cloudjob cancel {job.id}"
    print_message(f"detached; {job.id} continues: {more}")


def _detach(job: Job | Sweep) -> NoReturn:
    print_detached(job)
    raise SystemExit(_DETACHED)


def _ask_to_end(job: Job | Sweep, *, is_urgent: bool) -> None:
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
        print_message(f"nobody reads the log any more; job {job.id} continues")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except BackendError as error:
        # What counts is how the job ends; if the platform cannot be reached, `wait` reports it.
        print_error(error)
    status = job.wait()
    report(status)
    warn_of_notifications(job)
    return status


def warn_of_notifications(job: Job) -> None:
    """Print what went wrong with the notifications of a job that has ended."""
    trouble = job.settle_notifications()
    if trouble:
        print_message(f"warning: {trouble}")


class _Notices:
    """What to report of a job that is followed, besides its log."""

    def __init__(self, job: Job, shown: LogFilter | None) -> None:
        from cloudjob.cli.phases import Activity
        from cloudjob.cli.silence import Silence

        self._activity = None if shown else Activity(job)
        # Of a job whose lines are searched, no line may match for long.
        self._silence = None if shown and shown.pattern else Silence(job)

    def add(self, node: int, lines: list[bytes]) -> None:
        """Read new lines of a node's journal."""
        if self._activity:
            self._activity.add(node, lines)
        if self._silence:
            self._silence.add(node, lines)

    def end_silence(self, *, has_output: bool) -> None:
        """Note that a node, or one of its ranks, has written something."""
        if self._silence:
            self._silence.end()
        if self._activity and has_output:
            self._activity.has_output = True

    def line(self) -> str:
        """Return what the job does now."""
        return self._activity.line() if self._activity else ""

    def news(self, *, is_live: bool, is_due: bool) -> list[str]:
        """Return lines to print once.

        Args:
            is_live: Whether ``line`` is shown.
            is_due: Whether ``line`` was called since the last call.
        """
        doing = self._activity.news() if self._activity and is_due and not is_live else ""
        silence = self._silence.report() if self._silence else ""
        return [text for text in (doing, silence) if text]


def stream(job: Job, descriptor: int, *, follow: bool, shown: LogFilter | None = None) -> None:
    """Show a job's log as it arrives: the ranks' output there, messages of the entry on stderr.

    On a terminal, the states of progress bars stand below a log that is followed; without
    ``shown``, what the job waits for stands there, too.
    """
    from cloudjob.cli.live import LiveLines, is_terminal, write_all
    from cloudjob.cli.screen import Screen

    terminals = [number for number in (descriptor, 2) if follow and is_terminal(number)]
    screen = Screen(is_live=os.isatty(descriptor), are_messages_live=os.isatty(2))
    notices = _Notices(job, shown)
    every, start = shown or cloudjob.LogFilter(), b""
    with LiveLines(terminals[0] if terminals else None) as live:
        for piece in every.pieces(job, follow=follow, on_journal=notices.add):
            start = _local_time(piece.at) if every.is_timed else b""
            ranks, messages = screen.show(piece.data, start)
            live.write(descriptor, ranks)
            live.write(2, _with_node(piece.node, messages, start) if job.nodes > 1 else messages)
            if piece.data:
                notices.end_silence(has_output=bool(ranks) or screen.has_parts)
            if is_due := live.is_due:
                bars = screen.bars.items() if descriptor in terminals else ()
                lines = [b"[%d] %s" % bar for bar in bars]
                doing = notices.line()
                live.show([*lines, _DIM % doing.encode()] if doing else lines)
            for text in notices.news(is_live=bool(terminals), is_due=is_due):
                print_message(text)
    write_all(descriptor, screen.finish(start))


def _local_time(at: float | None) -> bytes:
    """Return a time as the start of a line; blanks if it is not known."""
    return f"{local(rfc3339(at or 0.0)):19} ".encode("ascii")


def _with_node(node: int, text: bytes, start: bytes) -> bytes:
    """Return lines of a node's entry, or of its platform, with the node that they are from.

    Args:
        start: What each line begins with, such as its time.
    """
    mark = b"%s[node %d] " % (start, node)
    return b"".join(mark + line[len(start) :] for line in text.splitlines(keepends=True))


def report(status: JobStatus) -> None:
    """Print how a job ended: on which node, in which rank and why."""
    took = ""
    if status.started_at and status.ended_at:
        took = f" in {seconds_of(status.ended_at) - seconds_of(status.started_at):.1f} s"
    print_message(f"job {status.job}: {status.state}{took}")
    failure = status.failure
    if failure is None:
        return
    if failure.message:
        print_message(f"  {_place(failure)}{printable(failure.message)}{_code(failure)}")
    if failure.host and failure.host not in failure.message and failure.message:
        print_message(f"  host {printable(failure.host)}")
    for line in failure.last_lines:
        print_message(f"  | {printable(line)}")


def _place(failure: Failure) -> str:
    """Return which rank of which node failed; empty if the message names the node."""
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
    """Return the exit code as text; empty if the message names it."""
    words = f"exit code {failure.exit_code}"
    is_said = failure.exit_code is None or failure.message.endswith(words)
    return "" if is_said else f" [{words}]"


def print_status(status: JobStatus) -> None:
    """Print the status of a job, one line for each fact."""
    rows: list[tuple[str, object]] = [
        ("job", status.job),
        ("state", status.state),
        ("backend", f"{status.backend} ({status.native_state})"),
        ("size", f"{counted(status.nodes, 'node')} with {_ranks(status.procs_per_node)}"),
        ("created", local(status.created_at)),
        ("started", local(status.started_at or "-")),
        ("ended", local(status.ended_at or "-")),
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
    return f"{counted(procs_per_node, 'rank')} each" if procs_per_node else "a rank for each device"


def status_json(status: JobStatus) -> dict[str, Any]:
    """Return a status as `status --json` prints it."""
    from cloudjob.model.status import to_json

    return to_json(status)
