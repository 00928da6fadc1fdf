"""The stacks that Python wrote when a signal such as SIGSEGV ended a rank, or a process of it.

``rank.crash_file`` has Python write them to a file in the node's folder. If a user has enabled
``faulthandler``, they are in the rank's log instead.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import stat
from typing import Iterator, NamedTuple, Sequence

from jobentry.contract.stacks import Frame
from jobentry.contract.waits import of_script
from jobentry.node.rank_stacks import relative, source_line
from jobentry.rank.crash_file import SLOT_BYTES
from jobentry.secrets import masking

SIGNALS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
# A file has one place for each process; a log is read from its end.
_MOST_CRASHES, _LOG_BYTES = 8, 256 * 1024
# What is kept of a crash; the rest of many threads says little more.
_MOST_THREADS, _MOST_FRAMES, _MOST_LINES, _MOST_CHARACTERS = 20, 30, 200, 300
_SEEK_DATA = 3  # the next byte that is not in a hole; PyPy 3.9 lacks the name
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC

# The first line that faulthandler writes, the head of each thread, and a call (3.8 to 3.14).
_REASON = re.compile(
    r"^Fatal Python error: (Segmentation fault|Floating[- ]point exception|Aborted|Bus error"
    r"|Illegal instruction)$",
    re.MULTILINE,
)
_THREAD = re.compile(
    r"^(Current thread|Thread) 0x[0-9a-f]{1,16}\b.{0,80} \(most recent call first\)"
)
_ALONE = re.compile(r"^Stack \(most recent call first\b")  # of PyPy, and without a GIL
_CALL = re.compile(r'^  File "(.{0,1000})", line (\d{1,9}|\?\?\?) in (.{1,1000})$')


class Thread(NamedTuple):
    """A thread and its calls, the innermost first."""

    is_current: bool
    calls: tuple[Frame, ...]


class Crash(NamedTuple):
    """The end of a Python process by a signal.

    Args:
        process: Its process id if the script has forked it; 0 for the script's own process.
        reason: The signal in words, such as ``Segmentation fault``.
        at_s: When the last process of the rank crashed; 0 if it is not known.
    """

    process: int
    reason: str
    threads: tuple[Thread, ...]
    at_s: float = 0.0

    @property
    def place(self) -> str:
        """Where it crashed: the innermost call of the job's own code, else the innermost one."""
        calls = next((thread.calls for thread in self.threads if thread.is_current), ())
        of_job = [call for call in calls if not call.file.startswith(("/", "<"))]
        return _call_text((of_job or list(calls))[0]) if calls else ""

    @property
    def stack_lines(self) -> tuple[str, ...]:
        """The stacks of all threads, the one that crashed first."""
        lines: list[str] = []
        number = 0
        for thread in sorted(self.threads, key=lambda thread: not thread.is_current):
            number += not thread.is_current
            lines.append("the thread that crashed:" if thread.is_current else f"thread {number}:")
            lines += [f"  {_call_text(call)}"[:_MOST_CHARACTERS] for call in thread.calls]
        return tuple(lines[:_MOST_LINES])


def _call_text(call: Frame) -> str:
    """Return a call as people read it."""
    name = call.function if call.function.startswith("<") else call.function + "()"
    return f"{name} at {call.file}:{call.line}" + (call.source and f": {call.source}")


def of_file(path: str, folder: str) -> list[Crash]:
    """Return the crashes in a rank's file: the script's own first, then those of forked processes.

    Args:
        folder: The folder of the code.
    """
    crashes = []
    for place in _written(path):
        crash = parse(place.data.decode("utf-8", "replace"), folder)
        if crash is not None:
            crashes.append(crash._replace(process=place.process, at_s=place.at_s))
    return crashes


def of_log(path: str, folder: str) -> list[Crash]:
    """Return the last crash that Python has written to a rank's log."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        text = file.read(_LOG_BYTES).decode("utf-8", "replace")
        starts = [match.start() for match in _REASON.finditer(text)]
        crash = parse(text[starts[-1] :], folder) if starts else None
        if crash is not None:
            return [crash]
    return []


def parse(text: str, folder: str) -> Crash | None:
    """Return the crash that faulthandler describes; None if there is none.

    A script can write anything there.
    """
    reason = _REASON.search(text)
    if reason is None:
        return None
    threads = [
        Thread(is_current, tuple(_without_starters(calls, folder)))
        for is_current, calls in _threads(text[reason.end() :].split("\n"))
    ]
    linecache.clearcache()
    current = [thread for thread in threads if thread.is_current]
    others = [thread for thread in threads if not thread.is_current]
    return Crash(0, reason[1], (*current[:1], *others[: _MOST_THREADS - 1]))


def _threads(lines: Sequence[str]) -> Iterator[tuple[bool, list[Frame]]]:
    """Yield whether a thread is the one that crashed, and its calls."""
    calls: list[Frame] | None = None
    is_current = False
    for line in lines:
        thread = _THREAD.match(line)
        call = _CALL.match(line)
        if thread or _ALONE.match(line):
            if calls is not None:
                yield is_current, calls
            is_current, calls = not thread or thread[1] == "Current thread", []
        elif call and calls is not None and len(calls) < _MOST_FRAMES:
            number = int(call[2]) if call[2].isdigit() else 0
            calls.append(Frame(call[1], number, call[3]))
        elif line and not line.startswith("  "):
            # Other text follows, such as the names of extension modules or a native stack.
            break
    if calls is not None:
        yield is_current, calls


def _without_starters(calls: list[Frame], folder: str) -> Iterator[Frame]:
    """Yield the calls without those that start the script, and with their source."""
    for call in of_script(calls):
        # A script may have changed to the path without links.
        file = relative(relative(call.file, folder), os.path.realpath(folder))
        source = source_line(call.file, call.line, folder) if call.line else ""
        yield Frame(masking.hide(file), call.line, masking.hide(call.function), source)


class _Place(NamedTuple):
    """A place of a rank's file that was written, and when the file was last written."""

    process: int
    data: bytes
    at_s: float


def _written(path: str) -> Iterator[_Place]:
    """Yield the places of a rank's file that were written."""
    try:
        file = os.open(path, _READ)
    except OSError:
        return
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return
        start = 0
        for _ in range(_MOST_CRASHES):
            # Fails behind the last byte.
            start = os.lseek(file, start, _SEEK_DATA) // SLOT_BYTES * SLOT_BYTES
            # What nobody has written in between is zero.
            data = os.pread(file, SLOT_BYTES, start).rstrip(b"\0")
            yield _Place(start // SLOT_BYTES, data, status.st_mtime)
            start += SLOT_BYTES
    except OSError:
        return
    finally:
        os.close(file)
