"""Where the folders of tests are."""

from __future__ import annotations

import os
from pathlib import Path


def _root() -> Path:
    """Return a folder with a short path that nodes share with this machine.

    In the folders that are private to nodes, such as /tmp and /var/tmp, a script that gets the path
    of a test's folder would change its node's version of that folder.
    """
    if os.geteuid() == 0:
        # Tests of root also run commands as other users, who must reach their folders.
        return Path("/var/cache/cloudjob")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "cloudjob-tests"


ROOT = _root()
if not ROOT.exists():
    ROOT.mkdir(parents=True, exist_ok=True)
    # Whatever the umask.
    ROOT.chmod(0o755)
