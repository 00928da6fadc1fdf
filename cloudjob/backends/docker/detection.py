"""Whether this machine has a container engine; nothing is asked of it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from cloudjob.backends.docker import engine


def found_here(environ: Mapping[str, str]) -> str:
    """Return whether there is an engine, and whether this user can connect to it; else empty."""
    host = engine.host()
    path = Path(host.removeprefix("unix://"))
    if not host.startswith("unix://"):
        return "$DOCKER_HOST"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            probe.connect(str(path))
    except OSError:
        is_installed = path.exists() or shutil.which("docker", path=environ.get("PATH"))
        return "a container engine, but this user cannot connect to it" if is_installed else ""
    return "a container engine"
