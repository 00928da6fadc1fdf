"""The git commit of a source, for the record of a job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from cloudjob.package.ignore import WITHOUT_FETCH

# A repository with a million files takes longer; the commit is then recorded without its changes.
_LIMIT_S = 5.0
# A repository must not choose a program that runs here, and a reader must not lock its index. Only
# filters stay, such as that of Git LFS, without which their files would differ from the commit; git
# itself refuses a repository of another user.
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")


class Revision(NamedTuple):
    """The state of a repository.

    Args:
        is_changed: Whether files of the source differ from the commit or are not in it; None if
            that is unknown.
    """

    commit: str
    is_changed: bool | None

    def __str__(self) -> str:
        notes = {True: " with uncommitted changes", False: "", None: ""}
        return self.commit + notes[self.is_changed]


def of_source(source: Path) -> Revision | None:
    """Return the revision of a source; None without a repository, a commit or git."""
    folder = source.absolute()
    if not any(os.path.lexists(each / ".git") for each in (folder, *folder.parents)):
        return None
    commit = _output(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _output(folder, "status", "--porcelain", "--ignore-submodules=none", ".")
    return Revision(commit, None if changes is None else bool(changes))


def _output(folder: Path, *arguments: str) -> str | None:
    """Return what git prints about a folder; None if it fails or takes too long."""
    try:
        done = subprocess.run(
            [*_GIT, *arguments],
            cwd=folder,
            env={**os.environ, **WITHOUT_FETCH},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout).strip() if done.returncode == 0 else None
