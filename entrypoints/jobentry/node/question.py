"""Asks the head on this node from another process, such as one that ``docker exec`` starts."""

from __future__ import annotations

import os
import sys

from jobentry.node.enter import node_dir_of
from jobentry.system import requests


def main(request: str) -> int:
    """Print the head's answer to a request, and return the exit code."""
    try:
        answer = requests.ask(node_dir_of(os.environ), request.encode("ascii", "replace"))
    except requests.RequestError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(answer.decode("ascii", "replace") + "\n")
    return 0
