"""Whether the kernel has killed processes of a rank for lack of memory, by its own counters.

A control group counts the processes in it that the kernel killed, whichever limit was reached.
Without control groups, the kernel counts them for the whole machine.
"""

from __future__ import annotations

import enum
import time
from typing import Mapping, NamedTuple

from jobentry.node.resources import Group, find_group, machine_kills, machine_mib

# A count is compared with one that is at least this old, and hardly older: ranks also end by
# SIGKILL for other reasons, long after the kernel has killed another process here.
PERIOD_S = 5.0
_MOST_RANKS = 3


class Lately(enum.Enum):
    """What the kernel has done within the last seconds."""

    KILLED = "killed"
    # Somewhere on a machine that does not count by control group.
    KILLED_ON_MACHINE = "killed on machine"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


class _Counts(NamedTuple):
    """The counter of a control group a period ago, and at the start of this period."""

    before: int | None
    now: int | None


class MemoryKills:
    """The counters of the control groups of this node's ranks.

    Args:
        proc: The folder in which the kernel shows processes and the machine.
        sys_: The folder in which it shows control groups.
    """

    def __init__(self, proc: str = "/proc", sys_: str = "/sys") -> None:
        self._proc = proc
        self._sys = sys_
        self._groups: dict[int, Group] = {}
        self._counts: dict[Group, _Counts] = {}
        self._noted_at = time.monotonic()

    def watch(self, process: int) -> None:
        """Count what the kernel kills in the control group of a rank's wrapper."""
        group = find_group(self._proc, self._sys, str(process))
        self._groups[process] = group
        count = self._count(group)
        self._counts.setdefault(group, _Counts(count, count))

    def note(self) -> None:
        """Begin a new period if the last one is over."""
        now_s = time.monotonic()
        if now_s < self._noted_at + PERIOD_S:
            return
        self._noted_at = now_s
        for group, counts in self._counts.items():
            self._counts[group] = _Counts(counts.now, self._count(group))

    def lately(self, process: int) -> Lately:
        """Return whether the kernel has killed something where the wrapper of a rank runs."""
        group = self._groups.get(process)
        if group is None:
            return Lately.UNKNOWN
        before, count = self._counts[group].before, self._count(group)
        if before is None or count is None:
            return Lately.UNKNOWN
        if count <= before:
            return Lately.NOTHING
        has_count = group.own_oom_kills() is not None
        return Lately.KILLED if has_count else Lately.KILLED_ON_MACHINE

    def limit_text(self, process: int) -> str:
        """Return how much memory there is for a rank: its limit, or that of the machine."""
        group = self._groups.get(process)
        memory = group.memory() if group is not None else []
        if memory:
            return f"limit {size_text(memory[1])}"
        total_mib = machine_mib(self._proc)
        return f"the machine has {size_text(total_mib)}" if total_mib else ""

    def _count(self, group: Group) -> int | None:
        count = group.own_oom_kills()
        return machine_kills(self._proc) if count is None else count


def describe(limit: str, used_mib: Mapping[int, float]) -> str:
    """Return the limit and the ranks that used the most memory, as the rest of a sentence.

    Args:
        used_mib: The memory of each rank that is known.
    """
    largest = sorted(used_mib.items(), key=lambda item: (-item[1], item[0]))[:_MOST_RANKS]
    parts = [limit, ", ".join(f"rank {rank}: {size_text(used)}" for rank, used in largest)]
    text = "; ".join(filter(None, parts))
    return f" ({text})" if text else ""


def size_text(size_mib: float) -> str:
    """Return a size as messages about memory show it."""
    return f"{size_mib / 1024:.1f} GiB" if size_mib >= 1024 else f"{size_mib:.0f} MiB"
