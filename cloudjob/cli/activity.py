"""Reports the activity of a followed job."""

from __future__ import annotations

import time
from contextlib import suppress

from cloudjob import Journals
from cloudjob.errors import CloudJobError
from cloudjob.model import summary
from cloudjob.model.text import one_line, size_text
from cloudjob.model.times import seconds_of
from jobentry.contract.journal import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cloudjob import Job
    from cloudjob.model.status import Wait
    from jobentry.contract import journal

# Activities shorter than this are not reported.
_QUIET_S = 1.0
# Seconds between two lines in a file.
_LINE_S = 10.0
# Seconds between two requests for what a job waits for.
_STATUS_S = 10.0
# Followed by that.
_WAIT_PREFIX = "waits: "
# Followed by the numbers of the nodes that have not started.
_ABSENT = "waiting for node"
# The states of a rank in a word, by the letter in its journal.
STATES = {
    state.value: word
    for state, word in {
        State.RUNNING: "runs",
        State.WAITING: "waits",
        State.WAITS_FOR_DISK: "disk",
        State.PAUSED: "stopped",
        State.TRACED: "traced",
        State.ZOMBIE: "zombie",
        State.ENDED: "ended",
        State.FAILED: "failed",
        State.STOPPED: "ended early",
        State.LOST: "lost",
    }.items()
}


# ---- activity of the nodes -----------------------------------------------------------------------

# The activity of a node in each phase, in the order of the phases.
_ACTIVITIES = {
    "stage": "preparing",
    "package": "fetching the package",
    "input": "fetching the input",
    "prepare outputs": "preparing the outputs",
    "sshd": "starting sshd",
    "bring-up": "connecting the nodes",
    "start ranks": "starting the ranks",
    "first output": "waiting for the first output",
    "outputs": "saving the outputs",
}
_FIRST_OUTPUT = "first output"
_ORDER = tuple(_ACTIVITIES)
_MAX_NUMBERS = 4


def activity(current_phases: Mapping[int, journal.Phase], nodes: int, *, has_output: bool) -> str:
    """Return the activity of the nodes that are furthest behind; empty while the ranks run.

    Args:
        current_phases: The last phase of each node that has not ended.
        has_output: Whether any rank has written something.
    """
    current = {
        node: phase
        for node, phase in current_phases.items()
        if _kind(phase) in _ACTIVITIES and not (has_output and phase.name == _FIRST_OUTPUT)
    }
    if not current:
        return ""
    slowest = min(map(_kind, current.values()), key=_ORDER.index)
    late = {node: phase for node, phase in current.items() if _kind(phase) == slowest}
    absent = sorted(set(range(nodes)) - set(current_phases))
    if slowest == "bring-up" and absent:
        return f"{_ABSENT}{_numbers(absent).removeprefix('node')}"
    where = f" on {_numbers(sorted(late))}" if len(late) < nodes else ""
    return f"{_phase_text(late)}{where}{_progress(late.values())}"


def _kind(phase: journal.Phase) -> str:
    return "input" if phase.name.startswith("input ") else phase.name


def _phase_text(phases: Mapping[int, journal.Phase]) -> str:
    names = {phase.name for phase in phases.values()}
    name = min(names)
    if _kind(phases[min(phases)]) != "input":
        return _ACTIVITIES[name]
    return (
        f"{_ACTIVITIES['input']} {name.partition(' ')[2]}" if len(names) == 1 else "fetching inputs"
    )


def _progress(phases: Iterable[journal.Phase]) -> str:
    moved = [phase for phase in phases if phase.done_bytes]
    if not moved:
        return ""
    done_bytes = sum(phase.done_bytes for phase in moved)
    total_bytes = sum(phase.total_bytes for phase in moved)
    # Both times are from the node's own clock.
    rate = sum(each.done_bytes / max(0.001, each.at - each.started_at) for each in moved)
    return f": {transferred(done_bytes, total_bytes, rate)}"


def _numbers(nodes: Sequence[int]) -> str:
    listed = ", ".join(str(node) for node in nodes[:_MAX_NUMBERS])
    more = f" and {len(nodes) - _MAX_NUMBERS} more" if len(nodes) > _MAX_NUMBERS else ""
    return f"node{'s' * (len(nodes) > 1)} {listed}{more}"


