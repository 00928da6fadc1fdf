"""Notices ranks of this node whose main thread stays at one place, and says what they do there.

The same looks tell for how much of the time each rank waits for others (``node/shares.py``).

``look`` reads the calls of each main thread, which costs some system calls a rank and does not
disturb it. Names, CPU time and files come later, and only for ranks that have not moved for long,
so a healthy job pays almost nothing. A rank that cannot be read counts as one that moves.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Callable, Iterator, Mapping, NamedTuple, Sequence

from jobentry.contract.hangs import Activity, Standing
from jobentry.contract.slow import RankShare
from jobentry.contract.stacks import Frame, NativeCall, ThreadStack
from jobentry.contract.waits import (
    IN_OTHER_THREAD,
    OF_RANKS,
    Cause,
    Wait,
    cause_of,
    is_own,
    native_wait,
    of_child,
    operation,
    operation_of,
    place_of,
    wait_in_libraries,
)
from jobentry.node import collectives, connections
from jobentry.node.collectives import Launched
from jobentry.node.rank_stacks import stacks_of, state_of
from jobentry.node.rank_usage import TICK_S, RankProcesses
from jobentry.node.resources import find_group
from jobentry.node.shares import RankShares, Sources
from jobentry.node.stall_reports import StallReports
from jobentry.stacks.memory import UnreadableError, mappings
from jobentry.stacks.native_calls import NativeStacks
from jobentry.stacks.native_thread import NativeThread
from jobentry.stacks.python_stacks import Look, MainThread
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.contract.journal import Device
    from jobentry.contract.paths import NodePaths
    from jobentry.node.local_ranks import LocalRanks
    from jobentry.node.rank_usage import Process, RankState

# Seconds between two looks: at ranks that move, and while one does not. A loop that makes the same
# call again and again looks like one long call until a look falls between two of them.
_PERIOD_S, _OLD_PERIOD_S = 1.0, 0.2
_LEAST_PERIOD_S = 0.02
# The time over which it is counted what a rank does, before that is reported.
_SHARES_S = 60.0
# The share of one CPU that looks may use, with what they read only once for each place 0.003.
_CPU_SHARE = 0.0025
# After how many seconds at one place a rank's usage is measured, its calls get names, and it is
# reported; and how often the report is repeated. MindSpore's collectives on CPUs fail after 30 s,
# and then the head must know which ranks stand still.
_MEASURED_S, _NAMED_S, _REPORTED_S, _REFRESH_S = 10.0, 20.0, 25.0, 15.0
# The interval between two measurements of usage, until they cover the second time; from then on it
# is that of the reports. Measurements count for little more than the third time.
_USAGE_PERIOD_S, _LEAST_WINDOW_S, _WINDOW_S = 5.0, 9.0, 60.0
# From here on a rank counts as busy: percent of one CPU, bytes a second, and, for one that waits
# for the network or for events, how often it wakes up in a second.
_BUSY_PERCENT, _BUSY_BYTES_S, _BUSY_WAKES_S = 5, 100_000.0, 0.5
# A device computes from here on: percent of its power limit, or of the time if that is not known.
# A collective that waits for another rank keeps a GPU busy all the time, at little power.
_COMPUTES_AT_POWER, _COMPUTES_AT_PERCENT = 40, 5
# The library of ranks that wait for a device is asked at this interval.
_COLLECTIVES_S = 30.0
# How often it is read again in which call a program without Python waits for others: one that has
# returned looks the same until its part of the stack is used again.
_NAMED_AGAIN_S = 60.0
# What such a program waits for if it hangs; a server or the end of another program is no hang.
_NATIVE_WAITS = frozenset((Wait.FILE, Wait.KERNEL, Wait.LOCK, Wait.OTHER, Wait.SLEEP, Wait.STOPPED))
# A process that cannot be read so often in a row is opened again: it may run another program.
_MOST_FAILURES = 10
# Pauses before the next attempt to read a process that cannot be read.
_RETRY_S, _MOST_RETRY_S = 5.0, 60.0
_MOST_PLACES = 1000
# Programs that start the ranks' own programs, and wait for them.
_LAUNCHER_FILES = re.compile(
    r"(^|/)(torch/distributed/(run|launch|launcher/\w+|elastic/(agent|multiprocessing)/.*)"
    r"|accelerate/commands/.*|deepspeed/launcher/.*|torch/multiprocessing/spawn)\.py$"
)
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
# The library whose own threads talk to those of other ranks all the time, and those in which any
# thread begins.
_TALKATIVE = re.compile(r"mpi_lib(_v2)?\.")
_OF_THREADS = re.compile(r"(libc|libpthread|libstdc\+\+|ld)[.-]")
_SWITCHES = re.compile(rb"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_MOVED = re.compile(rb"^(?:rchar|wchar|read_bytes|write_bytes): (\d+)", re.MULTILINE)


# What Python code, its source and the kernel show of a thread that may wait in C or C++.
_UNCLEAR = frozenset((Wait.NOTHING, Wait.LOCK, Wait.EVENTS, Wait.OTHER, Wait.NETWORK))
_NOTHING = Look((), 0)


class _Usage(NamedTuple):
    """What a rank and its processes have used so far, or in ``at_s`` seconds."""

    at_s: float
    ticks: int
    moved_bytes: int
    wakes: int


class _Rank:
    """What is known about one rank.

    Attributes:
        target: The main thread that matters: of its program, or of the one that this waits for.
        failures: How often in a row that could not be read.
        since_s: Since when it is at this place, by the clock of the looks.
        named_at_s: When its calls got their names, by the same clock.
        stack: Its calls with names, once it has been there for long.
        stalls: What its log says about a stall since then.
        talkers: The threads of Horovod, with their processes, if the rank does not wait for that.
        child: The process that counts because the program waits for it, in words; else empty.
        carried: The bytes that its connections have carried while they were measured.
        loader: What a process does that loads its data, in words; empty if none is known.
        is_launcher: Whether it only waits for the programs that it has started.
    """

    def __init__(self, sources: Sources) -> None:
        self.shares = RankShares(sources)
        self.target: MainThread | NativeThread | None = None
        self.child = ""
        self.program = self.failures = self.carried = 0
        self.last = _NOTHING
        self.retry_at_s = 0.0
        self.retry_s = 0.0
        self.restart(0.0)

    def restart(self, now_s: float) -> None:
        self.since_s = self.named_at_s = now_s
        self.stack: ThreadStack | None = None
        self.stalls: StallReports | None = None
        self.talkers: tuple[tuple[int, int], ...] = ()
        self.loader = ""
        self.is_launcher = False
        self.usage: deque[_Usage] = deque()

    def forget(self) -> None:
        if self.target is not None:
            self.target.close()
        self.target = None
        self.child = ""
        self.last = _NOTHING


class Reports(NamedTuple):
    """Who is told what the looks show.

    Args:
        standing: Called with all ranks that have not moved for long, if that has changed, and
            from time to time while there are any.
        shares: Called with what each rank did in the last minute.
    """

    standing: Callable[[list[Standing]], None]
    shares: Callable[[list[RankShare]], None]


class Devices(NamedTuple):
    """Who knows what happens on the devices of this node.

    Args:
        read: Returns the devices as they were last.
        ask: Returns what each process has launched on them.
    """

    read: Callable[[], Sequence[Device]] = tuple
    ask: Callable[[], Mapping[int, Launched]] = collectives.ask


class Pace(NamedTuple):
    """How long a second is.

    Args:
        scale: A factor for all times but the cost of looking.
        now_s: A clock that stands still while this process is suspended: its ranks may be, too.
    """

    scale: float = 1.0
    now_s: Callable[[], float] = time.monotonic


class StandingRanks:
    """The ranks of this node that do not move; one thread uses it."""

    def __init__(
        self,
        ranks: LocalRanks,
        paths: NodePaths,
        node: int,
        on: Reports,
        pace: Pace = Pace(),  # noqa: B008 (it cannot change)
        devices: Devices = Devices(),  # noqa: B008
    ) -> None:
        self._ranks = ranks
        self._paths = paths
        self._node = node
        self._on = on
        self._scale, self._now_s = pace
        self._devices = devices
        self._launched: dict[int, Launched] = {}
        self._asked_at_s = -math.inf
        self._sources = Sources()
        self._group = find_group("/proc", "/sys")
        self._shared_at_s = self._looked_at_s = self._now_s()
        self._throttled_s = self._throttled()
        self._processes = RankProcesses(ranks, paths)
        self._states: dict[int, _Rank] = {}
        self._longest_s: dict[object, float] = {}
        self._cost_s = 0.0
        self._native = NativeStacks()
        self._once_s = 0.0
        self._usage_at_s = 0.0
        # What each connection of this node has carried.
        self._carried: dict[int, int] = {}
        self._reported_at_s = 0.0
        self._reported: list[int] = []

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        period_s = _PERIOD_S
        now_s = self._looked_at_s
        if any(now_s - each.since_s >= self._scaled(_NAMED_S) for each in self._readable()):
            period_s = _OLD_PERIOD_S
        return max(_LEAST_PERIOD_S, self._scaled(period_s), self._cost_s / _CPU_SHARE)

    def look(self) -> None:
        """Look at all ranks once, and report those that have not moved for long."""
        begun_s = time.thread_time()
        self._once_s = 0.0
        now_s = self._now_s()
        states = {rank: state for rank, state in self._ranks.states().items() if not state.end}
        for rank in [rank for rank in self._states if rank not in states]:
            self._states.pop(rank).forget()
        for rank, state in states.items():
            self._look_at(self._of(rank), state, now_s)
        self._measure(now_s)
        self._report(now_s)
        self._share(now_s)
        self._looked_at_s = now_s
        cost_s = time.thread_time() - begun_s - self._once_s
        # A single expensive look, which gives calls their names, hardly changes the interval.
        self._cost_s = 0.9 * self._cost_s + 0.1 * cost_s

    def recent(self) -> dict[int, tuple[int | None, str]]:
        """Return for how many percent of the looks since the last call each rank waited, and where.

        The percentage is None for a rank that could not be read.
        """
        return {rank: state.shares.recent() for rank, state in self._states.items()}

    def close(self) -> None:
        """Stop looking."""
        for each in self._states.values():
            each.forget()
        self._states.clear()

    def _of(self, rank: int) -> _Rank:
        if rank not in self._states:
            self._states[rank] = _Rank(self._sources)
        return self._states[rank]

    def _scaled(self, seconds: float) -> float:
        return self._scale * seconds

    def _readable(self) -> list[_Rank]:
        return [each for each in self._states.values() if each.target is not None]

    # -- the calls --------------------------------------------------------------------------------

    def _look_at(self, rank: _Rank, state: RankState, now_s: float) -> None:
        if rank.program != state.program:
            rank.forget()
            rank.program, rank.retry_at_s, rank.retry_s = state.program, 0.0, 0.0
        if rank.target is None and not self._open(rank, now_s):
            return
        assert rank.target is not None
        try:
            look = rank.target.look()
        except UnreadableError:
            rank.failures += 1
            has_ended = not linux.start_ticks(rank.target.process)
            if has_ended or rank.failures >= _MOST_FAILURES:
                rank.forget()
            self._moved(rank, _NOTHING, now_s)
            return
        rank.failures = 0
        has_moved = _has_moved(rank.target, look, rank.last)
        if has_moved:
            self._moved(rank, look, now_s)
        if isinstance(rank.target, MainThread):
            rank.shares.note(rank.target, look, has_moved=has_moved)

    def _moved(self, rank: _Rank, look: Look, now_s: float) -> None:
        if rank.stack is not None:
            key, stayed_s = _key(rank.stack), now_s - rank.since_s
            if len(self._longest_s) >= _MOST_PLACES:
                self._longest_s.clear()
            self._longest_s[key] = max(stayed_s, self._longest_s.get(key, 0.0))
        rank.last = look
        rank.restart(now_s)

    def _open(self, rank: _Rank, now_s: float) -> bool:
        """Start to read a rank's program, or the program that a shell has started for it."""
        if now_s < rank.retry_at_s:
            return False
        process = rank.program
        while process:
            target = _opened(process)
            if target is not None:
                rank.target, rank.last = target, _NOTHING
                rank.restart(now_s)
                return True
            process = _only(self._children(process))
        rank.retry_s = min(_MOST_RETRY_S, max(_RETRY_S, 2 * rank.retry_s))
        rank.retry_at_s = now_s + self._scaled(rank.retry_s)
        return False

    def _children(self, process: int) -> list[int]:
        """Return the programs that a process of a rank has started."""
        return [
            number
            for members in self._processes.members().values()
            for number, each in members.items()
            if each.parent == process and not _is_helper(number)
        ]

    # -- what ranks do over time ------------------------------------------------------------------

    def _share(self, now_s: float) -> None:
        """Report what each rank did, once a minute."""
        elapsed_s = now_s - self._shared_at_s
        if elapsed_s < self._scaled(_SHARES_S):
            return
        throttled_s = self._throttled()
        percent = min(100.0, 100 * max(0.0, throttled_s - self._throttled_s) / elapsed_s)
        self._shared_at_s, self._throttled_s = now_s, throttled_s
        shares = [
            rank.shares.take(number, self._node, percent)
            for number, rank in sorted(self._states.items())
        ]
        self._on.shares([each for each in shares if each is not None])

    def _throttled(self) -> float:
        """Return for how many seconds the CPU limit of this node has held it back so far."""
        return (self._group.cpu() or [0.0, 0.0])[1]

    # -- usage and names --------------------------------------------------------------------------

    def _measure(self, now_s: float) -> None:
        """Measure what ranks use that have not moved for some time, and give their calls names."""
        old = {
            number: rank
            for number, rank in self._states.items()
            if rank.target is not None and now_s - rank.since_s >= self._scaled(_MEASURED_S)
        }
        is_known = all(map(self._has_used, old.values()))
        period_s = _REFRESH_S if is_known else _USAGE_PERIOD_S
        if old and now_s - self._usage_at_s >= self._scaled(period_s):
            self._usage_at_s = now_s
            members = self._processes.members()
            before, self._carried = self._carried, connections.carried()
            for number, rank in old.items():
                processes = members.get(number, {})
                sockets = {inode for process in processes for inode in connections.inodes(process)}
                rank.carried += sum(
                    self._carried[each] - before.get(each, 0)
                    for each in sockets & set(self._carried)
                )
                self._note_usage(rank, processes, now_s)
        for number, rank in old.items():
            if rank.stack is None and now_s - rank.since_s >= self._scaled(_NAMED_S):
                is_native = isinstance(rank.target, NativeThread)
                (self._name_natively if is_native else self._name)(number, rank, now_s)
        natives = [
            (rank.named_at_s, number)
            for number, rank in old.items()
            if isinstance(rank.target, NativeThread) and rank.stack
        ]
        # One in each look, as it costs as much as hundreds of looks.
        if natives and now_s - min(natives)[0] >= self._scaled(_NAMED_AGAIN_S):
            number = min(natives)[1]
            self._name_natively(number, old[number], now_s)
        linecache.clearcache()
        if not old:
            # Symbols of large libraries take tens of megabytes.
            self._native = NativeStacks()

    def _note_usage(self, rank: _Rank, members: Mapping[int, Process], now_s: float) -> None:
        assert rank.target is not None
        ticks = sum(process.ticks for process in members.values())
        moved_bytes = sum(map(_moved_bytes, members))
        for process, thread in rank.talkers:
            ticks -= _ticks(process, thread)
            moved_bytes -= _moved_bytes(process, "task/%d/io" % thread)
        # Nobody knows which connections are theirs.
        moved_bytes += 0 if rank.talkers else rank.carried
        rank.usage.append(_Usage(now_s, ticks, moved_bytes, _wakes(rank.target.process)))
        # One of before the window stays: looks may be so rare that there is no other in it.
        while len(rank.usage) > 1 and now_s - rank.usage[1].at_s >= self._scaled(_WINDOW_S):
            rank.usage.popleft()

    def _name_natively(self, number: int, rank: _Rank, now_s: float) -> None:
        """Read the calls of a program without Python with their names."""
        assert isinstance(rank.target, NativeThread)
        process, before = rank.target.process, rank.stack
        rank.named_at_s, begun_s = now_s, time.thread_time()
        try:
            calls = self._native.placed_calls(process, process, may_stop=True)
            thread, address = _native_thread(process, calls)
            if cause_of(thread).wait in _NATIVE_WAITS:
                waits = tuple(self._waits_of_threads(process))
                thread = thread._replace(native=(*waits, *thread.native))
            rank.target.hold(address)
            rank.last = rank.target.look()
        except UnreadableError:
            self._moved(rank, _NOTHING, now_s)
            return
        if before is None:
            self._once_s += time.thread_time() - begun_s
        if before is not None and native_wait(before) != native_wait(thread):
            self._moved(rank, rank.last, now_s)
        else:
            rank.stack, rank.stalls = thread, StallReports(self._paths.rank_log(number), thread)

    def _name(self, number: int, rank: _Rank, now_s: float) -> None:
        """Read the calls of a rank with their names; go to the program that it waits for."""
        assert rank.target is not None
        stacks = stacks_of(rank.target.process, with_threads=False)
        thread = next(iter(stacks[0]), None) if stacks else None
        if thread is None or thread.thread != rank.target.process:
            return
        if not thread.frames or cause_of(thread).wait in _UNCLEAR:
            thread = thread._replace(native=self._native_calls(thread.thread))
        if rank.child:
            thread = thread._replace(frames=of_child(thread.frames) or thread.frames)
        rank.stack, rank.stalls = thread, StallReports(self._paths.rank_log(number), thread)
        rank.is_launcher = any(_LAUNCHER_FILES.search(frame.file) for frame in thread.frames)
        # It may be awake just now.
        if wait_in_libraries(thread.frames) is Wait.DATA:
            rank.loader = self._loader_of(thread.thread)
        self._note_talkers(rank, thread)
        if rank.is_launcher or cause_of(thread).wait is Wait.CHILD:
            self._follow(rank, thread, now_s)

    def _follow(self, rank: _Rank, thread: ThreadStack, now_s: float) -> None:
        """Go to the only program that a rank has started, and waits for."""
        child = _only(self._children(thread.thread))
        with contextlib.suppress(UnreadableError):
            if child:
                target, talkers = MainThread(child), rank.talkers
                place = None if rank.is_launcher else place_of(thread.frames)
                rank.forget()
                rank.target = target
                if place is not None:
                    rank.child = f"process {child}, for which {_where(place)} waits"
                rank.restart(now_s)
                rank.talkers = talkers

    def _loader_of(self, process: int) -> str:
        """Return what the first process that loads data for this one does in the job's own code."""
        for child in self._children(process):
            stacks = stacks_of(child, with_threads=False)
            for thread in stacks[0] if stacks else ():
                place = next(filter(is_own, of_child(thread.frames)), None)
                if place is not None:
                    return f"its process {child} is in {_where(place)}, {cause_of(thread).text}"
        return ""

    def _native_calls(self, process: int) -> tuple[NativeCall, ...]:
        """Return the calls in C and C++ of a main thread, which may wait for others there.

        It is stopped for less than a millisecond if it runs, but it has been at one place for long.
        """
        begun_s = time.thread_time()
        calls: tuple[NativeCall, ...] = ()
        with contextlib.suppress(UnreadableError):
            calls = self._native.calls(process, process, may_stop=True)
            if any(call.function == IN_OTHER_THREAD for call in calls):
                calls = (*self._waits_of_threads(process), *calls)
        # Large libraries take half a second, once for each place; the looks need not wait for it.
        self._once_s += time.thread_time() - begun_s
        return calls

    def _waits_of_threads(self, process: int) -> Iterator[NativeCall]:
        """Return the calls in which blocked threads of a process wait for other ranks."""
        for number in linux.threads(process):
            with contextlib.suppress(UnreadableError):
                calls = self._native.calls(process, number, may_stop=False)
                name, _ = native_wait(ThreadStack(number, "", "", False, (), native=calls))
                yield from (call for call in calls if name and call.function == name)

    def _note_talkers(self, rank: _Rank, thread: ThreadStack) -> None:
        """Find the threads of Horovod in the process of a rank that does not wait for others."""
        process = thread.thread
        with contextlib.suppress(UnreadableError):
            names = [os.path.basename(each.path) for each in mappings(process)]
            if cause_of(thread).wait in OF_RANKS or not any(map(_TALKATIVE.match, names)):
                return
            threads = linux.threads(process)
            talkers = tuple((process, each) for each in threads if self._is_talker(process, each))
            if talkers:
                rank.talkers += talkers
                # What was measured before was theirs, too.
                rank.usage.clear()

    def _is_talker(self, process: int, thread: int) -> bool:
        """Whether the outermost call of a thread, but for those of all threads, is in Horovod."""
        begun_s, libraries = time.thread_time(), [""]
        with contextlib.suppress(UnreadableError):
            calls = self._native.placed_calls(process, thread, may_stop=True)
            libraries += [call.library for call, _ in calls if not _OF_THREADS.match(call.library)]
        self._once_s += time.thread_time() - begun_s
        return bool(_TALKATIVE.match(libraries[-1]))

    # -- the report -------------------------------------------------------------------------------

    def _report(self, now_s: float) -> None:
        old = sorted(number for number, rank in self._states.items() if self._stands(rank, now_s))
        is_due = bool(old) and now_s - self._reported_at_s >= self._scaled(_REFRESH_S)
        if old != self._reported or is_due:
            self._reported, self._reported_at_s = old, now_s
            standing = [self._standing(number, self._states[number], now_s) for number in old]
            self._on.standing(self._compared(list(filter(_counts, standing)), now_s))

    def _compared(self, standing: list[Standing], now_s: float) -> list[Standing]:
        """Add what the devices of this node do, and what ranks have launched on them."""
        devices = self._devices.read()
        uses_devices = bool(devices) or any(each.wait is Wait.DEVICE for each in standing)
        if not standing or not uses_devices:
            return standing
        if now_s - self._asked_at_s >= self._scaled(_COLLECTIVES_S):
            self._asked_at_s = now_s
            self._launched = self._by_rank(self._devices.ask())
        computes = any(map(_computes, devices)) if devices else None
        pairs = ((each, self._launched.get(each.rank, Launched())) for each in standing)
        return [
            each._replace(computes=computes, progress=launched.progress, missing=launched.missing)
            for each, launched in pairs
        ]

    def _by_rank(self, launched: Mapping[int, Launched]) -> dict[int, Launched]:
        """Return what the processes of each rank have launched, from what each process has."""
        if not launched:
            return {}
        of_ranks = {
            rank: [launched[process] for process in members if process in launched]
            for rank, members in self._processes.members().items()
        }
        return {rank: collectives.joined(each) for rank, each in of_ranks.items() if each}

    def _stands(self, rank: _Rank, now_s: float) -> bool:
        """Whether a rank has been at one place for long, and it is known what it has used there."""
        if rank.stack is None or rank.is_launcher:
            return False
        return self._has_used(rank) and now_s - rank.since_s >= self._scaled(_REPORTED_S)

    def _has_used(self, rank: _Rank) -> bool:
        """Whether its usage has been measured for long enough."""
        return len(rank.usage) > 1 and _window_s(rank.usage) >= self._scaled(_LEAST_WINDOW_S)

    def _standing(self, number: int, rank: _Rank, now_s: float) -> Standing:
        """Return what a rank does that has been at one place for long."""
        assert rank.stack is not None
        assert rank.stalls is not None
        used, process = _used(rank.usage), rank.stack.thread
        state, waits_in = state_of(process, process)
        thread = rank.stack._replace(state=state, waits_in=waits_in)
        cause = cause_of(thread)
        late, late_s = rank.stalls.late(now_s)
        return Standing(
            number,
            self._node,
            _activity(cause, used),
            cause.wait,
            "; ".join(filter(None, (cause.text, rank.child, rank.loader))),
            place_of(thread.frames) or Frame("", 0, ""),
            operation_of(thread),
            now_s - rank.since_s,
            self._longest_s.get(_key(thread), 0.0),
            round(100 * used.ticks * TICK_S / used.at_s),
            used.moved_bytes / used.at_s,
            self._processes.quiet_s(number),
            late_s,
            late=late,
        )


