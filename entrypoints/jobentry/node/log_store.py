"""Store the log of this node in the job's store while the job runs.

A platform may delete a log with its pod or container, or keep only a part of it. A thread stores
chunks as they fill, and at intervals the one that is filling. Memory and objects are bounded, and
nothing here changes how the job ends: a store that fails only causes one warning.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from jobentry.contract import stored_log
from jobentry.contract.stored_log import Chunk
from jobentry.log import copy_log, log_message

# Compressed bytes of a chunk, and how many chunks may wait for a slow or silent store.
CHUNK_BYTES = 1 << 20
MAX_WAITING_CHUNKS = 16
# The maximum number of objects of one log. Beyond it, the middle of the log is deleted, a gigabyte
# of compressed text away from both ends.
MAX_CHUNKS = 2000
# The interval between two stores of the growing chunk: a tenth of the job's age, within these
# limits.
_MIN_PERIOD_S, _MAX_PERIOD_S = 5.0, 120.0


class LogStore:
    """The stored log of this node.

    Args:
        folder: The URI of the folder of the exit record.
    """

    def __init__(
        self,
        folder: str,
        node: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        period_s: float | None = None,
    ) -> None:
        self._folder = folder
        self._chunk_bytes, self._max_chunks, self._period_s = chunk_bytes, max_chunks, period_s
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()
        # Complete chunks that are not stored yet.
        self._waiting: deque[tuple[Chunk, bytes]] = deque()
        self._chunk = Chunk(node, int(time.time() * 1000), 0)
        self._compressor = stored_log.compressor()
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._is_new = self._has_failed = self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-store", daemon=True)

    def start(self) -> None:
        """Store what is logged from now on; if no thread can be started, store nothing."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self._thread.start()
            copy_log(self.add)

    def add(self, data: bytes) -> None:
        """Queue a piece of the log to be stored."""
        with self._lock:
            self._grow(self._compressor.compress(data))
            self._is_new = True
            if self._size_bytes < self._chunk_bytes:
                return
            self._grow(self._compressor.flush())
            self._waiting.append((self._chunk, b"".join(self._parts)))
            if len(self._waiting) > MAX_WAITING_CHUNKS:
                # Drop the oldest one, as the end of a log is worth more.
                self._waiting.popleft()
            self._chunk = self._chunk._replace(number=self._chunk.number + 1)
            self._compressor = stored_log.compressor()
            self._parts, self._size_bytes, self._is_new = [], 0, False
        self._wake.set()

    def finish(self) -> None:
        """Begin to store the rest; ``join`` waits for it."""
        copy_log(None)
        self._is_over = True
        self._wake.set()

    def join(self, limit_s: float) -> None:
        """Wait until everything is stored; give up if the store does not answer."""
        if self._thread.ident is None:
            return
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._warn("the store does not answer in time")

    def _grow(self, data: bytes) -> None:
        if data:
            self._parts.append(data)
            self._size_bytes += len(data)

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            is_last = self._is_over
            try:
                self._store_all()
            except Exception as error:  # noqa: BLE001 (the job goes on without its stored log)
                self._warn(str(error) or type(error).__name__)

    def _pause_s(self) -> float:
        if self._period_s is not None:
            return self._period_s
        age_s = time.monotonic() - self._begun_s
        return min(_MAX_PERIOD_S, max(_MIN_PERIOD_S, age_s / 10))

    def _store_all(self) -> None:
        from jobentry import objects

        while True:
            with self._lock:
                is_growing = not self._waiting
                chunk, data = self._open() if is_growing else self._waiting[0]
            if not data:
                return
            try:
                objects.write(data, f"{self._folder}/{chunk.name}")
            except BaseException:
                self._is_new = True
                raise
            with self._lock:
                if not is_growing and self._waiting[0][0] == chunk:
                    self._waiting.popleft()
            if chunk.number >= self._max_chunks:
                old = chunk._replace(number=chunk.number - self._max_chunks // 2)
                objects.delete(f"{self._folder}/{old.name}")

    def _open(self) -> tuple[Chunk, bytes]:
        """Return the growing chunk as it is now; empty if it is stored."""
        if not self._is_new:
            return self._chunk, b""
        import zlib

        self._grow(self._compressor.flush(zlib.Z_SYNC_FLUSH))
        self._parts = [b"".join(self._parts)]
        self._is_new = False
        return self._chunk, self._parts[0]

    def _warn(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            log_message(f"storing the log: {why}")
