"""Writes a copy of the zipapp with bytecode, for the Python that runs this.

Without it Python compiles our sources at each start, of each rank too: half of what a start costs.
The copy holds the sources as well, so another Python takes those.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from importlib import util

# The earliest date that a zip file can name: the same bytes from the same zipapp.
_DATE = (1980, 1, 1, 0, 0, 0)
# PEP 552: bytecode that is found by a hash, which nobody checks.
_FLAGS = (0b01).to_bytes(4, "little")


def write(zipapp: str, target: str) -> str:
    """Write a copy of ``zipapp`` with bytecode to ``target``, all at once; return what is wrong."""
    new = f"{target}.{os.getpid()}"
    try:
        _copy(zipapp, new)
        os.replace(new, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        return f"jobentry: writing {target}: {error.strerror}"
    return ""


def _copy(zipapp: str, new: str) -> None:
    with zipfile.ZipFile(zipapp) as source:
        names, *texts = source.read("modules").split(b"\0")
    # Stored, not deflated: a start reads it often, and it is small.
    with zipfile.ZipFile(new, "w") as copy:
        for name, text in zip(names.decode("utf-8").split("\n"), texts):
            copy.writestr(zipfile.ZipInfo(name, _DATE), text)
            copy.writestr(zipfile.ZipInfo(name + "c", _DATE), _bytecode(text, name))


def _bytecode(text: bytes, name: str) -> bytes:
    import marshal

    code = compile(text, name, "exec", dont_inherit=True)
    return util.MAGIC_NUMBER + _FLAGS + util.source_hash(text) + marshal.dumps(code)
