"""The head's view of a worker: found, connected, lost, found again, or dead.

When a connection ends, the node may be dead or the network broken, so the head reconnects at once.
If nothing listens there any more, or another process does, or the backend reports the end of its
node, the worker's entry has ended. If nothing answers, the node is silent, and the head waits for
it (``CLOUDJOB_STALL_S``).
"""

from __future__ import annotations

import time
from typing import Any, Callable

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.control import connection, dial, early_ends
from jobentry.control.connection import Link
from jobentry.control.dial import Answer, Attempt, Dial, HeadIdentity, Resolver
from jobentry.control.event_loop import NodeLoop
from jobentry.control.listener import announced
from jobentry.control.messages import Message

# The pause before the next attempt while a worker comes up. It grows by half, so that finding a
# worker takes at most a third longer than its start.
_PAUSE_S = (0.02, 1.0)
_GROWTH = 1.5
# The pause between attempts to find a worker again, and to reach one that is silent.
_AGAIN_S = 0.2
_SILENT_AGAIN_S = 5.0
# A worker counts as dead after the first time if nothing listens there, and after the second if its
# kernel has closed or reset the connection and no new one was possible.
_DEAD_S = 1.0
_CLOSED_S = 5.0


class RemoteWorker:
    """The head's view of one worker.

    Args:
        on_message: Called with each message of the worker.
        on_lost: Called with the ``reason`` when the head gives up a worker that had answered, or
            one that ended before, as reported by the backend.
    """

    def __init__(
        self,
        node: NodeEnv,
        index: int,
        loop: NodeLoop,
        on_message: Callable[[RemoteWorker, Message], None],
        on_lost: Callable[[RemoteWorker], None],
    ) -> None:
        self.index = index
        self.host = node.hosts[index]
        self.facts: dict[str, Any] = {}
        self.is_idle = False
        self.is_gone = False
        # Whether the worker has reported that its outputs are stored, or why they are not.
        self.has_left = False
        self.problem = ""
        self.reason = ""
        # How it ended before it had answered, if the backend has reported that.
        self.early_end: Failure | None = None
        self.clock_ahead_s = 0.0
        self.attempt = Attempt()
        self._node = node
        self._port = 0
        self._loop = loop
        self._message = on_message
        self._on_lost = on_lost
        self._resolver: Resolver | None = None
        self._head = HeadIdentity(b"", "")
        self._begin()

    def _begin(self) -> None:
        self.link = Link(self._received, self._disconnected)
        self._dial: Dial | None = None
        self._entry = ""
        self._pause_s = _PAUSE_S[0]
        # Since when nothing has listened there, and since when the connection has been closed.
        self._dead_since: float | None = None
        self._closed_since: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the worker's entry has answered."""
        return bool(self.facts)

    @property
    def is_absent(self) -> bool:
        """Whether the worker is not there yet, or no longer."""
        return self.is_gone or not self.is_ready

    @property
    def silent_s(self) -> float:
        """Return the seconds since a worker that had answered was last heard from."""
        return 0.0 if self.is_absent else self.link.silent_s

    def open(self, head: HeadIdentity, resolver: Resolver, port: int) -> None:
        """Start to look for the worker, and greet its entry."""
        self._head, self._resolver, self._port = head, resolver, port
        self.link.send("hello")
        self._connect()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the worker, unless it is gone."""
        if not self.is_gone:
            self.link.send(kind, **values)

    def close(self) -> None:
        """Close the connection, and stop trying to reach the worker."""
        self._close_connection()
        self._resolver = None

    def _close_connection(self) -> None:
        self._loop.cancel(self._timer)
        if self._dial is not None:
            self._dial.stop()
            self._dial = None
        self.link.detach()

    def reconnect(self) -> None:
        """Connect to a new entry that replaces a lost worker."""
        self._close_connection()
        self.facts = {}
        self.is_idle = self.is_gone = self.has_left = False
        self._begin()
        self._pause_s = _PAUSE_S[1]
        self.link.send("hello")
        self._connect_later(_PAUSE_S[1])

    def tick(self, elapsed_s: float) -> None:
        """Update the time, about once a second, and look for a worker that has become silent."""
        if self.is_gone:
            return
        self.link.tick(elapsed_s)
        if not self.is_ready:
            return
        # Only while the connection is in doubt: it may still hold the worker's last messages.
        code = early_ends.reported_code(self._node, self.index) if self._is_connecting else None
        if code is not None:
            self._lose("it ended with exit code %d" % code)
        elif self.link.silent_s >= self._node.stall_s:
            self._lose("it has been silent for %.0f s" % self.link.silent_s)
        elif self.link.silent_s >= connection.SILENT_S and not self._is_connecting:
            self._connect_later(0.0)

    # -- one attempt after another ----------------------------------------------------------------

    @property
    def _timer(self) -> str:
        return "look-%d" % self.index

    @property
    def _is_connecting(self) -> bool:
        return self._dial is not None or self._loop.is_scheduled(self._timer)

    def _connect_later(self, pause_s: float) -> None:
        self._loop.schedule(self._timer, pause_s, self._connect)

    def _connect(self) -> None:
        if self._resolver is None:
            return
        self._dial = Dial(
            self._loop, self._head, self.index, self.link.received, self._answered, self._failed
        )
        if self._node.control_dir:
            endpoint = announced(self._node.control_dir, self.index)
            if endpoint is None:
                self._failed(dial.NO_ADDRESS)
            else:
                self._dial.start(*endpoint)
            return
        dialing = self._dial

        def connect(address: str) -> None:
            if dialing is not self._dial:
                return
            if address:
                dialing.start(address, self._port)
            else:
                self._failed(dial.NO_NAME)

        self._resolver.resolve(self.host, self._port, connect)

    def _answered(self, answer: Answer) -> None:
        self._dial = None
        if self._entry and answer.entry != self._entry:
            answer.stream.close()
            self._lose("its entry was started again")
            return
        self._entry = answer.entry
        self._dead_since = self._closed_since = None
        self.attempt = Attempt(answer.address, True, "its entry has not answered", _NO_ENTRY)
        self.link.attach(answer.stream, answer.channel, answer.received)

    def _failed(self, attempt: Attempt) -> None:
        self._dial = None
        now = time.monotonic()
        if not self._entry:
            self._not_up(attempt)
            return
        if not attempt.is_dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        limits = ((self._dead_since, _DEAD_S), (self._closed_since, _CLOSED_S))
        if any(since is not None and now - since >= limit_s for since, limit_s in limits):
            self._lose("its connection ended")
        elif attempt.is_dead or self._closed_since is not None:
            self._connect_later(_AGAIN_S)
        elif not self.link.is_attached or self.link.silent_s >= connection.SILENT_S:
            self._connect_later(
                _SILENT_AGAIN_S if self.link.silent_s >= connection.SILENT_S else 1.0
            )

    def _not_up(self, attempt: Attempt) -> None:
        """Try again, unless the worker has ended before it answered."""
        self.attempt = attempt
        self.early_end = early_ends.reported(self._node, self.index)
        if self.early_end is not None:
            self._lose(self.early_end.message)
            return
        self._connect_later(self._pause_s)
        self._pause_s = min(_GROWTH * self._pause_s, _PAUSE_S[1])

    def _disconnected(self, why: str) -> None:
        """Handle the end of the connection."""
        if self.is_gone:
            return
        if why in (connection.CLOSED, connection.RESET):
            self._closed_since = time.monotonic()
        if self._dial is not None:
            self._dial.stop()
        self._connect_later(0.0)

    def _lose(self, reason: str) -> None:
        self.reason = reason
        was_ready = self.is_ready
        self.is_gone = True
        self._close_connection()
        if was_ready or self.early_end:
            self._on_lost(self)
        else:
            self.reconnect()

    def _received(self, message: Message) -> None:
        kind, values = message
        if kind == "ready":
            self.facts = values
            self.clock_ahead_s = values["at_s"] - time.time()
        elif kind == "idle":
            self.is_idle = True
        elif kind == "left":
            self.problem = values["trouble"]
            # The worker waits for this; if it ended earlier, its last message could be lost.
            self.send("bye")
            self.has_left = True
        self._message(self, message)
        if self.has_left:
            self._lose("its entry ended")


_NO_ENTRY = "it can be reached, but its entry does not answer: what does its own log say?"
