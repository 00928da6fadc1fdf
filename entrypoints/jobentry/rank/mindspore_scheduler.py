"""MindSpore's cluster: what runs as its scheduler."""

from __future__ import annotations

import importlib
import os
import socket


def schedule() -> None:
    """Serve the ranks until they have left.

    Of the user's script the scheduler needs nothing; it would run once more than there are ranks.
    """
    os.environ["MS_SCHED_HOST"] = socket.gethostbyname(os.environ["MS_SCHED_HOST"])
    # Until the end of this process, which comes when no rank is left.
    importlib.import_module("mindspore.communication").init()
