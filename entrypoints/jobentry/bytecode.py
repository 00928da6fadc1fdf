"""Writes the bytecode of the container half, for the Python that runs this.

Without it Python compiles our sources at each start, of each rank too: half of what a start costs.
One file, and no zip: to find out that a program is one, and to import from it, takes seven
milliseconds. Another Python cannot read it, and is given the zipapp.
"""

from __future__ import annotations

import contextlib
import marshal
import os
from importlib.util import MAGIC_NUMBER
from typing import Any, Collection

# What a rank's door and the runner of its script import.
DOOR = (
    "__main__.py",
    "jobentry/__init__.py",
    "jobentry/contract/__init__.py",
    "jobentry/contract/names.py",
    "jobentry/rank.py",
    "jobentry/script.py",
    "jobentry/system.py",
)
# PEP 552: bytecode that is found by a hash, which nobody checks.
_HEADER = MAGIC_NUMBER + (0b01).to_bytes(4, "little") + bytes(8)
_PROGRAM = """\
from marshal import loads
ZIPAPP = {!r}
SEAL = {!r}
CODES = {!r}
exec(loads({!r}))
"""


def write(target: str, files: Collection[str] = ()) -> None:
    """Write the bytecode of the zipapp that this runs from to ``target``, all at once.

    The zipapp stays where it is, beside it or not: tracebacks show its lines, and other Pythons
    run it.

    Args:
        target: Its name ends with ``.pyc``.
        files: The modules that it holds, by path in the zipapp; others are compiled when they are
            imported. Empty for all.

    Raises:
        OSError: It cannot be written.
    """
    new = f"{target}.{os.getpid()}"
    loader: Any = __spec__.loader  # of entrypoints/loader.py
    zipapp = loader.zipapp
    codes = {file: _code(loader.texts[file], file, zipapp) for file in files or loader.texts}
    begin = _code(loader.member("__main__.py"), "loader.py", zipapp)
    folder, name = os.path.split(zipapp)
    is_beside = os.path.realpath(folder) == os.path.realpath(os.path.dirname(target))
    text = _PROGRAM.format(name if is_beside else zipapp, loader.seal, codes, begin)
    data = _HEADER + _code(text, "bytecode", zipapp)
    try:
        with open(new, "wb") as file:
            file.write(data)
        os.replace(new, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _code(text: str, name: str, zipapp: str) -> bytes:
    return marshal.dumps(compile(text, f"{zipapp}/{name}", "exec", dont_inherit=True))
