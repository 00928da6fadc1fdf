"""Asks the head on this node from another process, such as one that ``docker exec`` starts."""

from __future__ import annotations

import os
import sys

from jobentry.contract import names, paths
from jobentry.system import requests


def main(request: str) -> int:
    """Print the head's answer to a request, and return the exit code."""
    job = os.environ.get(names.CLOUDJOB_JOB, "")
    own = paths.node_dir(paths.home_of(os.environ), job)
    folder = os.environ.get(names.CLOUDJOB_NODE_DIR) or own
    try:
        answer = requests.ask(folder, request.encode("ascii", "replace"))
    except requests.RequestError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(answer.decode("ascii", "replace") + "\n")
    return 0
