"""Unpack the entry's zipapp, so that Python can cache the bytecode of its modules.

Python compiles modules in a zip file again in every process, including each rank.
"""

from __future__ import annotations

import contextlib
import os

from jobentry.contract.paths import ENTRY


def own_archive() -> str:
    """Return the zipapp that this process runs from; empty if it runs from unpacked files."""
    return str(getattr(__spec__.loader, "archive", ""))


def unpack(folder: str) -> None:
    """Unpack the zipapp that this process runs from into ``folder``, replacing its contents.

    ``folder`` appears only once it is complete. It contains a copy of the zipapp, so that the
    process that starts the entry can compare their versions.

    Raises:
        OSError: The folder cannot be written.
    """
    # They take longer to import than everything else that the start of an unpacked entry needs.
    import shutil
    import zipfile

    new = "%s.%d" % (folder, os.getpid())
    try:
        with zipfile.ZipFile(own_archive()) as members:
            members.extractall(new)
        shutil.copyfile(own_archive(), os.path.join(new, ENTRY))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(new, folder)
    except OSError:
        with contextlib.suppress(OSError):
            shutil.rmtree(new)
        raise
