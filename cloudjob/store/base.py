"""What every store promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

Tell = Callable[[int], None]

# For how long a request is tried while the store cannot be reached, unless somebody cancels it.
PATIENCE_S = 60.0


def quiet(_moved_bytes: int) -> None:
    """Tell nobody."""


class ObjectStore(Protocol):
    """A flat space of objects, each a run of bytes under a key such as ``job/code.tar``.

    1. An object is whole or it is not there: no reader ever sees a part of one, even when the
       writer is killed. A second ``put`` under a key replaces the object in the same way.
    2. When ``put`` or ``put_bytes`` returns, the object outlives a crash of this machine.
    3. What ``get_bytes``, ``get_range``, ``get_each`` and ``fetch`` give is what was put, byte for
       byte, at once.
    4. ``uri(key)`` is pure, and the container half reaches the same object under it.
    5. A key is segments joined by ``/``, none of them empty, ``.`` or ``..``, without NUL.
       Anything else is refused before the store is touched, so no key leaves the root.
    6. Every failure is a ``StoreError``: *doing what, to which key in which store: what came
       back*; an object that is not there is one too, except for ``exists`` and ``delete``.
    7. Any number of threads may use a store at the same time.

    ``tell`` hears how many more bytes have been moved, from one thread at a time; a number below
    zero takes back what has to be moved again.
    """

    def put(self, path: Path, key: str, *, tell: Tell = quiet) -> str:
        """Store the file at ``path`` under ``key`` and return the object's URI."""
        ...

    def put_bytes(self, data: bytes, key: str) -> str:
        """Store ``data`` under ``key`` and return the object's URI."""
        ...

    def get_bytes(self, key: str) -> bytes:
        """Return the object's bytes."""
        ...

    def get_range(self, key: str, offset: int, count: int) -> bytes:
        """Return ``count`` of the object's bytes from ``offset`` on, fewer where it ends before."""
        ...

    def get_each(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of many small objects with its key, in whatever order they come."""
        ...

    def fetch(self, key: str, path: Path, *, tell: Tell = quiet) -> None:
        """Write the object to the file ``path``, whole or not at all."""
        ...

    def copy(self, key: str, target: str) -> None:
        """Make the object ``target`` the same as ``key``, without its bytes coming here."""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with ``prefix``, a string, in the order of their bytes."""
        ...

    def exists(self, key: str) -> bool:
        """Say whether there is an object under ``key``."""
        ...

    def delete(self, key: str) -> None:
        """Leave no object under ``key``, whether or not there was one."""
        ...

    def uri(self, key: str) -> str:
        """Return the URI that an object under ``key`` has or would have."""
        ...

    def access(self) -> dict[str, str]:
        """Return the variables, secrets among them, with which a node reaches the same objects."""
        ...

    def abort(self) -> None:
        """Break off the requests of all threads: each raises a ``StoreError``."""
        ...

    def sweep(self, older_than_s: float) -> int:
        """Remove what writers that were killed so long ago have left, and return its number."""
        ...

    @property
    def clock_ahead_s(self) -> float:
        """How far this machine's clock is ahead of the store's, by its last answer."""
        ...


@runtime_checkable
class Signer(Protocol):
    """A store that lets others in for a time, to single objects."""

    def sign(self, method: str, key: str, limit_s: int) -> str:
        """Return the address at which anybody may ``method`` the object for so long."""
        ...
