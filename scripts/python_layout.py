"""Print where versions of CPython keep their stacks: rows for `jobentry.stacks.layouts`.

Usage: python scripts/python_layout.py PYTHON...

Each PYTHON is an interpreter of version 3.8 to 3.12 with its headers. It takes a C compiler. Later
versions describe themselves.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

# Each field of a row: a type and a member, or None where the version has no such thing.
FIELDS = """
_PyRuntimeState interpreters.head
PyInterpreterState {threads}
PyThreadState next
PyThreadState {frame}
{cframe}
PyThreadState {thread_id}
{frame_type} f_code
{frame_type} {previous}
{frame_type} {instruction}
{owner}
PyCodeObject co_filename
PyCodeObject co_name
PyCodeObject co_firstlineno
PyCodeObject {lines}
{bytecode}
"""
SINCE_3_11 = {
    "threads": "threads.head",
    "frame": "cframe",
    "cframe": "_PyCFrame current_frame",
    "thread_id": "native_thread_id",
    "frame_type": "_PyInterpreterFrame",
    "previous": "previous",
    "instruction": "prev_instr",
    "owner": "_PyInterpreterFrame owner",
    "lines": "co_linetable",
    "bytecode": "PyCodeObject co_code_adaptive",
}
BEFORE_3_11 = {
    "threads": "tstate_head",
    "frame": "frame",
    "cframe": "None",
    "thread_id": "thread_id",
    "frame_type": "PyFrameObject",
    "previous": "f_back",
    "instruction": "f_lasti",
    "owner": "None",
    "lines": "co_linetable",
    "bytecode": "None",
}
PROGRAM = """
#define Py_BUILD_CORE 1
#include <Python.h>
#include <stddef.h>
#include <stdio.h>
#include <frameobject.h>
#if PY_VERSION_HEX >= 0x030b0000
#include <internal/pycore_frame.h>
#endif
#if PY_VERSION_HEX >= 0x03090000
#include <internal/pycore_interp.h>
#include <internal/pycore_runtime.h>
#else
#include <internal/pycore_pystate.h>
#endif
int main(void) {{
    printf("(3, %d): Layout((3, %d)", PY_MINOR_VERSION, PY_MINOR_VERSION);
{prints}
    printf("),\\n");
}}
"""


def main() -> None:
    """Print a row for each interpreter."""
    for interpreter in sys.argv[1:]:
        question = (
            "import sys, sysconfig; print(sys.version_info[1], sysconfig.get_path('include'))"
        )
        answer = subprocess.run(
            [interpreter, "-c", question], check=True, capture_output=True, text=True
        )
        minor, headers = answer.stdout.strip().split(" ", 1)
        sys.stdout.write(row(int(minor), headers) + "\n")


def row(minor: int, headers: str) -> str:
    """Return the row of Python 3.``minor``, which a program compiled with its headers prints."""
    names = SINCE_3_11 if minor >= 11 else BEFORE_3_11
    if minor < 10:
        names = {**names, "lines": "co_lnotab"}
    prints = []
    for field in FIELDS.format(**names).strip().splitlines():
        if field == "None":
            prints.append('    printf(", None");')
        else:
            prints.append('    printf(", %zu", offsetof({}, {}));'.format(*field.split()))
    with tempfile.TemporaryDirectory() as scratch:
        source, program = Path(scratch, "layout.c"), Path(scratch, "layout")
        source.write_text(PROGRAM.format(prints="\n".join(prints)))
        subprocess.run(["cc", "-w", f"-I{headers}", source, "-o", program], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
