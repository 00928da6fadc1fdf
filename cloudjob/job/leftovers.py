"""Remove what killed commands and controllers have left on this machine."""

from __future__ import annotations

from pathlib import Path

from cloudjob import locks
from cloudjob.backends.process import running
from cloudjob.home import submits_folder


def sweep(home: Path) -> None:
    """Remove it; every command on jobs does so first, as it costs nothing where nothing is left."""
    locks.sweep(submits_folder(home))
    running.sweep(home)
