"""The log of a container: from the engine's frames to whole lines, and kept when it is gone."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.backends.docker import engine
from cloudjob.backends.docker.request import LOG_DRIVER
from cloudjob.errors import BackendError, Unreachable
from cloudjob.waits import Patience

_HEADER = struct.Struct(">BxxxL")
# The engine cuts lines into pieces of this size.
_CUT_BYTES = 16384
_PIECE_BYTES = 1 << 20
_POLL_S = 0.1
# Pieces of all nodes that wait to be shown: a reader that is slow must not fill the memory.
_WAITING = 64


class Lines:
    """Makes whole lines of the frames of one container, its two streams apart.

    Args:
        driver: The log driver. Docker 20.10's ``local`` loses the newline of a line that was cut
            (tried); a piece that is shorter than a cut is then the end of its line.
    """

    def __init__(self, driver: str) -> None:
        self._mends_newlines = driver == LOG_DRIVER
        self._buffer = bytearray()
        self._parts: dict[int, list[bytes]] = {}

    def feed(self, data: bytes) -> bytes:
        """Take in what the engine sent, and return the lines that are whole now."""
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
        return b"".join(done)

    def finish(self) -> bytes:
        """Return what is left when the stream has ended, with the newline that it lacks."""
        rest = [b"".join(parts) + b"\n" for _, parts in sorted(self._parts.items()) if parts]
        self._parts.clear()
        return b"".join(rest)

    def _take(self, stream: int, data: bytes, done: list[bytes]) -> None:
        parts = self._parts.setdefault(stream, [])
        parts.append(data)
        if data.endswith(b"\n"):
            done += parts
        elif self._mends_newlines and len(data) < _CUT_BYTES:
            done += [*parts, b"\n"]
        else:
            return
        self._parts[stream] = []


class Source(NamedTuple):
    """Where the log of a node is.

    Args:
        container: The id of its container.
        kept: The file that has the log when the container is gone.
    """

    node: int
    container: str
    driver: str
    kept: Path


def read(client: Any, source: Source, *, follow: bool) -> Iterator[bytes]:
    """Yield the log of one container, whole lines, from the beginning.

    Raises:
        BackendError: The engine refused, or the container is gone.
    """
    lines = Lines(source.driver)
    for data in _stream(client, source.container, follow=follow):
        whole = lines.feed(data)
        if whole:
            yield whole
    rest = lines.finish()
    if rest:
        yield rest


def read_kept(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield a log that was kept, from a byte on, in pieces of whole lines."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(offset)
        while piece := file.read(_PIECE_BYTES):
            yield piece if piece.endswith(b"\n") else piece + file.readline()


def read_all(client: Any, sources: list[Source], *, follow: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the logs of several nodes as they come; an empty piece means that nothing is new."""
    if not follow:
        for source in sources:
            for piece in _read_anywhere(client, source, follow=False):
                yield source.node, piece
        return
    follower = _Follower(client, sources)
    try:
        yield from follower.pieces()
    finally:
        follower.stop()


def _read_anywhere(client: Any, source: Source, *, follow: bool) -> Iterator[bytes]:
    """Yield a log from the engine, and what is missing of it from the file that was kept.

    Another cloudjob may keep the log and remove the container while we read: what it has kept is
    made of the same frames, so it goes on at the same byte.
    """
    size_bytes = 0
    try:
        for whole in _followed(client, source) if follow else read(client, source, follow=False):
            size_bytes += len(whole)
            yield whole
    except BackendError:
        if not source.kept.exists():
            raise
    if source.kept.exists():
        yield from read_kept(source.kept, size_bytes)


def _followed(client: Any, source: Source) -> Iterator[bytes]:
    """Yield a log as it grows until its container has ended.

    An engine that is restarted breaks the stream, or ends it as if the log were over, while the
    container runs on (live-restore). The next stream begins with the first frame again.
    """
    size_bytes = 0
    patience = Patience()
    while True:
        lines = Lines(source.driver)
        passed = 0
        try:
            for data in _stream(client, source.container, follow=True):
                patience.renew()
                whole = lines.feed(data)
                new = whole[max(0, size_bytes - passed) :]
                passed += len(whole)
                size_bytes += len(new)
                if new:
                    yield new
            if _has_ended(client, source):
                rest = lines.finish()
                if rest:
                    yield rest
                return
            time.sleep(_POLL_S)
        except Unreachable as error:
            if source.kept.exists():
                return
            patience.bear(error)


def _has_ended(client: Any, source: Source) -> bool:
    with engine.translated(f"inspecting node {source.node}"):
        state = client.inspect_container(source.container)["State"]
    return not (state["Running"] or state.get("Restarting"))


def _stream(client: Any, container: str, *, follow: bool) -> Iterator[bytes]:
    """Yield the engine's frames as they come over the wire.

    The SDK's own ``logs`` drops the header of each frame, and with it which stream it is of.
    """
    url = f"{client.base_url}/v{client.api_version}/containers/{container}/logs"
    asked = {"stdout": 1, "stderr": 1, "follow": int(follow)}
    with engine.translated("reading a log"):
        # No limit on the time: a node may be silent for hours.
        response = client.get(url, params=asked, stream=True, timeout=(60, None))
        with response:
            client._raise_for_status(response)
            yield from response.raw.stream(_PIECE_BYTES, decode_content=True)


class _Follower:
    """One thread a node, and their pieces in the order they came."""

    def __init__(self, client: Any, sources: list[Source]) -> None:
        self._queue: queue.Queue[Callable[[], tuple[int, bytes]]] = queue.Queue(_WAITING)
        self._is_stopped = threading.Event()
        self._running = len(sources)
        for source in sources:
            threading.Thread(
                target=self._follow, args=(client, source), name="log", daemon=True
            ).start()

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield until every log has ended."""
        while self._running:
            try:
                node, piece = self._queue.get(timeout=_POLL_S)()
            except queue.Empty:
                yield -1, b""
                continue
            if node < 0:
                self._running -= 1
            else:
                yield node, piece

    def stop(self) -> None:
        """Let the threads end."""
        self._is_stopped.set()

    def _follow(self, client: Any, source: Source) -> None:
        try:
            for piece in _read_anywhere(client, source, follow=True):
                if not self._put(_given((source.node, piece))):
                    return
            self._put(_given((-1, b"")))
        except BackendError as error:
            self._put(_raised(error))

    def _put(self, item: Callable[[], tuple[int, bytes]]) -> bool:
        while not self._is_stopped.is_set():
            try:
                self._queue.put(item, timeout=1)
            except queue.Full:
                continue
            return True
        return False


def _given(item: tuple[int, bytes]) -> Callable[[], tuple[int, bytes]]:
    return lambda: item


def _raised(error: BackendError) -> Callable[[], tuple[int, bytes]]:
    def again() -> tuple[int, bytes]:
        raise error

    return again
