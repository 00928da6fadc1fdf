"""Requests for the stacks of a job's ranks: the head asks every node, and answers with all of them.

Reading may block, for example if a file system does not answer, so it happens in threads.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from typing import Any, Callable

from jobentry.contract import stacks
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.contract.stacks import ProcessStacks, Stacks
from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Lines
from jobentry.control.worker_pool import WorkerPool
from jobentry.log import log_message
from jobentry.system import requests

# A worker's answer must fit into one message; a longer one is sent without its last processes.
_ANSWER_LIMIT_BYTES = 8 << 20
_MOST_REQUESTS = 8


class NodeStacks:
    """Reads the stacks of the ranks of this node."""

    def __init__(self, node: NodeEnv, paths: NodePaths, loop: NodeLoop) -> None:
        self._node = node
        self._paths = paths
        self._loop = loop

    def read(
        self,
        on_read: Callable[[list[ProcessStacks]], None],
        *,
        with_threads: bool,
        with_native: bool,
    ) -> None:
        """Read them in a thread, then call ``on_read`` in the loop of this node."""

        def run() -> None:
            # Most jobs are never asked, and this import would make each one start later.
            from jobentry.node.rank_stacks import read_stacks

            found = read_stacks(
                self._loop.ranks,
                self._paths,
                self._node.node,
                with_threads=with_threads,
                with_native=with_native,
            )
            count = len(found)
            while len(json.dumps(found)) > _ANSWER_LIMIT_BYTES:
                del found[len(found) // 2 :]
            if len(found) < count:
                left_out = count - len(found)
                log_message("left out the stacks of %d processes: too many calls" % left_out)
            self._loop.post(lambda: on_read(found))

        _start(run)


class _Request:
    """A request that has not been answered yet.

    Args:
        missing: The nodes whose stacks have not arrived.
    """

    def __init__(self, stream: socket.socket, missing: set[int]) -> None:
        self.stream = stream
        self.missing = missing
        self.found: list[ProcessStacks] = []


class StackRequests:
    """The head's side: takes requests from its socket, and answers them."""

    def __init__(self, node: NodeEnv, paths: NodePaths, loop: NodeLoop, pool: WorkerPool) -> None:
        self._own = NodeStacks(node, paths, loop)
        self._loop = loop
        self._pool = pool
        self._number = 0
        self._streams: set[socket.socket] = set()
        self._pending: dict[int, _Request] = {}
        try:
            self._server = requests.listen(paths.node_dir)
        except OSError as error:
            # Nothing else depends on it.
            log_message("listening for requests about this job: %s" % error.strerror)
            return
        loop.selector.register(self._server, selectors.EVENT_READ, self._accept)

    def answered(self, node: int, values: dict[str, Any]) -> None:
        """Take the stacks of a worker's ranks."""
        with contextlib.suppress(TypeError, ValueError):
            self._take(values["number"], node, list(stacks.processes_of(values["processes"])))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._server.accept()
            if len(self._streams) + len(self._pending) >= _MOST_REQUESTS:
                stream.close()
                return
            stream.setblocking(False)
            lines = Lines(requests.REQUEST_LIMIT_BYTES)
            self._streams.add(stream)
            self._loop.selector.register(
                stream, selectors.EVENT_READ, lambda: self._receive(stream, lines)
            )

    def _receive(self, stream: socket.socket, lines: Lines) -> None:
        try:
            data = stream.recv(requests.REQUEST_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        found = lines.feed(data)
        if found or not data:
            self._loop.selector.unregister(stream)
            self._streams.discard(stream)
        if not data:
            stream.close()
        elif found:
            self._begin(stream, found[0])

    def _begin(self, stream: socket.socket, line: bytes) -> None:
        try:
            request = json.loads(line)
            is_known = request["kind"] == requests.STACKS
            wanted = {
                name: bool(request.get(name, False)) for name in ("with_threads", "with_native")
            }
        except (KeyError, RecursionError, TypeError, ValueError):
            is_known = False
        if not is_known:
            stream.close()
            return
        self._number += 1
        number = self._number
        present = [worker for worker in self._pool.workers if not worker.is_absent]
        own = 0
        self._pending[number] = _Request(stream, {own, *(worker.index for worker in present)})
        for worker in present:
            worker.send("stacks", number=number, **wanted)
        self._own.read(lambda found: self._take(number, own, found), **wanted)
        self._loop.schedule(_timer(number), requests.ANSWER_S, lambda: self._answer(number))

    def _take(self, number: int, node: int, found: list[ProcessStacks]) -> None:
        request = self._pending.get(number)
        if request is None or node not in request.missing:
            return
        request.missing.discard(node)
        request.found += found
        if not request.missing:
            self._loop.cancel(_timer(number))
            self._answer(number)

    def _answer(self, number: int) -> None:
        """Answer a request with the stacks that have arrived."""
        request = self._pending.pop(number)
        answer = Stacks(time.time(), tuple(request.found), tuple(sorted(request.missing)))

        def send() -> None:
            with contextlib.suppress(OSError), request.stream as stream:
                stream.settimeout(requests.ANSWER_S)
                stream.sendall(stacks.dump(answer) + b"\n")

        _start(send)


def _timer(number: int) -> str:
    return "stacks-%d" % number


def _start(run: Callable[[], None]) -> None:
    # Without a thread there is no answer, and the request ends with its time limit.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=run, daemon=True).start()
