"""The processes that start the ranks of this node: mpirun, torchrun, or the wrappers themselves."""

from __future__ import annotations

import re
from collections import deque
from functools import partial
from typing import Callable, Sequence

from jobentry.control.child_process import ChildProcess
from jobentry.control.event_loop import NodeLoop
from jobentry.control.verdict import LaunchEnd
from jobentry.launchers.common import Process
from jobentry.log import log_message

_KEPT_LINES = 40
# Lines that say nothing: rules, and Open MPI's warning if an agent that it has forked runs before
# mpirun sets the agent's process group, which the agent has already set itself.
_MEANINGLESS = re.compile(
    r"-+$|.*plm:[rs]sh: Warning: setpgid\(\d+,\d+\) failed in parent with errno=Permission denied"
)


class LaunchProcesses:
    """The processes that start ranks on this node, watched by its event loop.

    Args:
        is_quiet: Whether to stop showing their output, which is kept nevertheless.
    """

    def __init__(self, loop: NodeLoop, is_quiet: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_quiet = is_quiet
        self._running: dict[str, ChildProcess] = {}
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        # Servers of the ranks with their output, and how the first of them failed.
        self._servers: dict[str, deque[str]] = {}
        self.server_end: LaunchEnd | None = None
        # The first process that failed, and its exit code, negative for a signal.
        self.name = ""
        self.code = 0
        self._wrappers: set[str] = set()
        self.were_killed = False

    @property
    def signal(self) -> int:
        """The signal from outside that killed one of them; 0 for none."""
        by_us = self.were_killed or self.name in self._wrappers
        return 0 if by_us or self.code >= 0 else -self.code

    @property
    def are_running(self) -> bool:
        """Whether any of them runs, apart from servers of the ranks."""
        for name, child in list(self._running.items()):
            end = child.end()
            if end is None:
                continue
            code, lines = end
            self._log(name, lines)
            del self._running[name]
            if name in self._servers:
                if code and not self.server_end:
                    self.server_end = LaunchEnd(name, code, self._servers[name])
            elif code and not self.code:
                self.name, self.code = name, code
        return any(name not in self._servers for name in self._running)

    @property
    def processes(self) -> list[int]:
        """The process ids of those that run."""
        return [child.id for child in self._running.values()]

    def start(self, processes: Sequence[Process], cwd: str) -> str:
        """Start the processes; return what went wrong, empty if nothing did."""
        self.lines.clear()
        self.code = 0
        self.were_killed = False
        self.server_end = None
        self._servers = {
            process.name: deque(maxlen=_KEPT_LINES) for process in processes if process.is_server
        }
        others = [process.name for process in processes if not process.is_server]
        self.name = others[0] if others else ""
        self._wrappers = {process.name for process in processes if process.is_wrapper}
        for process in processes:
            log = partial(self._log, process.name)
            try:
                child = ChildProcess(self._loop, process.argv, process.env, cwd, log)
            except OSError as error:
                self.name = process.name
                self.kill()
                return f"starting {process.argv[0]}: {error.strerror}"
            self._running[process.name] = child
        return ""

    def kill(self) -> None:
        """Kill all of them, each with its process group."""
        for child in self._running.values():
            if child.is_running:
                self.were_killed = True
                child.kill()

    def end_servers(self) -> None:
        """Kill the servers of the ranks, once no rank is left."""
        for name in self._servers:
            if name in self._running:
                self._running[name].kill()

    def _log(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            text = line.rstrip()
            if text and not _MEANINGLESS.match(text):
                self._servers.get(name, self.lines).append(text)
                if not self._is_quiet():
                    log_message(f"{name}: {text}")
