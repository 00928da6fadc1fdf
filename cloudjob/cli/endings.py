"""Says how a job is and how it ended, for people."""

from __future__ import annotations

from cloudjob.cli.messages import print_message
from cloudjob.model import summary
from cloudjob.model.status import Cause
from cloudjob.model.text import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.status import Failure, JobStatus

# Lines of the stacks of a crash; the thread that crashed comes first.
_MAX_STACK_LINES = 15


def report(status: JobStatus) -> None:
    """Print how a job ended on stderr: which rank of which node failed, and why."""
    print_message(headline(status))
    for line in reasons(status):
        print_message(f"  {one_line(line)}")
    warn_of_cut_logs(status)


def warn_of_cut_logs(status: JobStatus) -> None:
    """Warn of each log that ends too early."""
    for text in summary.cut_logs(status):
        print_message(f"warning: {one_line(text)}")


def headline(status: JobStatus) -> str:
    """Return the state of a job, and for how long it has run or ran."""
    return f"job {status.job}: {verdict(status)}"


def verdict(status: JobStatus) -> str:
    """Return the state of a job with its duration."""
    took = summary.duration(status)
    ended = "in" if status.state.is_final else "for"
    return f"{status.state} {ended} {took}" if took else str(status.state)


def reasons(status: JobStatus) -> list[str]:
    """Return which rank of which node failed, and why, with its stacks and last lines."""
    failure = status.failure
    if failure is None:
        return []
    lines = [f"{_place(failure)}{failure.message}{_code(failure)}"] if failure.message else []
    if failure.host and failure.host not in failure.message and failure.message:
        lines.append(f"host {failure.host}")
    stacks = failure.stack_lines[:_MAX_STACK_LINES]
    if len(failure.stack_lines) > len(stacks):
        stacks = (*stacks, "… `status --json` has the stacks of all threads")
    return [*lines, *stacks, *(f"| {line}" for line in failure.last_lines)]


def hangs(status: JobStatus) -> list[str]:
    """Return how a job hangs, or hung, unless its failure already says so."""
    is_known = status.hang is None or status.cause is Cause.HANG
    return [] if is_known or status.hang is None else [status.hang.message, *status.hang.details]


def _place(failure: Failure) -> str:
    place = summary.place(failure)
    return f"{place}: " if place else ""


def _code(failure: Failure) -> str:
    """Return the exit code as text; empty if the message names it."""
    text = f"exit code {failure.exit_code}"
    is_redundant = failure.exit_code is None or failure.message.endswith(text)
    return "" if is_redundant else f" [{text}]"