def _opened(process: int) -> MainThread | NativeThread | None:
    """Return the main thread of a process; None if it runs no Python as its program, and no MPI."""
    with contextlib.suppress(UnreadableError):
        target = MainThread(process)
        if target.runs_python or _runs_interpreter(process):
            return target
        target.close()
    with contextlib.suppress(UnreadableError):
        return NativeThread(process) if _uses_mpi(process) else None
    return None


def _uses_mpi(process: int) -> bool:
    """Whether a process has loaded MPI, and is no interpreter of Python: its calls say little."""
    if _program(process).startswith(("python", "pypy")):
        return False
    return any(os.path.basename(each.path).startswith("libmpi") for each in mappings(process))


def _native_thread(
    process: int, calls: Sequence[tuple[NativeCall, int]]
) -> tuple[ThreadStack, int]:
    """Return the stack of a program without Python, and where the call returns in which it waits.

    Its only frame is the function of the program that it is in, or in which it waits for others.

    Args:
        calls: The calls of its main thread, and where its stack has their addresses.
    """
    state, waits_in = state_of(process, process)
    native = tuple(call for call, _ in calls)
    thread = ThreadStack(process, state, waits_in, False, (), native=native)
    waits_for, _ = native_wait(thread)
    start = [call.function for call in native].index(waits_for) if waits_for else 0
    callers = [address for call, address in calls[start:] if call.library != native[start].library]
    program = _program(process)
    of_program = [call.function for call in native[start:] if call.library == program]
    function = waits_for or next(iter(of_program), "")
    frame = Frame(program, 0, function)
    return thread._replace(frames=(frame,)), callers[0] if waits_for and callers else 0


