"""Counts what a rank does at the looks of its node: for how much of the time it waits, and where.

Names are read once for each call of a program and then remembered, so that a look stays cheap.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Mapping, NamedTuple, Sequence

from jobentry.contract import lists
from jobentry.contract.slow import MOST_FUNCTIONS, Function, RankShare
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import (
    Wait,
    is_message,
    is_own,
    operation,
    place_of,
    reads_back,
    wait_in_libraries,
)
from jobentry.node.rank_stacks import relative, source_line, uses_device
from jobentry.secrets import masking
from jobentry.stacks.memory import UnreadableError
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.stacks.python_stacks import Look, MainThread, RawFrame

# How many calls are read, from the innermost one on.
_MOST_CALLS = 48
# How many names and lines are remembered. Those of a rank are forgotten after each window, as a
# program may unload code.
_MOST_NAMES = 2000
_MAJOR_FAULTS = 9  # the field of proc(5) from the state on


class Kind(Enum):
    """What a rank does at one look."""

    WAITS = "waits"
    DATA = "data"
    NETWORK = "network"
    WORKS = "works"


_KINDS: Mapping[Wait | None, Kind] = {Wait.DATA: Kind.DATA, Wait.NETWORK: Kind.NETWORK}


class Doing(NamedTuple):
    """What a rank does at one look.

    Args:
        operation: The call in which it waits for others; empty if it does not.
        place: The innermost call in the job's own code, or else the innermost one.
        callers: A checksum of the functions of the job that have called it.
    """

    kind: Kind
    operation: str
    place: Frame
    callers: int


class _Counters(NamedTuple):
    """What the kernel has counted for a process so far.

    Args:
        at_s: When, on the monotonic clock.
        delay_s: For how long its main thread was ready to run and had no CPU.
        faults: Pages that had to be read from a disk.
    """

    at_s: float
    delay_s: float
    faults: int


class Sources:
    """The lines of the programs of a node, which are the same for its ranks."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, int], str] = {}

    def line(self, folder: str, file: str, number: int) -> str:
        """Return a line of a file; empty if it cannot be read."""
        key = (folder, file, number)
        if key not in self._lines:
            if len(self._lines) >= _MOST_NAMES:
                self._lines.clear()
            self._lines[key] = source_line(file, number, folder)
        return self._lines[key]


