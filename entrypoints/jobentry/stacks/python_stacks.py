"""Python stacks of another process, from its memory.

A thread that runs changes its stack while it is read. If the kernel shows that it was blocked from
the first read to the last, its stack is exact. Otherwise the stack is read many times, and only the
calls on which all reads agree are returned: a single read may mix two moments, even if it begins
and ends with the same innermost call.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from typing import NamedTuple, Sequence, Union

from jobentry.stacks.elf import Elf, Segment, file_key, load_bias
from jobentry.stacks.kernel import blocked_since
from jobentry.stacks.layouts import Layout, layout_of
from jobentry.stacks.line_tables import line_at
from jobentry.stacks.memory import (
    Mapping,
    Memory,
    Pages,
    UnreadableError,
    mappings,
    path_of,
)

# Tries to read what a running thread changes meanwhile.
_TRIES = 24
# Reads of a running thread's stack that must agree: a read that is slow often mixes two moments,
# but this many hardly mix the same ones.
_READS = 12
# How often these reads are repeated if they have nothing in common.
_ROUNDS = 8
_MOST_THREADS, _MOST_FRAMES = 4096, 4096
_MOST_NAME, _MOST_TABLE_BYTES = 4096, 1024 * 1024
_MOST_PROGRAMS = 32
_VERSION = re.compile(r"python-?3\.?(\d+)")
_OWNED_BY_PYTHON = (0, 1, 2)  # by the thread, a generator, a frame object; others stand for C code
_POINTER_TAGS = 7
_TYPE, _SIZE, _BYTES = 8, 16, 32  # in each object; in those with a size; the content of bytes
_TEXT_STATE, _COMPACT, _ASCII = 32, 1 << 5, 1 << 6
_ENCODINGS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
# The innermost calls whose variables a look compares, and how many bytes of each; in a dictionary,
# a number that changes with each assignment (before 3.13).
_MOST_VALUES, _VALUES_BYTES = 16, 16 * 8
_DICTIONARY_VERSION = 24
# A thread's structure of the C library begins where its pthread id points, and contains its id for
# the kernel: at 720 in glibc for x86-64.
_PTHREAD_BYTES = 1024
_WORD = struct.Struct("<Q")
Readable = Union[Memory, Pages]


class Frame(NamedTuple):
    """A call that has not returned: the function, and the line that it is on."""

    file: str
    line: int
    function: str


class PythonThread(NamedTuple):
    """A thread that runs Python code, or has called C code.

    Args:
        thread_id: Its id for the kernel; 0 if it is not known.
        frames: The innermost call first.
        is_moving: Whether it executed Python code while it was read; then ``frames`` lacks the
            calls that it made or left meanwhile, and the innermost line is one of several.
    """

    thread_id: int
    frames: tuple[Frame, ...]
    is_moving: bool


class RawFrame(NamedTuple):
    """A call as the memory has it: the addresses of its frame and its code, and where it is."""

    address: int
    code: int
    instruction: int


class Look(NamedTuple):
    """What one look at a thread shows.

    Args:
        calls: The innermost first.
        values: A checksum that changes when variables of these functions change.
    """

    calls: tuple[RawFrame, ...]
    values: int


class Interpreter:
    """The Python interpreter in a process.

    Raises:
        UnreadableError: The process has none, or one whose layout is not known.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._layout, self._code_type, self._runtime = _find(memory)
        self._frame_bytes = 8 + max(
            self._layout.code,
            self._layout.previous,
            self._layout.instruction,
            self._layout.owner or 0,
        )
        # The last look, where it began, and what it was read from: without a call there is none.
        self._innermost_call, self._pages, self._look = 0, Pages(memory), Look((), 0)

    def threads(self) -> list[PythonThread]:
        """Return the stacks of all threads, the main thread first.

        Raises:
            UnreadableError: The process ended, or never stood still long enough.
        """
        result = []
        kernel_ids = _kernel_ids(self._memory.process)
        for state in self._thread_states():
            try:
                thread_id = self._kernel_id(state, kernel_ids)
                frames, is_moving = self._frames(state, thread_id)
            except UnreadableError:
                # The thread may just have ended.
                continue
            result.append(PythonThread(thread_id, frames, is_moving))
        if not result:
            raise UnreadableError("no thread of it stood still for long enough")
        return sorted(result, key=lambda thread: thread.thread_id != self._memory.process)

    def main_thread(self) -> int:
        """Return the address of the state of the main thread, which it keeps.

        Returns:
            0 before Python has begun in the process, or once it is at its end there.

        Raises:
            UnreadableError: The main thread runs no Python.
        """
        process = self._memory.process
        if not self._memory.word(self._runtime + self._layout.interpreters):
            return 0
        for state in reversed(self._thread_states()):
            with contextlib.suppress(UnreadableError):
                if self._kernel_id(state, {process}) == process:
                    return state
        raise UnreadableError("its main thread runs no Python")

    def look(self, state: int) -> Look:
        """Return the calls of a thread, read once; those of a running one may mix two moments.

        Raises:
            UnreadableError: They changed while they were read.
        """
        innermost = self._innermost(state)
        # Reading the same pages again costs a fifth of following the calls in them.
        if innermost != self._innermost_call or not self._pages.are_current():
            pages = Pages(self._memory)
            calls = tuple(self._raw_frames(innermost, pages))
            look = Look(calls, zlib.crc32(self._values(calls[:_MOST_VALUES], pages)))
            self._innermost_call, self._pages, self._look = innermost, pages, look
        return self._look

    def steady_calls(self, state: int) -> tuple[RawFrame, ...]:
        """Return the calls of a thread whose innermost call was the same before and after.

        The other calls cannot change while that lasts, so they are of one moment.

        Raises:
            UnreadableError: They changed while they were read.
        """
        before = self._innermost(state)
        calls = tuple(self._raw_frames(before, Pages(self._memory)))
        if not calls or self._innermost(state) != before:
            raise UnreadableError("its stack did not stand still")
        now = _raw_frame(
            calls[0].address, self._memory.read(calls[0].address, self._frame_bytes), self._layout
        )
        if now.code != calls[0].code:
            raise UnreadableError("its stack did not stand still")
        return calls

    def frame(self, raw: RawFrame) -> Frame:
        """Return the function and the line of a call.

        Raises:
            UnreadableError: It has returned.
        """
        return self._frame(raw)

    def _values(self, calls: Sequence[RawFrame], pages: Pages) -> bytes:
        """Return what changes when functions go on: where their variables and results are."""
        slots, module = self._layout.slots, self._layout.globals
        if slots is None:
            return b""
        values, modules = [], set()
        for raw in calls:
            try:
                content = pages.read(raw.address, slots + _VALUES_BYTES)
            except UnreadableError:
                continue
            values.append(content[slots:])
            if module is not None:
                modules.add(_word(content, module))
        for address in sorted(modules):
            with contextlib.suppress(UnreadableError):
                values.append(pages.read(address + _DICTIONARY_VERSION, 8))
        return b"".join(values)

    def _thread_states(self) -> list[int]:
        for _ in range(_TRIES):
            try:
                return self._thread_list()
            except UnreadableError:
                continue
        return self._thread_list()

    def _thread_list(self) -> list[int]:
        """Return the addresses of the threads' states, the newest first."""
        interpreter = self._memory.word(self._runtime + self._layout.interpreters)
        state = self._memory.word(interpreter + self._layout.threads)
        states: list[int] = []
        while state and len(states) < _MOST_THREADS:
            states.append(state)
            state = self._memory.word(state + self._layout.next_thread)
        return states

    def _frames(self, state: int, thread_id: int) -> tuple[tuple[Frame, ...], bool]:
        """Return the calls of a thread, and whether it moved while they were read."""
        frames = self._frames_if_blocked(state, thread_id)
        if frames is not None:
            return frames, False
        for _ in range(_ROUNDS):
            try:
                frames, is_moving = self._frames_of_running(state)
            except UnreadableError:
                continue
            if frames:
                return frames, is_moving
        raise UnreadableError("its stack did not stand still")

    def _frames_of_running(self, state: int) -> tuple[tuple[Frame, ...], bool]:
        """Return the calls on which many reads agree, and whether they differed."""
        reads = self._reads(state, _READS)
        frames = tuple(self._frame(raw) for raw in _calls_in_common(reads))
        # The code of a call that has returned may be gone, and its names with it.
        reads += self._reads(state, 1)
        still = len(_calls_in_common(reads))
        return frames[len(frames) - still :], any(read != reads[0] for read in reads)

    def _frames_if_blocked(self, state: int, thread_id: int) -> tuple[Frame, ...] | None:
        """Return the calls of a thread that is blocked while they are read, else None."""
        since = blocked_since(self._memory.process, thread_id)
        if since is None:
            return None
        try:
            frames = tuple(map(self._frame, self._raw_frames(self._innermost(state))))
        except UnreadableError:
            return None
        return frames if blocked_since(self._memory.process, thread_id) == since else None

    def _reads(self, state: int, count: int) -> list[list[RawFrame]]:
        """Read the frames of a running thread several times; each read may mix moments."""
        reads: list[list[RawFrame]] = []
        for _ in range(count + _TRIES):
            try:
                reads.append(self._raw_frames(self._innermost(state)))
            except UnreadableError:
                continue
            if len(reads) == count:
                return reads
        raise UnreadableError("its stack did not stand still")

    def _raw_frames(self, address: int, memory: Readable | None = None) -> list[RawFrame]:
        """Return the frames of a thread, the innermost first, which is at ``address``."""
        layout, read = self._layout, (memory or self._memory).read
        frames: list[RawFrame] = []
        addresses: set[int] = set()
        while address:
            if address in addresses or len(addresses) == _MOST_FRAMES:
                raise UnreadableError("it has more than %d calls" % _MOST_FRAMES)
            addresses.add(address)
            content = read(address, self._frame_bytes)
            if layout.owner is None or content[layout.owner] in _OWNED_BY_PYTHON:
                frames.append(_raw_frame(address, content, layout))
            address = _word(content, layout.previous)
        return frames

    def _innermost(self, state: int) -> int:
        frame = self._memory.word(state + self._layout.frame)
        if self._layout.frame_in_cframe is None:
            return frame
        return self._memory.word(frame + self._layout.frame_in_cframe)

    def _frame(self, raw: RawFrame) -> Frame:
        layout, memory = self._layout, self._memory
        if memory.word(raw.code + _TYPE) != self._code_type:
            raise UnreadableError("its frame has no code")
        offset = raw.instruction
        if layout.bytecode is not None:
            offset -= raw.code + layout.bytecode
        elif layout.version == (3, 10):
            offset *= 2
        table = self._bytes(memory.word(raw.code + layout.line_table))
        first_line = memory.int32(raw.code + layout.first_line)
        return Frame(
            self._text(memory.word(raw.code + layout.file_name)),
            line_at(layout.version, table, first_line, offset),
            self._text(memory.word(raw.code + layout.name)),
        )

    def _text(self, address: int) -> str:
        """Return a ``str`` of the process."""
        length = self._memory.word(address + _SIZE)
        (state,) = self._memory.read(address + _TEXT_STATE, 1)
        kind = state >> 2 & 7
        if length > _MOST_NAME or kind not in _ENCODINGS or not state & _COMPACT:
            raise UnreadableError("a name of it is no text")
        header = 40 if self._layout.version >= (3, 12) else 48
        if not state & _ASCII:
            header += 16 if self._layout.version >= (3, 12) else 24
        content = self._memory.read(address + header, length * kind)
        return content.decode(_ENCODINGS[kind], "replace")

    def _bytes(self, address: int) -> bytes:
        size_bytes = self._memory.word(address + _SIZE)
        if size_bytes > _MOST_TABLE_BYTES:
            raise UnreadableError("a table of lines of it takes %d bytes" % size_bytes)
        return self._memory.read(address + _BYTES, size_bytes)

    def _kernel_id(self, state: int, kernel_ids: set[int]) -> int:
        native_id = self._memory.word(state + self._layout.native_id)
        if self._layout.version >= (3, 11):
            if native_id not in kernel_ids:
                raise UnreadableError("it has no such thread")
            return native_id
        content = self._memory.read(native_id, _PTHREAD_BYTES)
        numbers = [number for (number,) in struct.iter_unpack("<i", content)]
        return next((number for number in numbers if number in kernel_ids), 0)