def _counts(standing: Standing) -> bool:
    """Whether a rank may be at one place; one without Python only if it certainly does not move."""
    is_native = standing.place.file and not standing.place.line
    is_waiting = standing.wait in OF_RANKS or standing.wait in _NATIVE_WAITS
    return not is_native or (is_waiting and standing.activity is not Activity.BUSY)


def _has_moved(target: MainThread | NativeThread, look: Look, last: Look) -> bool:
    """Whether a thread has gone on since the last look."""
    if isinstance(target, NativeThread):
        return look != last
    if not (look.calls or last.calls):
        return not _runs_interpreter(target.process)
    if not target.is_at_same_line(look.calls, last.calls):
        return True
    if look.values == last.values:
        return False
    # It makes the same call again. Libraries do that while they wait, to look for a signal or a
    # dead process, and then it is one wait; but none does so in a wait for other ranks.
    try:
        innermost = Frame(*target.frame(look.calls[0]))
    except UnreadableError:
        return True
    return is_own(innermost) or bool(operation([innermost]))


def _runs_interpreter(process: int) -> bool:
    """Whether a process without Python calls has left its script; others call Python now and then.

    It may still have work at its exit, such as ``MPI_Finalize``.
    """
    return _program(process).startswith("python")


def _program(process: int) -> str:
    """Return the file's name of the program that a process runs; empty if that is not known."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink("/proc/%d/exe" % process))
    return ""


def _computes(device: Device) -> bool:
    if device.power_w is not None and device.power_limit_w:
        return 100 * device.power_w >= _COMPUTES_AT_POWER * device.power_limit_w
    return (device.utilisation_percent or 0.0) >= _COMPUTES_AT_PERCENT


def _activity(cause: Cause, used: _Usage) -> Activity:
    """Return what a rank does that does not move.

    Args:
        used: What it has used, and in how many seconds.
    """
    if cause.wait is Wait.STOPPED:
        return Activity.GONE
    if cause.wait in OF_RANKS or cause.wait is Wait.DEVICE:
        return Activity.WAITING
    is_talking = (
        cause.wait in (Wait.NETWORK, Wait.EVENTS) and used.wakes >= _BUSY_WAKES_S * used.at_s
    )
    cpu_percent = 100 * used.ticks * TICK_S / used.at_s
    moves_data = used.moved_bytes >= _BUSY_BYTES_S * used.at_s
    # One that is ready to run may get little of a busy CPU.
    is_running = cause.wait is Wait.NOTHING
    if is_running or is_talking or moves_data or cpu_percent >= _BUSY_PERCENT:
        return Activity.BUSY
    return Activity.IDLE


def _window_s(usage: Sequence[_Usage]) -> float:
    return usage[-1].at_s - usage[0].at_s


def _used(usage: Sequence[_Usage]) -> _Usage:
    """Return what was used between the first and the last measurement, and in which time."""
    first, last = usage[0], usage[-1]
    # A process that has ended takes its numbers with it.
    return _Usage(
        _window_s(usage),
        max(0, last.ticks - first.ticks),
        max(0, last.moved_bytes - first.moved_bytes),
        max(0, last.wakes - first.wakes),
    )


def _where(place: Frame) -> str:
    return f"{place.function}() at {place.file}:{place.line}"


def _key(stack: ThreadStack) -> object:
    place = place_of(stack.frames)
    return place[:3] if place else (), tuple(frame[:3] for frame in stack.frames[:1])


def _only(processes: Sequence[int]) -> int:
    """Return the process if there is only one, else 0."""
    return processes[0] if len(processes) == 1 else 0


def _is_helper(process: int) -> bool:
    try:
        words = linux.read(process, "cmdline")
    except OSError:
        return True
    return any(helper in words for helper in _HELPERS)


def _ticks(process: int, thread: int) -> int:
    """Return how much CPU time a thread has used."""
    try:
        return sum(map(int, linux.stat(process, thread)[11:13]))
    except OSError:
        return 0


def _moved_bytes(process: int, name: str = "io") -> int:
    """Return how much a process has read and written, but for ``recv`` and ``send``."""
    try:
        return sum(map(int, _MOVED.findall(linux.read(process, name))))
    except OSError:
        return 0


def _wakes(process: int) -> int:
    """Return how often the main thread of a process has waited."""
    try:
        return sum(map(int, _SWITCHES.findall(linux.read(process, "status"))))
    except OSError:
        return 0
