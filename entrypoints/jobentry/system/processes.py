"""The processes of this machine, from ``/proc``, and how to end those that descendants leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Collection, Mapping, Sequence

from jobentry.system import linux


def output_of(argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> str:
    """Return what a program prints, without its errors; empty if it fails to start, or to end.

    Args:
        env: Its variables, by default those of this process. It runs in ``/``.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            argv,
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
        return done.stdout.decode("utf-8", "surrogateescape")
    return ""


def children() -> list[int]:
    """Return the child processes of this process."""
    return linux.children(os.getpid())


def adopt_orphans() -> None:
    """Adopt the processes that descendants leave behind, so that they can be ended."""
    linux.prctl()(linux.ADOPT_ORPHANS, 1)


def reap(kept: Collection[int]) -> None:
    """Reap the children that have ended, except those in ``kept``, which other code waits for.

    Otherwise a script that runs for days and keeps starting programs could fill the process table:
    the orphans of these programs become our children (``adopt_orphans``), not those of the
    container's init.
    """
    for child in children():
        if child not in kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def kill_descendants(keep: Collection[int] = ()) -> None:
    """Kill our descendants, except the processes in ``keep``."""
    for _ in range(100):
        processes = [child for child in children() if child not in keep]
        if not processes:
            return
        for child in processes:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
