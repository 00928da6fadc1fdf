"""Many small requests over a few connections, by one thread.

With a thread for each of them Python's lock goes from one to the next at every call of the system:
small objects take an eighth longer, and a third more of a processor.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Sequence

from cloudjob.errors import StoreError
from cloudjob.store.parallel import in_parallel
from cloudjob.store.s3.connection import QUIET_S, Connection
from cloudjob.store.s3.refusals import BROKEN
from cloudjob.store.s3.wire import Answer, Request, Wire

_AT_ONCE = 16


def answers(wire: Wire, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer | None]]:
    """Send requests that have neither body nor sink, each once, and yield the answers as they come.

    None stands for what did not come, or is no success: ``wire.ask`` has patience with those.
    """
    if requests:
        burst = _Burst(wire, requests)
        try:
            yield from burst.run()
        finally:
            burst.close()


class _Burst:
    """Requests, and the connections over which they go."""

    def __init__(self, wire: Wire, requests: Sequence[Request]) -> None:
        self._wire = wire
        self._keys = wire.keys.current()
        self._count = min(_AT_ONCE, len(requests))
        self._next = iter(requests)
        self._broken: list[Request] = []
        self._waiting: dict[Connection, Request] = {}
        self._ready = selectors.DefaultSelector()

    def run(self) -> Iterator[tuple[Request, Answer | None]]:
        """Yield each request with its answer."""
        for opened in in_parallel(self._opened, range(self._count), at_once=self._count):
            if opened is not None:
                self._ready.register(opened, selectors.EVENT_READ)
                self._send(opened)
        # An answer that trickles must not be waited for as long as something of it comes.
        stall_s, last_s = self._wire.patience.stall_s, time.monotonic()
        while self._waiting and time.monotonic() - last_s < stall_s:
            ready = self._ready.select(min(stall_s, QUIET_S))
            if not ready:
                self._wire.tell_quiet(next(iter(self._waiting.values())), last_s)
            for key, _ in ready:
                connection: Connection = key.fileobj  # type: ignore[assignment]
                request = self._waiting[connection]
                answer = self._answer(connection, request)
                if answer is not None:
                    yield request, answer if answer.refusal is None else None
                    last_s = time.monotonic()
        for request in (*self._broken, *self._waiting.values(), *self._next):
            yield request, None

    def close(self) -> None:
        """Let go of what nobody has waited for."""
        for connection in self._waiting:
            self._wire.let_go(connection, is_kept=False)
        self._ready.close()

    def _opened(self, _number: int) -> Connection | None:
        try:
            return self._wire.connection()[0]
        except (*BROKEN, StoreError):
            return None

    def _send(self, connection: Connection) -> None:
        """Send the next request, if there is one and the connection is good for it."""
        request = next(self._next, None) if connection.is_reusable else None
        if request is None:
            self._ready.unregister(connection)
            self._waiting.pop(connection, None)
            self._wire.let_go(connection, is_kept=connection.is_reusable)
            return
        self._waiting[connection] = request
        try:
            connection.send(self._wire.head(request, self._keys))
        except BROKEN:
            self._break(connection)

    def _answer(self, connection: Connection, request: Request) -> Answer | None:
        """Return an answer when all of it has come, and send the next request."""
        try:
            if not connection.has_answer():
                return None
            answer = self._wire.read(connection, request)
        except BROKEN:
            self._break(connection)
            return None
        self._send(connection)
        return answer

    def _break(self, connection: Connection) -> None:
        self._broken.append(self._waiting.pop(connection))
        self._ready.unregister(connection)
        self._wire.let_go(connection, is_kept=False)
