"""The entry's own files, unpacked from its archive: only then can Python keep their bytecode.

Python compiles what it imports from a zip file anew in every process, in each rank too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile

from jobentry.contract.paths import ENTRY


def own_archive() -> str:
    """Return the archive that this process runs from; empty when it runs from unpacked files."""
    return str(getattr(__spec__.loader, "archive", ""))


def unpack(folder: str) -> None:
    """Unpack the archive that this process runs from into ``folder``, replacing what is there.

    ``folder`` appears only once it is complete. It holds a copy of the archive, so that whoever
    starts the entry can see whether the two are of one version.

    Raises:
        OSError: It cannot be written.
    """
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
