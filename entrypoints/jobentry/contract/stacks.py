"""What the ranks of a job execute right now: the answer to a request for their stacks."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple, Sequence

from jobentry.contract.malformed import MALFORMED, finite, whole

# Limits for one process, and for the processes of one rank.
MOST_FRAMES, MOST_THREADS, MOST_PROCESSES, MOST_NATIVE_CALLS = 100, 64, 32, 48
_TEXT_LIMIT = 1000


class StacksError(Exception):
    """The bytes are not an answer with stacks."""


class Wait(Enum):
    """What a thread waits for."""

    NOTHING = "nothing"
    STOPPED = "stopped"
    RANKS = "ranks"
    START = "start"
    DEVICE = "device"
    DATA = "data"
    LOCK = "lock"
    CHILD = "child"
    FILE = "file"
    NETWORK = "network"
    SLEEP = "sleep"
    INPUT = "input"
    EVENTS = "events"
    KERNEL = "kernel"
    OTHER = "other"


class Frame(NamedTuple):
    """A call that has not returned.

    Args:
        file: Relative to the working directory of its process, if it is below it.
        source: The line of the file, without spaces around it; empty if it cannot be read.
    """

    file: str
    line: int
    function: str
    source: str = ""


class NativeCall(NamedTuple):
    """A call of C or C++ code that has probably not returned.

    Args:
        function: Its name as in the source, without arguments; empty if it has no symbol.
        library: The file's name of the program or library, such as ``libmpi.so.40``.
    """

    function: str
    library: str


class ThreadStack(NamedTuple):
    """The stack of a thread.

    Args:
        thread: Its id for the kernel; 0 if it is not known.
        state: As in proc(5): R, S, D, T, Z and so on; empty if it is not known.
        waits_in: The function of the kernel in which it waits; empty if it does not.
        is_moving: Whether it executed Python code while it was read; then ``frames`` lacks the
            calls that it made or left meanwhile.
        frames: The innermost call first.
        uses_device: Whether its process has a GPU or NPU open.
        native: The innermost call first; empty if they were not asked for or cannot be read.
    """

    thread: int
    state: str
    waits_in: str
    is_moving: bool
    frames: tuple[Frame, ...]
    uses_device: bool = False
    native: tuple[NativeCall, ...] = ()


class ProcessStacks(NamedTuple):
    """The stacks of one process of a rank.

    Args:
        command: Its command line, shortened.
        is_program: Whether it is the rank's own program, not a descendant of it.
        threads: The main thread first; without frames if it runs no Python.
        problem: Why the stacks are missing; empty if they are not.
    """

    rank: int
    node: int
    process: int
    command: str
    is_program: bool
    threads: tuple[ThreadStack, ...]
    problem: str = ""


class Stacks(NamedTuple):
    """The stacks of a job.

    Args:
        at: When they were read, in seconds since 1970, by the clock of the head.
        silent: The nodes that did not answer in time.
    """

    at: float
    processes: tuple[ProcessStacks, ...]
    silent: tuple[int, ...] = ()


def dump(stacks: Stacks) -> bytes:
    """Serialise ``stacks`` as one line of JSON for ``load``."""
    return json.dumps(
        {"at": stacks.at, "processes": stacks.processes, "silent": stacks.silent}
    ).encode("ascii")


def load(data: bytes) -> Stacks:
    """Return what ``dump`` serialised.

    Raises:
        StacksError: It is no such answer.
    """
    try:
        value = json.loads(data)
        return Stacks(
            finite(value["at"]),
            processes_of(value["processes"]),
            tuple(whole(node) for node in value["silent"]),
        )
    except MALFORMED as error:
        raise StacksError(f"it is not valid: {error}") from error


def processes_of(rows: Sequence[Any]) -> tuple[ProcessStacks, ...]:
    """Return processes from plain values of JSON.

    Raises:
        TypeError: They have another form.
        ValueError: They have another form.
    """
    return tuple(
        ProcessStacks(
            whole(rank),
            whole(node),
            whole(process),
            _text(command),
            bool(is_program),
            tuple(_thread(thread) for thread in threads[:MOST_THREADS]),
            _text(problem),
        )
        for rank, node, process, command, is_program, threads, problem in rows
    )


def _thread(row: Sequence[Any]) -> ThreadStack:
    thread, state, waits_in, is_moving, frames, uses_device, native = row
    return ThreadStack(
        whole(str(thread)),
        _text(state),
        _text(waits_in),
        bool(is_moving),
        tuple(
            Frame(_text(file), whole(line), _text(function), _text(source))
            for file, line, function, source in frames[:MOST_FRAMES]
        ),
        bool(uses_device),
        tuple(
            NativeCall(_text(function), _text(library))
            for function, library in native[:MOST_NATIVE_CALLS]
        ),
    )


def _text(value: object) -> str:
    return str(value)[:_TEXT_LIMIT]
