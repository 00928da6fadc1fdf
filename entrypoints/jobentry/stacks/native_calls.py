"""The calls of C and C++ code in a thread of another process: an approximation.

Each call that has not returned has left the address behind its call instruction on the stack, but
so have calls that returned long ago and whose part of the stack is used again. All such addresses
are returned in the order of the stack, so there may be calls too many; rarely the innermost ones.
Without debug information there is no cheap way to know better.
"""

from __future__ import annotations

import bisect
import os
import re
import struct

from jobentry.contract.stacks import MOST_NATIVE_CALLS, NativeCall
from jobentry.stacks.elf import Elf, file_key
from jobentry.stacks.kernel import Registers, blocked_since, registers_of_blocked
from jobentry.stacks.memory import Mapping, Memory, UnreadableError, mappings, path_of
from jobentry.stacks.tracing import registers_of_running

# The part of the stack that is searched; the calls of interest are the innermost ones.
_STACK_BYTES = 32 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
# The longest instruction that calls: x86-64; aarch64 has instructions of four bytes.
_CALL_BYTES = 7
# aarch64 may sign the upper bits of an address (pointer authentication).
_ADDRESS_BITS = (1 << 48) - 1
_IS_ARM = os.uname().machine == "aarch64"
# A name of C++ in the form that compilers give it: _Z or _ZN, the parts with their lengths, E, and
# the arguments.
_CPP_NAME = re.compile(r"_Z+(?P<nested>NK?)?(?P<std>St)?(?=\d)")
_CPP_PART = re.compile(r"(\d{1,3})")
# The call of the interpreter that runs Python code, and those between it and a C function.
_INTERPRETER = re.compile(r"_?PyEval_\w+")
_INTERPRETER_CALL = re.compile(r"(_?Py\w+|cfunction_\w+|method_vectorcall\w*|slot_tp_\w+)?")


