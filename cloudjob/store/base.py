"""The protocol of object stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

# Called with the number of bytes of each step.
OnBytes = Callable[[int], None]

# Seconds to retry a request while the store cannot be reached, unless the user interrupts it.
RETRY_S = 60.0

# Others may write to a store, so every read of it has a limit of size and of time.
GET_LIMIT_BYTES = 256 * 1024 * 1024
# What cloudjob itself writes for one job and keeps small: descriptions and records.
SMALL_LIMIT_BYTES = 4 * 1024 * 1024


def ignore_bytes(_moved_bytes: int) -> None:
    """Do nothing with the number of bytes."""


class ObjectStore(Protocol):
    """A flat namespace of objects, each a sequence of bytes under a key such as ``job/code.tar``.

    1. An object appears only once it is complete, even if the writer is killed. A second ``put``
       with the same key replaces the object in one step.
    2. When ``put`` or ``put_bytes`` returns, the object survives a crash of this machine.
    3. ``get_bytes``, ``get_range``, ``get_each`` and ``fetch`` return exactly the bytes of the
       latest ``put``, as soon as it has returned.
    4. ``uri(key)`` does no I/O, and the node half finds the object by this URI.
    5. A key consists of segments joined by ``/``; none is empty, ``.`` or ``..`` or contains NUL.
       Any other key is refused before the store is accessed, so that no key leaves the root.
    6. Every failure raises a ``StoreError``: *doing what, to which key in which store: what came
       back*. A missing object raises ``ObjectMissing``, except in ``exists`` and ``delete``.
       Reading anything that is not a plain object, such as a pipe, raises ``UnreadableObject``.
    7. Any number of threads may use a store at the same time.

    ``on_progress`` is called, by one thread at a time, with the number of bytes transferred since
    the last call; the number is negative if bytes have to be transferred again.
    """

    def put(self, path: Path, key: str, *, on_progress: OnBytes = ignore_bytes) -> str:
        """Store the file at ``path`` under ``key`` and return the object's URI."""

    def put_bytes(self, data: bytes, key: str) -> str:
        """Store ``data`` under ``key`` and return the object's URI."""

    def get_bytes(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """Return the object's bytes.

        Raises:
            UnreadableObject: It has more than ``limit_bytes``.
        """

    def get_range(self, key: str, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of the object from ``offset`` on; fewer at the object's end."""

    def get_each(
        self, keys: Sequence[str], *, limit_bytes: int = GET_LIMIT_BYTES
    ) -> Iterator[tuple[str, bytes]]:
        """Yield each of many small objects with its key, in any order.

        Raises:
            UnreadableObject: One has more than ``limit_bytes``.
        """

    def fetch(self, key: str, path: Path, *, on_progress: OnBytes = ignore_bytes) -> None:
        """Write the object to the file ``path``, which appears only once it is complete."""

    def copy(self, key: str, target: str) -> None:
        """Copy the object ``key`` to ``target`` within the store."""

    def list(self, prefix: str = "", *, with_unfinished: bool = False) -> Iterator[str]:
        """Yield the keys that start with the string ``prefix``, sorted by their bytes.

        Args:
            with_unfinished: Also yield what only ``delete`` accepts: files of unfinished writes (a
                bucket has some where a platform uploads the folder that a node writes), and links
                and pipes in a folder.
        """

    def exists(self, key: str) -> bool:
        """Return whether there is an object under ``key``."""

    def delete(self, key: str) -> None:
        """Delete the object under ``key``, or the unfinished write, if there is one."""

    def uri(self, key: str) -> str:
        """Return the URI of an object under ``key``, whether or not it exists."""

    def access(self) -> dict[str, str]:
        """Return the variables, including secrets, with which a node accesses this store."""

    def abort(self) -> None:
        """Abort the requests of all threads; each raises a ``StoreError``."""

    def remove_unfinished(self, older_than_s: float) -> int:
        """Remove unfinished writes older than ``older_than_s`` and return how many were removed."""

    @property
    def clock_ahead_s(self) -> float:
        """Seconds by which this machine's clock is ahead of the store's, from its last response."""


@runtime_checkable
class Signer(Protocol):
    """A store that can grant access to single objects for a limited time."""

    def sign(self, method: str, key: str, limit_s: int) -> str:
        """Return a URL that lets anyone ``method`` the object for ``limit_s`` seconds."""


@runtime_checkable
class Expiring(Protocol):
    """A store whose access keys may be temporary."""

    def keys_end_at(self) -> float:
        """Return when its access keys expire, in seconds since 1970; 0 for never or unknown."""
