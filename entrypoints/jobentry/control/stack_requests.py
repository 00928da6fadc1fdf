"""Requests for the stacks of a job's ranks, and for the profile of one: the head asks every node.

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

from jobentry.contract import profiles, stacks
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.contract.profiles import Profile
from jobentry.contract.stacks import ProcessStacks, Stacks
from jobentry.control.loop import Lines, NodeLoop
from jobentry.control.peers import WorkerPool
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

    def profile(
        self, on_taken: Callable[[Profile | None], None], rank: int, seconds: float
    ) -> None:
        """Take a profile of a rank in a thread, then call ``on_taken`` in the loop of this node.

        It gets None if the rank does not run here.
        """

        def run() -> None:
            from jobentry.node.profiling import take_profile

            found = take_profile(self._loop.ranks, self._paths, self._node.node, rank, seconds)
            self._loop.post(lambda: on_taken(found))

        _start(run)


class _Request:
    """A request that has not been answered yet.

    Args:
        missing: The nodes whose answers have not arrived.
        profile_of: The rank whose profile was requested; None if stacks were.
    """

    def __init__(
        self, stream: socket.socket, missing: set[int], profile_of: int | None = None
    ) -> None:
        self.stream = stream
        self.missing = missing
        self.profile_of = profile_of
        self.found: list[ProcessStacks] = []
        self.profile: Profile | None = None

    def answer(self) -> bytes:
        """Return what has arrived."""
        if self.profile_of is None:
            found = Stacks(time.time(), tuple(self.found), tuple(sorted(self.missing)))
            return stacks.dump(found)
        why = "no node has answered in time" if self.missing else "it does not run"
        none = Profile(self.profile_of, -1, 0.0, 0.0, 0, (), (), problem=why)
        return profiles.dump(self.profile or none)


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

    def profiled(self, node: int, values: dict[str, Any]) -> None:
        """Take a worker's profile of a rank; it has none if the rank does not run there."""
        with contextlib.suppress(LookupError, TypeError, profiles.ProfileError):
            content = values["profile"]
            found = None if content is None else profiles.from_values(content)
            self._take_profile(values["number"], node, found)

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
            is_known = self._begin_kind(stream, request["kind"], request)
        except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
            is_known = False
        if not is_known:
            stream.close()

    def _begin_kind(self, stream: socket.socket, kind: str, request: dict[str, Any]) -> bool:
        """Begin a request, and return whether its kind is known."""
        if kind == requests.STACKS:
            wanted = {
                name: bool(request.get(name, False)) for name in ("with_threads", "with_native")
            }
            number = self._send(stream, None, "stacks", **wanted)
            self._own.read(lambda found: self._take(number, 0, found), **wanted)
        elif kind == requests.PROFILE:
            rank = int(request["rank"])
            seconds = min(profiles.MOST_PIECE_S, float(request["seconds"]))
            number = self._send(stream, rank, "profile", rank=rank, seconds=seconds)
            self._own.profile(lambda found: self._take_profile(number, 0, found), rank, seconds)
        return kind in (requests.STACKS, requests.PROFILE)

    def _send(
        self, stream: socket.socket, profile_of: int | None, kind: str, **values: object
    ) -> int:
        """Ask all workers, and return the number of the request."""
        self._number += 1
        number = self._number
        present = [worker for worker in self._pool.workers if not worker.is_absent]
        missing = {0, *(worker.index for worker in present)}
        self._pending[number] = _Request(stream, missing, profile_of)
        for worker in present:
            worker.send(kind, number=number, **values)
        self._loop.schedule(_timer(number), requests.ANSWER_S, lambda: self._answer(number))
        return number

    def _take(self, number: int, node: int, found: list[ProcessStacks]) -> None:
        request = self._pending.get(number)
        if request is None or node not in request.missing:
            return
        request.missing.discard(node)
        request.found += found
        if not request.missing:
            self._loop.cancel(_timer(number))
            self._answer(number)

    def _take_profile(self, number: int, node: int, found: Profile | None) -> None:
        request = self._pending.get(number)
        if request is None or node not in request.missing or request.profile_of is None:
            return
        request.missing.discard(node)
        if found is not None:
            request.profile = found._replace(rank=request.profile_of, node=node)
        # The other nodes do not have the rank, whether they say so or not.
        if found is not None or not request.missing:
            self._loop.cancel(_timer(number))
            self._answer(number)

    def _answer(self, number: int) -> None:
        """Answer a request with what has arrived."""
        request = self._pending.pop(number)
        answer = request.answer()

        def send() -> None:
            with contextlib.suppress(OSError), request.stream as stream:
                stream.settimeout(requests.ANSWER_S)
                stream.sendall(answer + b"\n")

        _start(send)


def _timer(number: int) -> str:
    return "stacks-%d" % number


def _start(run: Callable[[], None]) -> None:
    # Without a thread there is no answer, and the request ends with its time limit.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=run, daemon=True).start()