class RankShares:
    """What one rank does: since the last window, and since the last sample of the journal."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._frames: dict[tuple[int, int], Frame] = {}
        self._folder = ""
        self._uses_device: bool | None = None
        self._process = 0
        self._before: _Counters | None = None
        self._last: Doing | None = None
        self._restart()
        self._recent_looks = self._recent_waits = 0

    def _restart(self) -> None:
        self._looks = self._waits = self._passes = 0
        self._data = self._disk = self._network = 0
        self._meetings: Counter[tuple[str, bool]] = Counter()
        self._functions: Counter[tuple[str, str, int]] = Counter()
        self._lines: Counter[tuple[str, str, int]] = Counter()

    def note(self, target: MainThread, look: Look, *, has_moved: bool) -> None:
        """Count one look.

        Args:
            has_moved: Whether the rank has moved since the last one.
        """
        if target.process != self._process:
            self._begin(target.process)
        if not has_moved and self._last is not None:
            doing: Doing | None = self._last
        else:
            doing = self._last = self._doing(target, look.calls)
        if doing is None:
            return
        self._looks += 1
        self._recent_looks += 1
        if doing.kind is Kind.WAITS:
            self._note_wait(doing, has_moved=has_moved)
            return
        self._data += doing.kind is Kind.DATA
        self._disk += _waits_for_disk(target.process)
        self._network += doing.kind is Kind.NETWORK
        place = doing.place
        self._functions[place.file, place.function, doing.callers] += 1
        self._lines[place.file, place.function, place.line] += 1

    def recent(self) -> tuple[int | None, str]:
        """Return the percentage of looks since the last call at which it waited, and its place.

        The percentage is None if there was no look.
        """
        looks, waits = self._recent_looks, self._recent_waits
        self._recent_looks = self._recent_waits = 0
        percent = round(100 * waits / looks) if looks else None
        return percent, _text_of(self._last) if self._last and looks else ""

    def take(self, rank: int, node: int, throttled_percent: float) -> RankShare | None:
        """Return what was counted since the last call; None if that was too little to know."""
        now, before = _counters(self._process), self._before
        share = None
        if now is not None and before is not None and now.at_s > before.at_s:
            elapsed_s = now.at_s - before.at_s
            share = self._share(rank, node)._replace(
                delay_percent=100 * max(0.0, now.delay_s - before.delay_s) / elapsed_s,
                throttled_percent=throttled_percent,
                faults_s=max(0, now.faults - before.faults) / elapsed_s,
                cpus=cpus_of(self._process),
            )
        self._before = now
        self._restart()
        self._frames.clear()
        self._uses_device = None
        return share

    def _share(self, rank: int, node: int) -> RankShare:
        ((meeting, is_two), _), *_rest = self._meetings.most_common(1) or [(("", False), 0)]
        functions = tuple(
            Function(file, name, self._usual_line(file, name), count, callers)
            for (file, name, callers), count in self._functions.most_common(MOST_FUNCTIONS)
        )
        return RankShare(
            rank,
            node,
            self._looks,
            self._waits,
            self._passes,
            meeting,
            is_two,
            self._data,
            self._disk,
            self._network,
            functions=functions,
        )

    def _usual_line(self, file: str, name: str) -> int:
        counts = {key[2]: count for key, count in self._lines.items() if key[:2] == (file, name)}
        return max(sorted(counts), key=lambda line: counts[line])

    def _note_wait(self, doing: Doing, *, has_moved: bool) -> None:
        self._waits += 1
        self._recent_waits += 1
        self._passes += has_moved
        self._meetings[_text_of(doing), is_message(doing.operation)] += 1

    def _begin(self, process: int) -> None:
        """Forget what belongs to another program."""
        self._process = process
        self._frames.clear()
        self._last = self._uses_device = None
        self._restart()
        self._before = _counters(process)
        self._folder = linux.working_folder(process)

    def _doing(self, target: MainThread, calls: Sequence[RawFrame]) -> Doing | None:
        """Return what a rank does; None if its calls cannot be read."""
        try:
            frames = [self._frame(target, raw) for raw in calls[:_MOST_CALLS]]
        except UnreadableError:
            return None
        place = place_of(frames)
        if place is None:
            return None
        functions = [each[::2] for each in frames if is_own(each)]
        callers = zlib.crc32(repr([name for name, _ in groupby(functions)]).encode("utf-8"))
        source = self._sources.line(self._folder, frames[0].file, frames[0].line)
        frames[0] = frames[0]._replace(source=source)
        return Doing(*self._kind(frames), place, callers)

    def _kind(self, frames: Sequence[Frame]) -> tuple[Kind, str]:
        """Return what a rank does, and the call in which it waits for others."""
        name = operation(frames)
        if name:
            return Kind.WAITS, name
        wait = wait_in_libraries(frames)
        if wait is Wait.DEVICE or (reads_back(frames[0]) and self._has_device()):
            return Kind.WAITS, "device"
        return _KINDS.get(wait, Kind.WORKS), ""

    def _has_device(self) -> bool:
        """Whether its process uses a GPU or NPU; asked only where values are read back."""
        if self._uses_device is None:
            self._uses_device = uses_device(self._process)
        return self._uses_device

    def _frame(self, target: MainThread, raw: RawFrame) -> Frame:
        key = (raw.code, raw.instruction)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MOST_NAMES:
                self._frames.clear()
            file, line, function = target.frame(raw)
            frame = self._frames[key] = Frame(
                masking.hide(relative(file, self._folder)),
                line,
                masking.hide(function),
            )
        return frame


def _text_of(doing: Doing) -> str:
    place = f"{doing.place.file}:{doing.place.line}"
    return f"{doing.operation} at {place}" if doing.operation else place


def _waits_for_disk(process: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return linux.stat(process)[0] == b"D"
    return False


def _counters(process: int) -> _Counters | None:
    try:
        delay_ns = linux.read(process, "schedstat").split()[1]
        faults = linux.stat(process)[_MAJOR_FAULTS]
        return _Counters(time.monotonic(), int(delay_ns) / 1e9, int(faults))
    except (OSError, IndexError, ValueError):
        return None


def cpus_of(process: int) -> tuple[int, ...]:
    """Return the numbers of the CPUs that a process may use; none if it is gone."""
    # PyPy has no sched_getaffinity.
    with contextlib.suppress(OSError, IndexError, ValueError):
        text = linux.read(process, "status").partition(b"Cpus_allowed_list:")[2].split()[0]
        return tuple(lists.numbers(text.decode("ascii")))
    return ()