class _Code:
    """The parts of programs and libraries that a process has mapped to be executed."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._parts = [each for each in mappings(process) if each.is_code]
        self._starts = [each.start for each in self._parts]

    def part_at(self, address: int) -> Mapping | None:
        """Return the part that an address is in."""
        at = bisect.bisect_right(self._starts, address) - 1
        return self._parts[at] if at >= 0 and address < self._parts[at].end else None

    def path_of(self, part: Mapping) -> str:
        """Return a path at which its file can be opened."""
        return path_of(self._process, part)


class NativeStacks:
    """Reads native calls; keeps the symbols of the libraries that it has seen until it is dropped.

    Reading the symbols of large libraries takes tenths of a second, and 64 MB of memory at most for
    each of them.
    """

    def __init__(self) -> None:
        self._symbols: dict[tuple[int, int, int], Elf | None] = {}

    def calls(self, process: int, thread: int, *, may_stop: bool) -> tuple[NativeCall, ...]:
        """Return the calls of a thread, the innermost first.

        Args:
            may_stop: Whether to stop a thread that runs, for less than a millisecond. A blocked one
                is never stopped, so that no system call of it is interrupted.

        Raises:
            UnreadableError: The process has ended, or may not be read.
        """
        calls = [call for call, _ in self.placed_calls(process, thread, may_stop=may_stop)]
        return tuple(_without_interpreter(calls)[:MOST_NATIVE_CALLS])

    def placed_calls(
        self, process: int, thread: int, *, may_stop: bool
    ) -> list[tuple[NativeCall, int]]:
        """Return all calls, the innermost first, and where the stack has the address of each.

        For the innermost call, this is where the stack ends.

        Raises:
            UnreadableError: The process has ended, or may not be read.
        """
        code = _Code(process)
        with Memory(process) as memory:
            registers, stack = _stack(memory, process, thread, may_stop=may_stop)
            returns = _return_addresses(memory, stack, code)
        calls: list[tuple[NativeCall, int]] = []
        for address, offset in [(registers.instruction, 0), *returns]:
            call = self._call(address, code)
            if call is not None and call not in [each for each, _ in calls[-1:]]:
                calls.append((call, registers.stack + offset))
            if call is not None and call.function == "main":
                break
        return calls

    def _call(self, address: int, code: _Code) -> NativeCall | None:
        part = code.part_at(address)
        if part is None:
            return None
        elf = self._elf(code.path_of(part))
        offset = address - part.start + part.file_offset
        place = elf.address_in_file(offset) if elf else None
        function = elf.function_at(place) if elf and place is not None else ""
        return NativeCall(readable_name(function), os.path.basename(part.path))

    def _elf(self, path: str) -> Elf | None:
        try:
            key = file_key(path)
            if key not in self._symbols:
                self._symbols[key] = Elf(path, with_internal=True)
        except (OSError, UnreadableError):
            return None
        return self._symbols[key]


def _without_interpreter(calls: list[NativeCall]) -> list[NativeCall]:
    """Return the calls that the innermost Python code has made; all of a program without Python."""
    at = next((at for at, call in enumerate(calls) if _INTERPRETER.fullmatch(call.function)), None)
    if at is None:
        return calls
    interpreter = calls[at].library
    while at and calls[at - 1].library == interpreter:
        if not _INTERPRETER_CALL.fullmatch(calls[at - 1].function):
            break
        at -= 1
    return calls[:at]


def readable_name(symbol: str) -> str:
    """Return a symbol as its source has it: ``c10d::Work::wait`` for ``_ZN4c10d4Work4waitEv``.

    A name of C++ ends with ``...`` where templates, operators or unnamed functions follow.
    """
    name = symbol.partition("@")[0]
    start = _CPP_NAME.match(name)
    if not start:
        return name
    rest = name[start.end() :]
    parts = ["std"] if start["std"] else []
    while True:
        length = _CPP_PART.match(rest)
        if not length:
            break
        begin, end = length.end(), length.end() + int(length[1])
        parts.append(rest[begin:end])
        rest = rest[end:]
    is_whole = rest.startswith("E") or not start["nested"]
    return "::".join(parts) + ("" if is_whole else "...") if parts else name


def _stack(memory: Memory, process: int, thread: int, *, may_stop: bool) -> tuple[Registers, bytes]:
    """Return where a thread is, and the innermost part of its stack.

    Raises:
        UnreadableError: It runs and may not be stopped, or has ended.
    """
    since = blocked_since(process, thread)
    registers = registers_of_blocked(process, thread) if since is not None else None
    if registers is not None:
        stack = _innermost_part(memory, registers.stack)
        if blocked_since(process, thread) == since:
            return registers, stack
    if not may_stop:
        raise UnreadableError("it runs")
    return registers_of_running(thread, lambda registers: _innermost_part(memory, registers.stack))


def _innermost_part(memory: Memory, address: int) -> bytes:
    """Return what is on a stack, up to where its memory ends."""
    try:
        return memory.read(address, _STACK_BYTES)
    except UnreadableError:
        content = memory.read(address, _PAGE - address % _PAGE)
        while len(content) < _STACK_BYTES:
            try:
                content += memory.read(address + len(content), _PAGE)
            except UnreadableError:
                break
        return content


def _return_addresses(memory: Memory, stack: bytes, code: _Code) -> list[tuple[int, int]]:
    """Return the addresses on a stack to which calls return, and where in it they are."""
    addresses = []
    words = struct.iter_unpack("<Q", stack[: len(stack) - len(stack) % 8])
    for at, (word,) in enumerate(words):
        address = word & _ADDRESS_BITS if _IS_ARM else word
        if code.part_at(address - _CALL_BYTES) is None:
            continue
        try:
            before = memory.read(address - _CALL_BYTES, _CALL_BYTES)
        except UnreadableError:
            continue
        if (is_arm_call if _IS_ARM else is_intel_call)(before):
            # The instruction behind a call that never returns belongs to another function.
            addresses.append((address - 1, 8 * at))
    return addresses


def is_intel_call(before: bytes) -> bool:
    """Whether the seven bytes before an address end with a call, on x86-64."""
    if before[2] == 0xE8:  # CALL with a relative address
        return True
    # CALL by register or memory (FF /2): two to seven bytes, according to how it is addressed.
    return any(before[at] == 0xFF and before[at + 1] & 0x38 == 0x10 for at in (5, 4, 3, 1, 0))


def is_arm_call(before: bytes) -> bool:
    """Whether the last four of these bytes are a call, on aarch64."""
    instruction = int.from_bytes(before[-4:], "little")
    is_direct = instruction & 0xFC000000 == 0x94000000  # BL
    # BLR, and those that check a signed address: BLRAA, BLRAB, BLRAAZ, BLRABZ.
    is_by_register = instruction & 0xFEFFF000 == 0xD63F0000
    return is_direct or is_by_register
