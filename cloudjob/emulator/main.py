"""The process of the emulator, which ``daemon`` starts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from cloudjob.emulator import state
from cloudjob.emulator.obs.seaweedfs import SeaweedFS
from cloudjob.emulator.settings import load
from cloudjob.emulator.state import READY
from cloudjob.errors import BackendError, CloudJobError
from cloudjob.home import locks

# The backend modelarts stores code and outputs in this bucket if no store is configured.
_BUCKET = "cloudjob"


def main() -> None:
    """Run an emulator (``FOLDER PORT``); print ``ready`` or the error."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    os.umask(0o077)
    taken = _lock(folder)
    seaweedfs = None
    try:
        if taken is None:
            raise BackendError(f"starting the emulator in {folder}: it is already running")
        path = folder / state.SETTINGS
        settings = load(path if path.exists() else None)
        account = state.account(folder, settings)
        seaweedfs = SeaweedFS(folder / state.OBS, _BUCKET)
        seaweedfs.launch()
        # Imported while SeaweedFS starts: each of the two takes half a second.
        from cloudjob.emulator.server import Emulator

        emulator = Emulator(folder, settings, account, seaweedfs)
        emulator.start(port)
    except CloudJobError as error:
        if seaweedfs:
            seaweedfs.stop()
        os.write(1, f"{error.message}\n{error.hint}\n".encode())
        os._exit(1)
    os.write(1, READY)
    # The process that started the emulator ends now; further output goes to the log.
    os.dup2(2, 1)
    emulator.wait()
    emulator.close()
    # Threads of jobs are ended in the middle of their work, which the next emulator resumes.
    os._exit(0)


def _lock(folder: Path) -> int | None:
    """Take the lock, with retries, because commands that check it hold it for a moment."""
    for _ in range(40):
        taken = locks.acquire(folder / state.LOCK)
        if taken is not None:
            return taken
        time.sleep(0.05)
    return None
