"""Sample what the ranks of this node use: CPU time, memory, threads and children, from proc(5)."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Mapping, NamedTuple, Protocol

from jobentry.contract.journal import RankSample, State
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.contract.paths import NodePaths

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGES_PER_MIB = (1024 * 1024) // os.sysconf("SC_PAGE_SIZE")
# Processes without a rank are read again after this many samples, as process ids are reused.
_FORGET_AFTER = 12


class RankState(NamedTuple):
    """The processes of a rank, and how it ended; None before."""

    wrapper: int
    program: int
    end: State | None


class Ranks(Protocol):
    """Whatever knows the processes of this node's ranks."""

    def states(self) -> Mapping[int, RankState]:
        """Return the processes of each rank."""


class Process(NamedTuple):
    """A process as ``/proc/PID/stat`` shows it.

    Args:
        ticks: The CPU time that it has used, with that of its children that have ended.
    """

    parent: int
    state: str
    ticks: int
    threads: int
    pages: int


class RankProcesses:
    """Samples the ranks of this node, each with its descendants."""

    def __init__(self, ranks: Ranks, paths: NodePaths) -> None:
        self._ranks = ranks
        self._paths = paths
        # The CPU time that each rank had used at the last sample.
        self._ticks: dict[int, int] = {}
        # The rank of each process, which a process keeps when its parent ends.
        self._owners: dict[int, int] = {}
        self._foreign: set[int] = set()
        self._wrappers: set[int] = set()
        self._samples = 0
        self._at_s = time.monotonic()
        self._seen_at: dict[int, float] = {}

    def sample(self) -> tuple[RankSample, ...]:
        """Return what each rank has used since the last call."""
        states = self._ranks.states()
        now_s = time.monotonic()
        elapsed_s, self._at_s = max(1e-3, now_s - self._at_s), now_s
        if not states:
            return ()
        are_running = not all(state.end for state in states.values())
        members = self._members(states) if are_running else {}
        samples = tuple(
            self._sample(rank, states[rank], members.get(rank, {}), elapsed_s)
            for rank in sorted(states)
        )
        self._ticks = {rank: _ticks(processes) for rank, processes in members.items()}
        return samples

    def members(self) -> dict[int, dict[int, Process]]:
        """Return the processes of each rank that has any, without its wrapper."""
        return self._members(self._ranks.states())

    def _members(self, states: Mapping[int, RankState]) -> dict[int, dict[int, Process]]:
        processes = self._read({state.wrapper for state in states.values()})
        return self._by_rank(processes, states)

    def _sample(
        self, rank: int, state: RankState, members: dict[int, Process], elapsed_s: float
    ) -> RankSample:
        ticks = _ticks(members) - self._ticks.get(rank, 0)
        program = members.get(state.program)
        return RankSample(
            rank=rank,
            cpu_percent=round(100 * max(0, ticks) * TICK_S / elapsed_s),
            rss_mib=sum(process.pages for process in members.values()) // _PAGES_PER_MIB,
            quiet_s=self.quiet_s(rank),
            state=state.end.value if state.end else program.state if program else "?",
            threads=sum(process.threads for process in members.values()),
            children=max(0, len(members) - 1),
        )

    def quiet_s(self, rank: int) -> int:
        """Return for how long the log of a rank has not grown."""
        seen_at = self._seen_at.setdefault(rank, time.time())
        try:
            status = os.stat(self._paths.rank_log(rank))
        except OSError:
            return max(0, round(time.time() - seen_at))
        last = status.st_mtime if status.st_size else seen_at
        return max(0, round(time.time() - last))

    def _read(self, wrappers: set[int]) -> dict[int, Process]:
        """Read all processes except those that are known to belong to no rank."""
        numbers = linux.processes()
        self._samples += 1
        if wrappers != self._wrappers or self._samples % _FORGET_AFTER == 0:
            # A process of this rank may have been seen before its wrapper was known.
            self._wrappers = wrappers
            self._foreign.clear()
        self._foreign.intersection_update(numbers)
        processes = {}
        for number in numbers:
            process = None if number in self._foreign else _process(number)
            if process is not None:
                processes[number] = process
        return processes

    def _by_rank(
        self, processes: dict[int, Process], states: Mapping[int, RankState]
    ) -> dict[int, dict[int, Process]]:
        """Return the processes of each rank, without its wrapper."""
        ranks = {state.wrapper: rank for rank, state in states.items()}
        owners: dict[int, int] = {}
        processes_of: dict[int, dict[int, Process]] = {}
        for number in processes:
            rank = self._owner(number, processes, ranks)
            if rank is None:
                self._foreign.add(number)
            elif number not in ranks:
                owners[number] = rank
                processes_of.setdefault(rank, {})[number] = processes[number]
        self._owners = owners
        return processes_of

    def _owner(
        self, number: int, processes: dict[int, Process], ranks: dict[int, int]
    ) -> int | None:
        """Return the rank of a process: that of its nearest ancestor that has one."""
        for _ in range(len(processes)):
            rank = ranks.get(number, self._owners.get(number))
            if rank is not None or number not in processes:
                return rank
            number = processes[number].parent
        return None


def _ticks(members: Mapping[int, Process]) -> int:
    return sum(process.ticks for process in members.values())


def mib(pages: int) -> float:
    """Return the size of pages of memory in MiB."""
    return pages / _PAGES_PER_MIB


def _process(number: int) -> Process | None:
    try:
        fields = linux.stat(number)
        return Process(
            parent=int(fields[1]),
            state=fields[0].decode("ascii"),
            ticks=sum(map(int, fields[11:15])),
            threads=int(fields[17]),
            pages=int(fields[21]),
        )
    except (OSError, ValueError, IndexError):
        return None
