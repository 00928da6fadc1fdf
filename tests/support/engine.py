"""A proxy for a container engine's socket that can cut connections as a restart does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path


class EngineProxy:
    """Forwards bytes between clients and an engine; ``host`` is the value for ``DOCKER_HOST``."""

    def __init__(self, path: Path, upstream: str) -> None:
        self.host = f"unix://{path}"
        self._path = path
        self._upstream = upstream.removeprefix("unix://")
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._held = b""
        self._reached = threading.Event()
        self.start()

    def start(self) -> None:
        """Accept connections."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Refuse new connections and close open ones."""
        self._path.unlink(missing_ok=True)
        listener, self._listener = self._listener, None
        if listener is not None:
            # close() does not wake a thread that waits in accept().
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._open)
        for one in connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def hold(self, text: bytes) -> threading.Event:
        """Block requests with this text from now on; return an event that the first one sets."""
        self._held = text
        return self._reached

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        upstream = socket.socket(socket.AF_UNIX)
        upstream.connect(self._upstream)
        pair = {client, upstream}
        with self._lock:
            self._open |= pair
        back = threading.Thread(target=_pump, args=(upstream, client), daemon=True)
        back.start()
        _pump(client, upstream, self._is_held)
        back.join()
        with self._lock:
            self._open -= pair
        for one in pair:
            one.close()

    def _is_held(self, data: bytes) -> bool:
        is_held = bool(self._held) and self._held in data
        if is_held:
            self._reached.set()
        return is_held


def _pump(
    source: socket.socket, target: socket.socket, is_held: Callable[[bytes], bool] = lambda _: False
) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            # A held client waits for its response until its connection is closed.
            if not is_held(data):
                target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