def python_stacks(process: int) -> list[PythonThread]:
    """Return the Python stacks of a process of this user, the main thread's first.

    Raises:
        UnreadableError: It is no CPython of a known version, or its memory may not be read.
    """
    with Memory(process) as memory:
        return Interpreter(memory).threads()


class MainThread:
    """The main thread of a process, read again and again at the cost of some system calls each.

    It has no calls before Python has begun in the process, and once it is at its end there.

    Raises:
        UnreadableError: It is no CPython of a known version, or its memory may not be read.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self._memory = Memory(process)
        try:
            self._interpreter = Interpreter(self._memory)
            self._state = self._interpreter.main_thread()
        except BaseException:
            self.close()
            raise

    @property
    def runs_python(self) -> bool:
        """Whether Python had begun in the process, and was not at its end, when it was opened."""
        return bool(self._state)

    def close(self) -> None:
        """Stop reading."""
        self._memory.close()

    def look(self) -> Look:
        """Return its calls without their names, and a checksum of their variables.

        Raises:
            UnreadableError: The process has ended, or the calls changed while they were read.
        """
        self._state = self._state or self._interpreter.main_thread()
        return self._interpreter.look(self._state) if self._state else Look((), 0)

    def steady_calls(self) -> tuple[RawFrame, ...]:
        """Return its calls, all of one moment, without their names.

        Raises:
            UnreadableError: The process has ended, or the calls changed while they were read.
        """
        return self._interpreter.steady_calls(self._state)

    def frame(self, raw: RawFrame) -> Frame:
        """Return the function and the line of a call.

        Raises:
            UnreadableError: It has returned.
        """
        return self._interpreter.frame(raw)

    def is_at_same_line(self, calls: Sequence[RawFrame], others: Sequence[RawFrame]) -> bool:
        """Whether two reads show the thread at the same line of the same calls."""
        if calls == others:
            return True
        if not (calls and others) or calls[1:] != others[1:] or calls[0][:2] != others[0][:2]:
            return False
        try:
            return self.frame(calls[0]) == self.frame(others[0])
        except UnreadableError:
            return False


def _find(memory: Memory) -> tuple[Layout, int, int]:
    """Return an interpreter's layout, and the addresses of its type of code and its runtime."""
    process = memory.process
    mapped = mappings(process)
    candidates = _programs(process, mapped)
    for mapping in candidates:
        try:
            program = _program(path_of(process, mapping))
        except (OSError, UnreadableError):
            continue
        if program is None:
            continue
        bias = load_bias(program.segments, mapping.start, mapping.file_offset)
        runtime = bias + program.runtime
        layout = layout_of(memory, runtime, _version(mapping.path, mapped))
        return layout, bias + program.code_type, runtime
    raise UnreadableError("it runs no CPython")


