"""The output of this node's ranks: a pipe for each, which is copied to the rank's log.

A rank must not have its log open. Whoever opens ``/dev/stdout`` or ``/dev/stderr`` by its path, as
``echo warning >/dev/stderr`` does, opens the file behind it anew, truncates it, and writes at its
beginning; a pipe cannot be truncated. The entry reads the pipes, not the wrappers, so that what
was written last also survives a wrapper that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import stat
import threading
import time

from jobentry.contract import messages
from jobentry.log import Relay, log_message

_READ_BYTES = 1 << 18
# Output is collected for a moment, as a rank may write each line, or each half, by itself.
_COLLECT_S = 0.002
# Seconds until the next attempt after an error, such as a lack of memory.
_RETRY_S = 1.0
# At most this much is read from one pipe before the others get their turn.
_TURN_BYTES = 1 << 22
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ; Python has the name since 3.10
_NEW_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_OLD_FIFO = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class RankOutput:
    """Copies the output of ranks from their pipes to their logs, in a thread."""

    def __init__(self, log_dir: str, relay: Relay) -> None:
        self._log_dir = log_dir
        self._relay = relay
        self._selector = selectors.DefaultSelector()
        self._pipes: list[_Pipe] = []
        self._lock = threading.Lock()
        self._wake = os.pipe()
        os.set_blocking(self._wake[0], False)
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        self._has_ended = False
        self._thread = threading.Thread(target=self._follow, name="rank output", daemon=True)
        self._thread.start()

    def take(self, rank: int, path: str) -> None:
        """Copy what is written to the FIFO ``path`` to the log of ``rank``; ignore anything else.

        A rank that starts when the node has finished is about to be killed.

        Raises:
            OSError: The FIFO or the log cannot be opened.
        """
        if self._has_ended or not _is_fifo(path):
            return
        source = os.open(path, _OLD_FIFO)
        try:
            log = os.open(os.path.join(self._log_dir, "rank-%d.log" % rank), _NEW_LOG, 0o600)
        except OSError:
            os.close(source)
            raise
        with contextlib.suppress(OSError):
            # So that a rank seldom waits for us. All pipes of a user may have 64 MiB together.
            fcntl.fcntl(source, _SET_PIPE_SIZE, _READ_BYTES)
        pipe = _Pipe(rank, source, log, self._relay)
        with self._lock:
            self._pipes.append(pipe)
            self._selector.register(source, selectors.EVENT_READ, pipe)
        os.write(self._wake[1], b"\0")

    def settle(self, rank: int) -> None:
        """Return when everything that ``rank`` has written so far is in its log."""
        with self._lock:
            for pipe in self._pipes:
                if pipe.rank == rank:
                    pipe.copy()

    def finish(self) -> None:
        """Copy what is left and stop."""
        self._has_ended = True
        os.write(self._wake[1], b"\0")
        self._thread.join()
        for pipe in self._pipes:
            pipe.copy()
            pipe.close()
        self._selector.close()
        for end in self._wake:
            os.close(end)

    def _follow(self) -> None:
        while not self._has_ended:
            try:
                self._copy_what_is_ready()
            except Exception as error:  # noqa: BLE001 (without this thread, ranks wait for ever)
                log_message(messages.retry(f"copying the output of the ranks: {error!r}"))
                time.sleep(_RETRY_S)

    def _copy_what_is_ready(self) -> None:
        self._selector.select()
        time.sleep(_COLLECT_S)
        with self._lock:
            for key, _ in self._selector.select(0):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake[0], 4096)
                elif not key.data.copy():
                    self._forget(key.data)

    def _forget(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.source)
        self._pipes.remove(pipe)
        pipe.close()


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except OSError:
        return False


class _Pipe:
    """The pipe of one rank, and its log."""

    def __init__(self, rank: int, source: int, log: int, relay: Relay) -> None:
        self.rank = rank
        self.source = source
        self._log = log
        self._relay = relay
        self._is_full = False

    def copy(self) -> bool:
        """Copy what is there; return False at the end: no process has it open for writing.

        Before the wrapper has opened it, the end means nothing, and no selector reports it.
        """
        taken = 0
        while taken < _TURN_BYTES and not (self._is_full and self._relay.is_behind(self.rank)):
            try:
                data = os.read(self.source, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            taken += len(data)
            self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and not self._is_full:
                rest = rest[os.write(self._log, rest) :]
        except OSError:
            # A full disk must not end the rank, nor lose what it says about that.
            self._is_full = True
        if rest:
            self._relay.pass_on(self.rank, bytes(rest))

    def close(self) -> None:
        """Close both ends."""
        os.close(self.source)
        os.close(self._log)
