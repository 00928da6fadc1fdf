"""Runs the scheduler of MindSpore's dynamic cluster."""

from __future__ import annotations

import importlib
import os
import socket


def schedule() -> None:
    """Serve the ranks until all of them have left.

    The scheduler does not run the user's script, which is only for the ranks.
    """
    os.environ["MS_SCHED_HOST"] = socket.gethostbyname(os.environ["MS_SCHED_HOST"])
    # Serves until the process exits, which happens when no rank is left.
    importlib.import_module("mindspore.communication").init()
