"""Reports that a running job has printed nothing for a long time, and what its ranks are doing."""

from __future__ import annotations

import time

import cloudjob
from cloudjob.cli.messages import printable
from cloudjob.model.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cloudjob import Job

# Seconds without output before the first report; each report doubles them, so that neither a hang
# of days nor a script that prints once an hour repeats it often.
FIRST_S = 600.0
# The states of a process in proc(5), and those of a rank that has ended.
STATES = {
    "R": "runs",
    "S": "waits",
    "D": "disk",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "E": "ended",
    "F": "failed",
}


class Silence:
    """How long a job has printed nothing, counted from its first output or journal."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._limit_s = FIRST_S
        self._since_s: float | None = None
        self._journals = cloudjob.Journals(is_short=True)

    def end(self) -> None:
        """Note that the job has printed something."""
        self._since_s = self._clock()

    def add(self, node: int, lines: Iterable[bytes]) -> None:
        """Read new lines of a node's journal."""
        if self._since_s is None:
            self.end()
        self._journals.add(node, lines)

    def report(self) -> str:
        """Return a line if the silence has just become long; else an empty text."""
        now_s = self._clock()
        if self._since_s is None or now_s < self._since_s + self._limit_s:
            return ""
        minutes = int(now_s - self._since_s) // 60
        while now_s >= self._since_s + self._limit_s:
            self._limit_s *= 2
        found = self._found()
        more = f"; {found}" if found else ""
        return f"job {self._job.id} has printed nothing for {minutes} min{more}"

    def _found(self) -> str:
        """Return what the running ranks are doing, or which phase the nodes are in."""
        ranks = self._journals.running
        if not ranks:
            phases = sorted({phase.name for phase in self._journals.lasting.values()})
            return f"phase: {printable(', '.join(phases))}" if phases else ""
        _, node, least = min(ranks, key=lambda point: point.sample.cpu_percent)
        most = max(point.sample.cpu_percent for point in ranks)
        state = STATES.get(least.state, printable(least.state))
        words = f"rank {least.rank} on node {node} uses {least.cpu_percent}% of a CPU ({state})"
        if len(ranks) > 1:
            words += f", the busiest of {counted(len(ranks), 'rank')} {most}%"
        return f"{words}; `cloudjob top {self._job.id}` shows more"
