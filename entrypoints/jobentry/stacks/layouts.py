"""Where CPython keeps what its stacks consist of, by version.

Since 3.13 the interpreter describes itself (``_Py_DebugOffsets``, PEP 768). The numbers for earlier
versions are those of 64-bit Linux, x86-64 and aarch64 alike, as ``scripts/python_layout.py`` prints
them. They do not change within a minor version.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from jobentry.stacks.memory import Memory, UnreadableError


class Layout(NamedTuple):
    """Offsets in bytes within CPython's structures.

    Args:
        interpreters: In the runtime: the first interpreter.
        threads: In an interpreter: its newest thread.
        next_thread: In a thread: the next older one.
        frame: In a thread: its innermost frame, or what ``frame_in_cframe`` leads on from.
        frame_in_cframe: Where the frame is in the structure between (3.11 and 3.12), else None.
        native_id: In a thread: its id for the kernel; before 3.11 its id for pthreads.
        code: In a frame: its code.
        previous: In a frame: the frame that called it.
        instruction: In a frame: the current instruction: an address; before 3.11 an index.
        owner: In a frame: who owns it; None before 3.11.
        file_name: In code: its file.
        name: In code: the name of the function.
        first_line: In code: the line of its ``def``.
        line_table: In code: which instruction is on which line.
        bytecode: In code: its first instruction; None before 3.11.
        slots: In a frame: its local variables, then what its expression has computed so far; None
            before 3.11.
        globals: In a frame: the dictionary of its module; None before 3.11, and if it has no
            version (3.13).
    """

    version: tuple[int, int]
    interpreters: int
    threads: int
    next_thread: int
    frame: int
    frame_in_cframe: int | None
    native_id: int
    code: int
    previous: int
    instruction: int
    owner: int | None
    file_name: int
    name: int
    first_line: int
    line_table: int
    bytecode: int | None
    slots: int | None = None
    globals: int | None = None


# fmt: off
_LAYOUTS = {
    (3, 8): Layout((3, 8), 32, 8, 8, 24, None, 176, 32, 24, 104, None, 104, 112, 40, 120, None),
    (3, 9): Layout((3, 9), 32, 8, 8, 24, None, 176, 32, 24, 104, None, 104, 112, 40, 120, None),
    (3, 10): Layout((3, 10), 32, 8, 8, 24, None, 176, 32, 24, 96, None, 104, 112, 40, 120, None),
    (3, 11): Layout((3, 11), 40, 16, 8, 56, 8, 160, 32, 48, 56, 69, 112, 120, 72, 136, 184, 72, 8),
    (3, 12): Layout((3, 12), 40, 72, 8, 56, 0, 144, 0, 8, 56, 70, 112, 120, 68, 136, 192, 72, 24),
}
# fmt: on
# The words of _Py_DebugOffsets: the fields of each of its structures, in order.
_FIRST = ("cookie", "version", "free_threaded")
_INTERPRETER_3_13 = (
    "size id next threads_head gc imports_modules sysdict builtins ceval_gil gil_runtime_state "
    "gil_runtime_state_enabled gil_runtime_state_locked gil_runtime_state_holder"
)
_SECTIONS_3_13 = (
    ("runtime", "size finalizing interpreters_head"),
    ("interpreter", _INTERPRETER_3_13),
    (
        "thread",
        "size prev next interp current_frame thread_id native_thread_id datastack_chunk status",
    ),
    ("frame", "size previous executable instr_ptr localsplus owner"),
    (
        "code",
        "size filename name qualname linetable firstlineno argcount localsplusnames "
        "localspluskinds co_code_adaptive",
    ),
)
_ADDED_3_14 = {
    "interpreter": _INTERPRETER_3_13.replace("threads_head", "threads_head threads_main")
    + " code_object_generation tlbc_generation",
    "frame": "size previous executable instr_ptr localsplus owner stackpointer tlbc_index",
}
_SECTIONS = {
    (3, 13): _SECTIONS_3_13,
    (3, 14): tuple((name, _ADDED_3_14.get(name, fields)) for name, fields in _SECTIONS_3_13),
}
_COOKIE = b"xdebugpy"


def layout_of(memory: Memory, runtime: int, version: tuple[int, int]) -> Layout:
    """Return the layout of the interpreter of a process.

    Args:
        runtime: The address of its ``_PyRuntime``.
        version: As its file name says.

    Raises:
        UnreadableError: Its version is not known here, or it runs without the interpreter's lock.
    """
    if memory.read(runtime, len(_COOKIE)) == _COOKIE:
        return _described(memory, runtime)
    try:
        return _LAYOUTS[version]
    except KeyError:
        raise UnreadableError("the layout of Python %d.%d is not known" % version) from None


def _described(memory: Memory, runtime: int) -> Layout:
    """Return the layout that the interpreter describes itself."""
    hexadecimal = memory.word(runtime + 8)
    version = (hexadecimal >> 24 & 0xFF, hexadecimal >> 16 & 0xFF)
    if version not in _SECTIONS:
        raise UnreadableError("the layout of Python %d.%d is not known" % version)
    names = [
        "%s.%s" % (section, field)
        for section, fields in _SECTIONS[version]
        for field in fields.split()
    ]
    names = [*_FIRST, *names]
    words = struct.unpack("<%dQ" % len(names), memory.read(runtime, 8 * len(names)))
    offsets = dict(zip(names, words))
    if offsets["free_threaded"]:
        raise UnreadableError("Python without the interpreter's lock cannot be read")
    return Layout(
        version=version,
        interpreters=offsets["runtime.interpreters_head"],
        threads=offsets["interpreter.threads_head"],
        next_thread=offsets["thread.next"],
        frame=offsets["thread.current_frame"],
        frame_in_cframe=None,
        native_id=offsets["thread.native_thread_id"],
        code=offsets["frame.executable"],
        previous=offsets["frame.previous"],
        instruction=offsets["frame.instr_ptr"],
        owner=offsets["frame.owner"],
        file_name=offsets["code.filename"],
        name=offsets["code.name"],
        first_line=offsets["code.firstlineno"],
        line_table=offsets["code.linetable"],
        bytecode=offsets["code.co_code_adaptive"],
        slots=offsets["frame.localsplus"],
    )
