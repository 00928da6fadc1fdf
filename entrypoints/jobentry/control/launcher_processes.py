"""The processes that start the ranks of this node: mpirun, torchrun, or rank wrappers."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
from collections import deque
from typing import Callable, Mapping, Sequence

from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Lines
from jobentry.control.verdict import Starter
from jobentry.launchers.common import Process
from jobentry.log import say

_KEPT_LINES = 40


class Starters:
    """The processes that start ranks here, as events of the node's loop.

    Args:
        is_quiet: Whether what they write is no longer shown; it is kept all the same.
    """

    def __init__(self, loop: NodeLoop, is_quiet: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_quiet = is_quiet
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._text: dict[str, Lines] = {}
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        # Those that serve the ranks, with what each has written, and how the first ended badly.
        self._servers: dict[str, deque[str]] = {}
        self.server_end: Starter | None = None
        # The first that ended badly, and its exit code, negative for a signal.
        self.name = ""
        self.code = 0
        self._wrappers: set[str] = set()
        self.were_killed = False

    @property
    def signal(self) -> int:
        """The signal by which another than us has killed one of them, 0 for none."""
        by_us = self.were_killed or self.name in self._wrappers
        return 0 if by_us or self.code >= 0 else -self.code

    @property
    def are_running(self) -> bool:
        """Whether one of them runs that serves nobody."""
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                self._hear(name)
                self._forget(name)
                if name in self._servers:
                    if code and not self.server_end:
                        self.server_end = Starter(name, code, self._servers[name])
                elif code and not self.code:
                    self.name, self.code = name, code
        return any(name not in self._servers for name in self._running)

    @property
    def processes(self) -> list[int]:
        """The process ids of those that run."""
        return [process.pid for process in self._running.values()]

    def start(self, wanted: Sequence[Process], cwd: str) -> str:
        """Start them anew; return what is in the way, empty when nothing is."""
        self.lines.clear()
        self.code = 0
        self.were_killed = False
        self.server_end = None
        self._servers = {
            process.name: deque(maxlen=_KEPT_LINES) for process in wanted if process.is_server
        }
        others = [process.name for process in wanted if not process.is_server]
        self.name = others[0] if others else ""
        self._wrappers = {process.name for process in wanted if process.is_wrapper}
        for process in wanted:
            fault = self._start(process.name, process.argv, process.env, cwd)
            if fault:
                self.name = process.name
                self.kill()
                return fault
        return ""

    def kill(self) -> None:
        """End them at once, each with its process group."""
        for process in self._running.values():
            if process.poll() is None:
                self.were_killed = True
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def end_servers(self) -> None:
        """End those that serve the ranks: no rank is left."""
        for name in self._servers:
            if name in self._running:
                with contextlib.suppress(OSError):
                    os.killpg(self._running[name].pid, signal.SIGKILL)

    def _start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
        try:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"starting {argv[0]}: {error.strerror}"
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._loop.own.add(process.pid)
        self._running[name] = process
        self._text[name] = Lines()
        self._loop.selector.register(process.stdout, selectors.EVENT_READ, lambda: self._hear(name))
        return ""

    def _hear(self, name: str) -> None:
        stdout = self._running[name].stdout
        assert stdout is not None
        try:
            data = os.read(stdout.fileno(), 65536)
        except (BlockingIOError, ValueError):
            return
        if not data:
            self._unregister(name)
        for line in self._text[name].feed(data):
            text = line.decode("utf-8", "replace").rstrip()
            if text and not re.match(r"-+$", text):
                self._servers.get(name, self.lines).append(text)
                if not self._is_quiet():
                    say(f"{name}: {text}")

    def _forget(self, name: str) -> None:
        self._unregister(name)
        stdout = self._running.pop(name).stdout
        assert stdout is not None
        stdout.close()

    def _unregister(self, name: str) -> None:
        stdout = self._running[name].stdout
        assert stdout is not None
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(stdout)