class _Program(NamedTuple):
    """The file of an interpreter: where it has what is looked for, before it is relocated."""

    segments: Sequence[Segment]
    runtime: int
    code_type: int


# The files that were read so far: all ranks of a job use the same few.
_PROGRAMS: dict[tuple[int, int, int], _Program | None] = {}


def _program(path: str) -> _Program | None:
    """Return what is known about a file; None if it is no interpreter.

    Raises:
        OSError: There is no such file.
        UnreadableError: It is no program.
    """
    key = file_key(path)
    # Another thread may clear it meanwhile.
    with contextlib.suppress(KeyError):
        return _PROGRAMS[key]
    elf = Elf(path)
    runtime, code_type = elf.address_of("_PyRuntime"), elf.address_of("PyCode_Type")
    has_both = runtime is not None and code_type is not None
    program = _Program(elf.segments, runtime or 0, code_type or 0) if has_both else None
    if len(_PROGRAMS) >= _MOST_PROGRAMS:
        _PROGRAMS.clear()
    _PROGRAMS[key] = program
    return program


def _programs(process: int, mapped: list[Mapping]) -> list[Mapping]:
    """Return the first mapping of each file that may be a Python interpreter."""
    try:
        program = os.readlink("/proc/%d/exe" % process)
    except OSError as error:
        raise UnreadableError("the process has ended") from error
    first: dict[str, Mapping] = {}
    for mapping in mapped:
        name = os.path.basename(mapping.path)
        if mapping.path == program or name.startswith("libpython"):
            first.setdefault(mapping.path, mapping)
    return list(first.values())


