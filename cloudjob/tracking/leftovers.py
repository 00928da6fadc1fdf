"""Removes files that killed commands and controllers have left on this machine."""

from __future__ import annotations

from pathlib import Path

from cloudjob.backends.process import running
from cloudjob.home import scratch_folders, submits_folder


def remove(home: Path) -> None:
    """Remove leftovers below ``home``; this is fast, so every command on jobs calls it first."""
    scratch_folders.remove_unused(submits_folder(home))
    running.remove_leftovers(home)
