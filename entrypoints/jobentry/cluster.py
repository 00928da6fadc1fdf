"""MindSpore's cluster: what runs as its scheduler, and what msrun runs in the place of a script."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Mapping

from jobentry.contract import names


def schedule() -> None:
    """Serve the ranks until they have left.

    Of the user's script the scheduler needs nothing; it would run once more than there are ranks.
    """
    os.environ["MS_SCHED_HOST"] = socket.gethostbyname(os.environ["MS_SCHED_HOST"])
    # Until the end of this process, which comes when no rank is left.
    importlib.import_module("mindspore.communication").init()


def door(changed: Mapping[str, str | None], words: tuple[str, ...]) -> None:
    """Become ``words``, the door of a rank; where msrun wants a scheduler, there is one already.

    Args:
        changed: The variables that were changed for msrun, as they were; None for one that was not.
    """
    environ = os.environ
    if environ.get("MS_ROLE") == "MS_SCHED":
        return
    for name, value in changed.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    environ[names.CLOUDJOB_RANK] = environ["MS_NODE_ID"]
    os.execv(words[0], words)
