"""Requests about a running job, for stacks or a profile of its ranks: the head asks every node.

They arrive at its socket or, for stacks alone, as an object in the job's store.

Reading may block, for example if a file system does not answer, so it happens in threads.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from functools import partial
from typing import Any, Callable, Iterator, Mapping

from jobentry import objects
from jobentry.contract import profiles, stacks
from jobentry.contract.paths import SIGNED_S, JobPaths
from jobentry.contract.profiles import Profile
from jobentry.contract.stacks import ProcessStacks, Stacks
from jobentry.control.loop import Lines, NodeLoop, NodeSetup
from jobentry.control.peers import WorkerPool
from jobentry.log import log_message
from jobentry.objects import ObjectError
from jobentry.system import requests

# Sends the result of a request; called in a thread.
_Reply = Callable[[bytes], None]
# A worker's answer must fit into one message; a longer one is sent without its last processes.
_ANSWER_LIMIT_BYTES = 8 << 20
_MOST_REQUESTS = 8


class NodeInsight:
    """Answers requests about the ranks of this node."""

    def __init__(self, setup: NodeSetup, loop: NodeLoop) -> None:
        self._setup = setup
        self._loop = loop

    def answer(self, request: Mapping[str, Any], on_answer: Callable[[Any], None]) -> None:
        """Answer a request in a thread, then call ``on_answer`` in the loop of this node.

        The answer is JSON: a list of processes, or a profile, which is None if the rank does not
        run here.
        """
        options = dict(request)
        read = self._stacks if options.pop("kind") == requests.STACKS else self._profile

        def run() -> None:
            answer = read(**options)
            self._loop.post(lambda: on_answer(answer))

        _start(run)

    def _stacks(self, *, with_threads: bool, with_native: bool) -> list[ProcessStacks]:
        # Most jobs are never asked, and this import would make each one start later.
        from jobentry.node.rank_stacks import read_stacks

        processes = read_stacks(
            self._loop.ranks,
            self._setup.paths,
            self._setup.node.node,
            with_threads=with_threads,
            with_native=with_native,
        )
        count = len(processes)
        while len(json.dumps(processes)) > _ANSWER_LIMIT_BYTES:
            del processes[len(processes) // 2 :]
        if len(processes) < count:
            left_out = count - len(processes)
            log_message("left out the stacks of %d processes: too many calls" % left_out)
        return processes

    def _profile(self, *, rank: int, seconds: float) -> object:
        from jobentry.node.profiling import take_profile

        paths, node = self._setup.paths, self._setup.node.node
        profile = take_profile(self._loop.ranks, paths, node, rank, seconds)
        return None if profile is None else profiles.to_values(profile)


class _StacksRequest:
    """A request for the stacks of all ranks.

    Args:
        missing: The nodes whose answers have not arrived.
    """

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing
        self._processes: list[ProcessStacks] = []

    def add(self, node: int, answer: Any) -> None:
        """Take the answer of a node."""
        self._processes += stacks.processes_of(answer)
        self.missing.discard(node)

    def result(self) -> bytes:
        """Return what has arrived."""
        missing = tuple(sorted(self.missing))
        return stacks.dump(Stacks(time.time(), tuple(self._processes), missing))


class _ProfileRequest:
    """A request for the profile of one rank.

    Args:
        missing: The nodes that may have it.
    """

    def __init__(self, missing: set[int], rank: int) -> None:
        self.missing = missing
        self._rank = rank
        self._profile: Profile | None = None

    def add(self, node: int, answer: Any) -> None:
        """Take the answer of a node; None if the rank does not run there."""
        if answer is None:
            self.missing.discard(node)
            return
        self._profile = profiles.from_values(answer)._replace(rank=self._rank, node=node)
        # The other nodes do not have the rank, whether they say so or not.
        self.missing.clear()

    def result(self) -> bytes:
        """Return what has arrived."""
        why = "no node has answered in time" if self.missing else "it does not run"
        none = Profile(self._rank, -1, 0.0, 0.0, 0, (), (), problem=why)
        return profiles.dump(self._profile or none)


class InsightRequests:
    """The head's side: takes requests from its socket and the job's store, and answers them."""

    def __init__(self, setup: NodeSetup, loop: NodeLoop, pool: WorkerPool) -> None:
        self._here = NodeInsight(setup, loop)
        self._loop = loop
        self._pool = pool
        self._number = 0
        self._streams: set[socket.socket] = set()
        # Each request that is not answered yet, with what sends its result.
        self._pending: dict[int, tuple[_StacksRequest | _ProfileRequest, _Reply]] = {}
        job = JobPaths(setup.node.job)
        request_uri, answer_uri = map(objects.signed_uri, (job.request, job.answer))
        if request_uri and answer_uri:
            _start(partial(self._watch_store, request_uri, answer_uri))
        try:
            self._server = requests.listen(setup.paths.node_dir)
        except OSError as error:
            # Nothing else depends on it.
            log_message("listening for requests about this job: %s" % error.strerror)
            return
        loop.selector.register(self._server, selectors.EVENT_READ, self._accept)

    def answered(self, node: int, number: int, answer: Any) -> None:
        """Take the answer of a node; one that cannot be read is ignored."""
        try:
            request, _ = self._pending[number]
            if node in request.missing:
                request.add(node, answer)
        except (LookupError, TypeError, ValueError, profiles.ProfileError):
            return
        if not request.missing:
            self._loop.cancel(_timer(number))
            self._send_result(number)

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
        complete = lines.feed(data)
        if complete or not data:
            self._loop.selector.unregister(stream)
            self._streams.discard(stream)
        if not data:
            stream.close()
        elif complete:
            options = _options(complete[0])
            if options is None:
                stream.close()
            else:
                self._begin(options, partial(_send, stream))

    def _watch_store(self, request_uri: str, answer_uri: str) -> None:
        for line, options in stored_requests(request_uri):
            self._loop.post(partial(self._begin, options, partial(_store, answer_uri, line)))

    def _begin(self, options: dict[str, Any], reply: _Reply) -> None:
        """Ask all nodes what was requested."""
        present = [worker for worker in self._pool.workers if not worker.is_absent]
        missing = {0, *(worker.index for worker in present)}
        request: _StacksRequest | _ProfileRequest = _StacksRequest(missing)
        if options["kind"] == requests.PROFILE:
            request = _ProfileRequest(missing, options["rank"])
        self._number += 1
        number = self._number
        self._pending[number] = request, reply
        for worker in present:
            worker.send("question", number=number, request=options)
        self._loop.schedule(_timer(number), requests.ANSWER_S, lambda: self._send_result(number))
        self._here.answer(options, partial(self.answered, 0, number))

    def _send_result(self, number: int) -> None:
        """Answer a request with what has arrived."""
        request, reply = self._pending.pop(number)
        _start(partial(reply, request.result()))


def stored_requests(
    uri: str, pause: Callable[[float], None] = time.sleep
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each new request at this URI, with its options.

    Whoever may write there chooses the request: only one for stacks is accepted.
    """
    last = b""
    for _ in range(int(SIGNED_S / requests.LOOK_S)):
        pause(requests.LOOK_S)
        try:
            line = objects.peek(uri, requests.REQUEST_LIMIT_BYTES)
        except (ObjectError, ValueError):
            # Usually there is none, or the store does not answer, or sends us to no valid address:
            # the next look may succeed.
            continue
        options = _options(line) if line != last else None
        last = line
        if options and options["kind"] == requests.STACKS:
            yield line, options


def _send(waiting: socket.socket, result: bytes) -> None:
    with contextlib.suppress(OSError), waiting as stream:
        stream.settimeout(requests.ANSWER_S)
        stream.sendall(result + b"\n")


def _store(uri: str, request: bytes, result: bytes) -> None:
    try:
        objects.write(requests.stored_answer(request, result), uri)
    except ObjectError as error:
        log_message(f"answering a request for stacks: {error}")


def _options(line: bytes) -> dict[str, Any] | None:
    """Return the checked options of a request; None if it is malformed."""
    try:
        return _checked(json.loads(line))
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return None


def _checked(request: Any) -> dict[str, Any]:
    kind = request["kind"]
    if kind == requests.STACKS:
        names = ("with_threads", "with_native")
        return {"kind": kind, **{name: bool(request.get(name, False)) for name in names}}
    if kind == requests.PROFILE:
        seconds = min(profiles.MOST_PIECE_S, float(request["seconds"]))
        return {"kind": kind, "rank": int(request["rank"]), "seconds": seconds}
    raise ValueError(kind)


def _timer(number: int) -> str:
    return "stacks-%d" % number


def _start(run: Callable[[], None]) -> None:
    # Without a thread there is no answer, and the request ends with its time limit.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=run, daemon=True).start()
