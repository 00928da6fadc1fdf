"""The log of a container: joins the engine's frames into lines, and continues with a saved log."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.backends import follow as following
from cloudjob.backends.docker import engine
from cloudjob.backends.docker.request import LOG_DRIVER
from cloudjob.backends.follow import Piece, Streams
from cloudjob.errors import BackendError, Unreachable
from cloudjob.retries import OutageLimit

_HEADER = struct.Struct(">BxxxL")
# The engine cuts lines into pieces of this size.
_CUT_BYTES = 16384
_POLL_S = 0.1


class Frames:
    """Joins the engine's frames into whole lines, separately for stdout and stderr.

    Args:
        driver: The log driver. Docker 20.10's ``local`` loses the newline of a line that was cut
            (tried); a piece that is shorter than a cut is then the end of its line.
        skip_bytes: How many bytes of whole lines to leave out at the beginning.
    """

    def __init__(self, driver: str, skip_bytes: int = 0) -> None:
        self._restores_newlines = driver == LOG_DRIVER
        self._skip_bytes = skip_bytes
        self._buffer = bytearray()
        self._parts: dict[int, list[bytes]] = {}

    def feed(self, data: bytes) -> bytes:
        """Add what the engine sent, and return the lines that are complete now."""
        buffer = self._buffer
        buffer += data
        done: list[bytes] = []
        at = 0
        while len(buffer) - at >= _HEADER.size:
            stream, size = _HEADER.unpack_from(buffer, at)
            end = at + _HEADER.size + size
            if end > len(buffer):
                break
            self._take(stream, bytes(buffer[at + _HEADER.size : end]), done)
            at = end
        del buffer[:at]
        whole = b"".join(done)
        skipped = min(self._skip_bytes, len(whole))
        self._skip_bytes -= skipped
        return whole[skipped:]

    def finish(self) -> bytes:
        """Return the last line of a stream that has ended, with a newline added."""
        rest = [b"".join(parts) + b"\n" for _, parts in sorted(self._parts.items()) if parts]
        self._parts.clear()
        return b"".join(rest)

    def _take(self, stream: int, data: bytes, done: list[bytes]) -> None:
        parts = self._parts.setdefault(stream, [])
        parts.append(data)
        if data.endswith(b"\n"):
            done += parts
        elif self._restores_newlines and len(data) < _CUT_BYTES:
            done += [*parts, b"\n"]
        else:
            return
        self._parts[stream] = []


class LogSource(NamedTuple):
    """The location of a node's log.

    Args:
        container: The id of its container.
        saved: The file that has the log when the container is gone.
    """

    node: int
    container: str
    driver: str
    saved: Path


def read(client: Any, source: LogSource, *, follow: bool) -> Iterator[bytes]:
    """Yield the log of one container in whole lines, from the beginning.

    A restart of the engine breaks the stream, or ends it as if the log were over, while the
    container keeps running (live-restore); the next stream starts again at the first frame. In the
    meantime, another process may save the log and remove the container. The saved log consists of
    the same frames, so reading continues there at the same byte.

    Args:
        follow: Whether to wait for the end of the container; else only existing lines are yielded.

    Raises:
        BackendError: The engine refused, or, unless it is followed, the container is gone and its
            log was not saved.
    """
    size_bytes = 0
    outage = OutageLimit()
    while True:
        frames = Frames(source.driver, skip_bytes=size_bytes)
        try:
            stream = _stream(client, source.container, follow=follow)
            for whole in filter(None, map(frames.feed, stream)):
                outage.reset()
                size_bytes += len(whole)
                yield whole
            if not follow or _has_ended(client, source):
                break
            time.sleep(_POLL_S)
        except BackendError as error:
            if source.saved.exists():
                yield from following.read_file(source.saved, size_bytes)
                return
            if _is_removed(error, outage, follow=follow):
                break
    if rest := frames.finish():
        size_bytes += len(rest)
        yield rest
    # A stream may also end early, without an error, when its container is removed.
    yield from following.read_file(source.saved, size_bytes)


def read_ends(client: Any, source: LogSource) -> Iterator[bytes]:
    """Yield whole lines from the beginning and from the end of the log of one container.

    Raises:
        BackendError: The engine refused, or the container is gone.
    """
    frames, size_bytes = Frames(source.driver), 0
    for data in _stream(client, source.container, follow=False):
        whole = frames.feed(data)
        size_bytes += len(whole)
        yield whole
        if size_bytes > following.END_BYTES:
            break
    else:
        return
    frames = Frames(source.driver)
    tail = _stream(client, source.container, follow=False, tail=following.END_LINES)
    # The engine counts pieces of long lines as lines, so the first may be the rest of one.
    yield b"".join(map(frames.feed, tail)).partition(b"\n")[2]


def read_all(client: Any, sources: list[LogSource], *, follow: bool) -> Iterator[Piece]:
    """Yield the logs of several nodes as they arrive; an empty piece means that nothing is new."""

    def pieces(source: LogSource) -> Iterator[Piece]:
        return ((source.node, whole) for whole in read(client, source, follow=follow))

    if not follow:
        yield from chain.from_iterable(map(pieces, sources))
        return
    streams = Streams()
    try:
        for source in sources:
            streams.add(partial(pieces, source))
        while not streams.has_ended:
            yield streams.next()
    finally:
        streams.stop()


def _is_removed(error: BackendError, outage: OutageLimit, *, follow: bool) -> bool:
    """Whether somebody removes the container, which the job's status shows; else wait a moment.

    Raises:
        BackendError: Waiting does not help.
    """
    if follow and engine.status_code(error) in engine.GONE:
        return True
    if not (follow and isinstance(error, Unreachable)):
        raise error
    outage.pause(error)
    return False


def _has_ended(client: Any, source: LogSource) -> bool:
    with engine.translate_errors(f"inspecting node {source.node}"):
        state = client.inspect_container(source.container)["State"]
    return not (state["Running"] or state.get("Restarting"))


def _stream(
    client: Any, container: str, *, follow: bool, tail: int | str = "all"
) -> Iterator[bytes]:
    """Yield the engine's frames as they arrive.

    The SDK's own ``logs`` drops the header of each frame, which names its stream; ``attach`` splits
    frames, whose length shows where a line ends.
    """
    url = f"{client.base_url}/v{client.api_version}/containers/{container}/logs"
    query = {"stdout": 1, "stderr": 1, "follow": int(follow), "tail": tail}
    with engine.translate_errors("reading a log"):
        # No read timeout: a node may be silent for hours.
        response = client.get(url, params=query, stream=True, timeout=(60, None))
        with response:
            client._raise_for_status(response)
            yield from response.raw.stream(following.PIECE_BYTES, decode_content=True)