def _version(path: str, mapped: list[Mapping]) -> tuple[int, int]:
    """Return the version of Python that the name of a file tells, or the extension modules do."""
    for text in (path, *(mapping.path for mapping in mapped)):
        match = _VERSION.search(os.path.basename(text))
        if match:
            return 3, int(match.group(1))
    return 3, 0


def _kernel_ids(process: int) -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/%d/task" % process)}
    except OSError as error:
        raise UnreadableError("the process has ended") from error


def _raw_frame(address: int, content: bytes, layout: Layout) -> RawFrame:
    if layout.bytecode is None:
        (instruction,) = struct.unpack_from("<i", content, layout.instruction)
    else:
        instruction = _word(content, layout.instruction)
    return RawFrame(address, _word(content, layout.code) & ~_POINTER_TAGS, instruction)


def _word(content: bytes, offset: int) -> int:
    value: int = _WORD.unpack_from(content, offset)[0]
    return value


def _calls_in_common(reads: list[list[RawFrame]]) -> list[RawFrame]:
    """Return the outer calls that all reads of a stack have in common, the innermost first.

    All but the innermost of them are at the same instruction in each read.
    """
    first = reads[0]
    count = 0
    for calls in zip(*(reversed(read) for read in reads)):
        if any(call[:2] != calls[0][:2] for call in calls):
            break
        count += 1
        if any(call != calls[0] for call in calls):
            break
    return first[len(first) - count :]