class Activity:
    """The activity of a job before its ranks write and after they have ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._journals = Journals()
        # Whether a rank has written something.
        self.has_output = False
        self._wait: Wait | None = None
        self._since_s = self._printed_s = 0.0
        # A shorter wait is not shown.
        self._next_status_s = time.monotonic() + _QUIET_S
        self._text = self._shown = self._printed = ""

    def add(self, node: int, lines: Iterable[bytes]) -> None:
        """Read new lines of a node's journal."""
        # Samples are not needed and would fill the memory.
        self._journals.add(node, [line for line in lines if line.startswith(b'{"phase"')])

    def line(self) -> str:
        """Return what the job is doing, and for how long; empty during the first second."""
        now_s = time.monotonic()
        self._shown = self._current_text(now_s)
        is_wait = self._shown.startswith((_WAIT_PREFIX, _ABSENT))
        doing = self._shown if is_wait else self._shown.partition(": ")[0]
        if doing != self._text:
            self._text, self._since_s = doing, now_s
        lasted_s = now_s - self._since_s
        since_s = seconds_of(self._wait.since) if is_wait and self._wait else 0.0
        if since_s:
            lasted_s = max(lasted_s, time.time() - since_s)
        if lasted_s < _QUIET_S:
            self._shown = ""
        return self._shown and f"{self._shown} ({summary.span(int(lasted_s))})"

    def news(self) -> str:
        """Return the text of the last ``line`` if it is new; a transfer is repeated every 10 s."""
        now_s = time.monotonic()
        is_due = self._shown != self._text and now_s > self._printed_s + _LINE_S
        if not self._shown or not (is_due or self._text != self._printed):
            return ""
        self._printed, self._printed_s = self._text, now_s
        comma = "" if self._shown.startswith(_WAIT_PREFIX) else ","
        return f"job {self._job.id}{comma} {self._shown}"

    def _current_text(self, now_s: float) -> str:
        if self._journals.nodes or self.has_output:
            current_phases = self._journals.current_phases
            text = activity(current_phases, self._job.nodes, has_output=self.has_output)
            wait = self._current_wait(now_s) if text.startswith(_ABSENT) else None
            return f"{text}: {one_line(wait.message)}" if wait else text
        wait = self._current_wait(now_s)
        return f"{_WAIT_PREFIX}{one_line(wait.message)}" if wait else "starting the nodes"

    def _current_wait(self, now_s: float) -> Wait | None:
        if now_s >= self._next_status_s:
            self._next_status_s = now_s + _STATUS_S
            # Following the log reports an error that persists.
            with suppress(CloudJobError):
                self._wait = self._job.status().wait
        return self._wait


# ---- silence -------------------------------------------------------------------------------------


# A shorter silence is not worth a line.
_SILENT_S = 10


def silence_text(journals: Journals) -> str:
    """Return how long all ranks have printed nothing, and which one the longest; empty if short.

    A job in which only one rank prints is silent once that one is.
    """
    running, silent_s = journals.running, journals.silent_s
    if silent_s < _SILENT_S:
        return ""
    _, node, first = max(running, key=lambda point: point.sample.quiet_s)
    state = STATES.get(first.state, one_line(first.state))
    of_first = f"rank {first.rank} on node {node}"
    usage = f"{first.cpu_percent}% of a CPU, {state}"
    if len(running) == 1:
        return f"{of_first} for {summary.span(silent_s)} ({usage})"
    return (
        f"all {len(running)} ranks for {summary.span(silent_s)}; {of_first} the longest, "
        f"{summary.span(first.quiet_s)} ({usage})"
    )


def transferred(done_bytes: int, total_bytes: int, rate: float) -> str:
    """Return how much of a transfer is done, its rate, and how long the rest will take.

    Args:
        total_bytes: 0 if it is unknown or nothing is left.
    """
    if total_bytes <= done_bytes or not rate:
        return f"{size_text(done_bytes)}, {size_text(int(rate))}/s"
    left = summary.span((total_bytes - done_bytes) / rate)
    done = f"{size_text(done_bytes)} of {size_text(total_bytes)}"
    return f"{done}, {size_text(int(rate))}/s, {left} left"
