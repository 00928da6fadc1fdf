"""A child process in its own session, whose output is read by the node's loop."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from typing import Callable, Mapping, Sequence

from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Lines

_READ_BYTES = 65536


class ChildProcess:
    """A started child.

    Args:
        on_lines: Called with the lines that it writes to standard output and standard error.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        loop: NodeLoop,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        on_lines: Callable[[list[str]], None],
    ) -> None:
        self._loop = loop
        self._on_lines = on_lines
        self._lines = Lines()
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self.id = self._process.pid
        os.set_blocking(self._stdout.fileno(), False)
        loop.own_children.add(self.id)
        loop.selector.register(self._stdout, selectors.EVENT_READ, self._read_lines)

    def end(self) -> tuple[int, list[str]] | None:
        """Return the exit code (negative for a signal) and the last lines; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lines = self._read()
        self._unregister()
        self._stdout.close()
        self._loop.own_children.discard(self.id)
        return code, lines

    @property
    def is_running(self) -> bool:
        """Whether the child is still running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill its process group, which may outlive the child."""
        with contextlib.suppress(OSError):
            os.killpg(self.id, signal.SIGKILL)

    def _read_lines(self) -> None:
        lines = self._read()
        if lines:
            self._on_lines(lines)

    def _read(self) -> list[str]:
        try:
            data = os.read(self._stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            # The child has closed its output but still runs, as a daemon may.
            self._unregister()
        return [line.decode("utf-8", "replace") for line in self._lines.feed(data)]

    def _unregister(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(self._stdout)
