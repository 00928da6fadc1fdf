"""The nodes that take part in an elastic job now, for the driver that starts the ranks on them."""

from __future__ import annotations

import json
import os

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths


class Members:
    """The nodes that are there, as the head sees them; the driver reads them from a file.

    A node that comes back has another name for the driver, which takes no node again that it had
    struck off: ``HOST~2`` when it comes for the second time.
    """

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self._hosts = node.hosts
        self._least = node.min_nodes
        self._path = paths.members
        self._times: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._struck: set[int] = set()

    @property
    def count(self) -> int:
        """How many there are whose ranks have not failed."""
        return len(self._names.keys() - self._struck)

    @property
    def are_enough(self) -> bool:
        """Whether the job can go on with them."""
        return self.count >= self._least

    def come(self, index: int) -> None:
        """Take a node in."""
        self._struck.discard(index)
        times = self._times[index] = self._times.get(index, 0) + 1
        self._names[index] = self._hosts[index] + ("~%d" % times if times > 1 else "")
        self._write()

    def strike(self, index: int) -> None:
        """Count a node no more: one of its ranks has failed, and the driver uses it no longer."""
        self._struck.add(index)

    def go(self, index: int) -> None:
        """Take a node out, if it is one of them."""
        if self._names.pop(index, ""):
            self._write()

    def _write(self) -> None:
        places = {name: (index, self._hosts[index]) for index, name in self._names.items()}
        with open(self._path + ".new", "w", encoding="ascii") as file:
            json.dump(places, file)
        os.replace(self._path + ".new", self._path)
