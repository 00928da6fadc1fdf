"""Runs the scheduler of MindSpore's dynamic cluster, and its parameter servers."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess

from jobentry.system.addresses import address_of


def schedule() -> None:
    """Serve the ranks until all of them have left.

    The scheduler does not run the user's script, which is only for the ranks.
    """
    _look_up_scheduler()
    # Serves until the process exits, which happens when no rank is left.
    importlib.import_module("mindspore.communication").init()


def run_server(*command: str) -> int:
    """Run ``command`` as a parameter server, which must stay until the ranks have ended.

    Returns:
        The exit code of a command that failed.
    """
    _look_up_scheduler()
    code = subprocess.call(command)
    while code == 0:
        signal.pause()
    return code if code > 0 else 128 - code


def _look_up_scheduler() -> None:
    # MindSpore needs an address.
    os.environ["MS_SCHED_HOST"] = address_of(os.environ["MS_SCHED_HOST"])
