"""Follows a job to its end, and prints its log."""

from __future__ import annotations

import os
from contextlib import suppress

import cloudjob
from cloudjob.cli.endings import report
from cloudjob.cli.messages import print_error, print_message
from cloudjob.errors import BackendError, RunsElsewhere
from cloudjob.model.text import one_line
from cloudjob.model.times import local, rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob import Job, LogFilter, Sweep
    from cloudjob.model.status import JobStatus

# Less bright than the log above it.
_DIM = b"\x1b[2m%s"


def follow_to_end(job: Job, *, is_json: bool) -> JobStatus:
    """Show the job's log until it has ended."""
    # With --json, stdout is reserved for the JSON object.
    descriptor, has_log = 2 if is_json else 1, True
    try:
        stream(job, descriptor, follow=True)
    except BrokenPipeError:
        print_message(f"the reader of this output has closed it; job {job.id} continues")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except RunsElsewhere:
        raise
    except BackendError as error:
        # The log is optional: if the platform cannot be reached, `wait` reports that.
        print_error(error)
        has_log = job.is_ours
    status = job.wait()
    if not has_log:
        # Out of reach here, but its nodes have stored their logs.
        with suppress(BackendError):
            stream(job, descriptor, follow=False)
    report(status)
    explain_failure(job, status)
    warn_of_notifications(job)
    return status


def explain_failure(job: Job, status: JobStatus) -> None:
    """Print what this machine knows about the failure of a job, and what to do."""
    if text := failure_hint_text(job, status):
        print_message(f"hint: {one_line(text)}")


def failure_hint_text(job: Job, status: JobStatus) -> str:
    """Return what this machine knows about the failure of a job; empty if it knows nothing."""
    if status.failure is None:
        return ""
    from cloudjob.submission import failure_hint

    return failure_hint.of_job(job, status)


def warn_of_notifications(ended: Job | Sweep) -> None:
    """Warn if notifications of a job or a sweep that has ended could not be sent."""
    message = ended.settle_notifications()
    if message:
        print_message(f"warning: {message}")


def stream(job: Job, descriptor: int, *, follow: bool, selection: LogFilter | None = None) -> None:
    """Show a job's log as it arrives: the ranks' output there, messages of the entry on stderr.

    On a terminal, the states of progress bars are shown below a log that is followed; without
    ``selection``, so is the activity of the job.
    """
    from cloudjob.cli.activity import Activity
    from cloudjob.cli.live import LiveLines, is_terminal, write_all
    from cloudjob.cli.screen import Screen

    terminals = [number for number in (descriptor, 2) if follow and is_terminal(number)]
    screen = Screen(is_live=os.isatty(descriptor), are_messages_live=os.isatty(2))
    activity = None if selection else Activity(job)
    add = activity.add if activity else None
    every, start = selection or cloudjob.LogFilter(), b""
    with LiveLines(terminals[0] if terminals else None) as live:
        for piece in every.pieces(job, follow=follow, on_journal=add):
            start = _local_time(piece.at) if every.is_timed else b""
            ranks, messages = screen.show(piece.data, start)
            live.write(descriptor, ranks)
            live.write(2, _with_node(piece.node, messages, start) if job.nodes > 1 else messages)
            if activity and (ranks or screen.has_parts):
                activity.has_output = True
            if is_due := live.is_due:
                bars = screen.bars.items() if descriptor in terminals else ()
                lines = [b"[%d] %s" % bar for bar in bars]
                doing = activity.line() if activity else ""
                live.show([*lines, _DIM % doing.encode()] if doing else lines)
            if activity and is_due and not terminals and (news := activity.news()):
                print_message(news)
    write_all(descriptor, screen.finish(start))


def _local_time(at: float | None) -> bytes:
    """Return a time as the start of a line; blanks if it is unknown."""
    return f"{local(rfc3339(at or 0.0)):{len(local(rfc3339(1.0)))}} ".encode("ascii")


def _with_node(node: int, text: bytes, start: bytes) -> bytes:
    """Return lines of a node's entry or platform, each with the number of the node.

    Args:
        start: Written at the start of each line, such as its time.
    """
    mark = b"%s[node %d] " % (start, node)
    return b"".join(mark + line[len(start) :] for line in text.splitlines(keepends=True))
