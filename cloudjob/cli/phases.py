"""The phases of a job's nodes on the terminal."""

from __future__ import annotations

import time

from cloudjob import Journals, times
from cloudjob.cli.messages import printable, size
from cloudjob.cli.tables import print_table
from cloudjob.model import summary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cloudjob import Job
    from cloudjob.model.status import JobStatus, Phase
    from jobentry.contract import journal

# What lasts no longer is not reported.
_QUIET_S = 1.0
# Seconds between two states of a line that changes in place, and between two lines in a file.
_FRAME_S, _LINE_S = 0.5, 10.0
# Seconds between two requests for why a job waits.
_LOOK_S = 10.0
_MINUTE_S = 60
# Followed by what the platform says.
_WAITS = "waits: "

# With more nodes, the table has node 0 and the phases that still last.
_MOST_NODES = 8


def print_phases(status: JobStatus) -> None:
    """Print the phases of the nodes, with the rates of transfers."""
    print()
    is_short = status.nodes > _MOST_NODES
    shown = [phase for phase in status.phases if not is_short or not phase.node or _lasts(phase)]
    print_table(
        [
            (phase.node, phase.name, times.local(phase.started_at), _took(phase), _rate(phase))
            for phase in shown
        ],
        ("NODE", "PHASE", "STARTED", "TOOK", ""),
        numbers=("NODE", "TOOK"),
    )


def _lasts(phase: Phase) -> bool:
    return phase.ended_at is None


def _seconds(phase: Phase) -> float:
    ended_s = times.seconds_of(phase.ended_at) if phase.ended_at else time.time()
    return max(0.0, ended_s - times.seconds_of(phase.started_at))


def _took(phase: Phase) -> str:
    return f"{_seconds(phase):.1f} s" + (" so far" if _lasts(phase) else "")


def _rate(phase: Phase) -> str:
    if not phase.done_bytes:
        return ""
    total_bytes = phase.total_bytes if _lasts(phase) else 0
    return _transferred(
        phase.done_bytes, total_bytes, phase.done_bytes / max(0.001, _seconds(phase))
    )


def _transferred(done_bytes: int, total_bytes: int, rate: float) -> str:
    """Return how much of a transfer is done, its rate, and how long the rest will take.

    Args:
        total_bytes: 0 if it is unknown or nothing is left.
    """
    if total_bytes <= done_bytes or not rate:
        return f"{size(done_bytes)}, {size(int(rate))}/s"
    left = summary.span((total_bytes - done_bytes) / rate)
    return f"{size(done_bytes)} of {size(total_bytes)}, {size(int(rate))}/s, {left} left"


# ---- while a job is followed ---------------------------------------------------------------------

# What a node does in each phase, in the order in which the phases follow each other.
_DOING = {
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
_ORDER = tuple(_DOING)
_MOST_NUMBERS = 4


def activity(lasting: Mapping[int, journal.Phase], nodes: int, *, has_output: bool) -> str:
    """Return what the nodes that are furthest behind do; empty while the ranks run.

    Args:
        lasting: The phase of each node that began last, of those that last.
        has_output: Whether any rank has written something.
    """
    current = {
        node: phase
        for node, phase in lasting.items()
        if _kind(phase) in _DOING and not (has_output and phase.name == _FIRST_OUTPUT)
    }
    if not current:
        return ""
    slowest = min(map(_kind, current.values()), key=_ORDER.index)
    late = {node: phase for node, phase in current.items() if _kind(phase) == slowest}
    absent = sorted(set(range(nodes)) - set(lasting))
    if slowest == "bring-up" and absent:
        return f"waiting for {_numbers(absent)}"
    where = f" on {_numbers(sorted(late))}" if len(late) < nodes else ""
    return f"{_doing(late)}{where}{_progress(late.values())}"


def _kind(phase: journal.Phase) -> str:
    return "input" if phase.name.startswith("input ") else phase.name


def _doing(phases: Mapping[int, journal.Phase]) -> str:
    names = {phase.name for phase in phases.values()}
    name = min(names)
    if _kind(phases[min(phases)]) != "input":
        return _DOING[name]
    return f"{_DOING['input']} {name.partition(' ')[2]}" if len(names) == 1 else "fetching inputs"


def _progress(phases: Iterable[journal.Phase]) -> str:
    moved = [phase for phase in phases if phase.done_bytes]
    if not moved:
        return ""
    done_bytes = sum(phase.done_bytes for phase in moved)
    total_bytes = sum(phase.total_bytes for phase in moved)
    # By the clock of each node.
    rate = sum(each.done_bytes / max(0.001, each.at - each.started_at) for each in moved)
    return f": {_transferred(done_bytes, total_bytes, rate)}"


def _numbers(nodes: Sequence[int]) -> str:
    shown = ", ".join(str(node) for node in nodes[:_MOST_NUMBERS])
    more = f" and {len(nodes) - _MOST_NUMBERS} more" if len(nodes) > _MOST_NUMBERS else ""
    return f"node{'s' * (len(nodes) > 1)} {shown}{more}"


class Activity:
    """What a job does or waits for before its ranks write, and after they have ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._journals = Journals()
        # Whether a rank has written something.
        self.has_output = False
        self._reason = ""
        self._look_s = self._since_s = self._printed_s = 0.0
        self._doing = self._shown = self._printed = ""

    def add(self, node: int, lines: Iterable[bytes]) -> None:
        """Read new lines of a node's journal."""
        # Samples would only fill the memory.
        self._journals.add(node, [line for line in lines if line.startswith(b'{"phase"')])

    def line(self) -> str:
        """Return what the job does, and for how long; empty before that has lasted a second."""
        now_s = time.monotonic()
        self._shown = self._found(now_s)
        is_wait = self._shown.startswith(_WAITS)
        doing = self._shown if is_wait else self._shown.partition(": ")[0]
        if doing != self._doing:
            self._doing, self._since_s = doing, now_s
        lasted_s = now_s - self._since_s
        if lasted_s < _QUIET_S:
            self._shown = ""
        lasted = f"{int(lasted_s)} s" if lasted_s < _MINUTE_S else summary.span(lasted_s)
        return self._shown and f"{self._shown} ({lasted})"

    def news(self) -> str:
        """Return what the last ``line`` said, if it is new, and of a transfer now and then."""
        now_s = time.monotonic()
        is_due = self._shown != self._doing and now_s > self._printed_s + _LINE_S
        if not self._shown or not (is_due or self._doing != self._printed):
            return ""
        self._printed, self._printed_s = self._doing, now_s
        comma = "" if self._shown.startswith(_WAITS) else ","
        return f"job {self._job.id}{comma} {self._shown}"

    def _found(self, now_s: float) -> str:
        if self._journals.nodes or self.has_output:
            lasting = self._journals.lasting
            return activity(lasting, self._job.nodes, has_output=self.has_output)
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._reason = self._job.waits_for() or self._reason
        return f"{_WAITS}{printable(self._reason)}" if self._reason else "starting the nodes"
