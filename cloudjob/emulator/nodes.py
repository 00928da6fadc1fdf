"""The common parts of a job's nodes, which are processes or containers.

Both kinds have the same methods. ``key`` names one attempt at a job, ``handle`` its nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cloudjob.emulator import node_plan
from jobentry.contract.sigv4 import Keys

# Returns temporary keys for a job, by the name of its user.
NewKeys: TypeAlias = Callable[[str], Keys]


def folder(nodes: Path, index: int, path: str) -> Path:
    """Return the path on this machine for a path of node ``index``.

    Args:
        nodes: The folder of the job's nodes.
    """
    return Path(node_plan.on_machine(str(nodes / str(index)), path))


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of a node.

    Args:
        exit_code: None while it runs.
        note: Why it ended, if only its machine knows that.
    """

    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int | None = None
    note: str = ""


class ImageMissing(Exception):
    """The image of a job is not available."""
