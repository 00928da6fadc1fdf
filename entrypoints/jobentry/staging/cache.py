"""What the jobs of one machine share of their inputs: each version of an object once.

A version is known by where it came from and what its server says of it, so nothing is read to
find it. A file of the cache has the time of its object; one that a job has written to all the same
(root may) has another, and is fetched anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from typing import Iterator

from jobentry import objects
from jobentry.objects.base import Progress

_READ_ONLY = 0o444
# A file whose name ends like this is on its way; who fetches it holds a lock on it.
_PART = ".part"
# 2001-09-09: for objects of which nobody says when they were written.
_SOME_TIME_NS = 10**18


class Cache:
    """Copies of objects below one folder; without a folder every object is simply fetched."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    @classmethod
    def of(cls, folder: str, limit_bytes: int) -> Cache:
        """Return the cache in ``folder``, or one that keeps nothing where that cannot be used."""
        try:
            if folder:
                os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError:
            folder = ""
        return cls(folder, limit_bytes)

    def fetch(self, entry: objects.Entry, path: str, progress: Progress) -> None:
        """Make ``path`` a file with the bytes of the object.

        Raises:
            objects.ObjectError: It cannot be fetched.
            OSError: The file cannot be made.
        """
        is_kept = self._folder and entry.tag and 0 <= entry.size_bytes <= self._limit_bytes // 2
        if not is_kept:
            objects.fetch(entry.uri, path, progress=progress)
            return
        kept = os.path.join(self._folder, _key(entry))
        while True:
            if not _is_good(kept, entry):
                self._add(entry, kept, progress)
            try:
                _link(kept, path)
            except FileNotFoundError:
                # Another job has just made room.
                continue
            return

    def _add(self, entry: objects.Entry, kept: str, progress: Progress) -> None:
        os.makedirs(os.path.dirname(kept), mode=0o700, exist_ok=True)
        with _locked(kept + _PART) as is_ours:
            if not is_ours or _is_good(kept, entry):
                return
            objects.fetch(entry.uri, kept + _PART + "-new", progress=progress)
            _seal(kept + _PART + "-new", kept, entry)
        self._make_room()

    def _make_room(self) -> None:
        """Remove what was not used for the longest time until the rest is small enough."""
        found = sorted(self._files())
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= self._limit_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def _files(self) -> Iterator[tuple[int, int, str]]:
        for parent, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(parent, name)
                with contextlib.suppress(OSError):
                    facts = os.stat(path)
                    if not name.endswith(_PART):
                        yield facts.st_atime_ns, facts.st_size, path


def _key(entry: objects.Entry) -> str:
    """Return the name of this version; what signs a URI is no part of what it names."""
    where = entry.uri.partition("?")[0]
    facts = "\n".join((where, entry.tag, str(entry.size_bytes), str(entry.modified_ns)))
    digest = hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(digest[:2], digest)


def _time_ns(entry: objects.Entry) -> int:
    return entry.modified_ns or _SOME_TIME_NS


def _is_good(kept: str, entry: objects.Entry) -> bool:
    try:
        facts = os.stat(kept)
    except FileNotFoundError:
        return False
    return facts.st_size == entry.size_bytes and facts.st_mtime_ns == _time_ns(entry)


def _seal(fresh: str, kept: str, entry: objects.Entry) -> None:
    os.chmod(fresh, _READ_ONLY)
    os.utime(fresh, ns=(_now_ns(), _time_ns(entry)))
    if not _is_good(fresh, entry):
        os.unlink(fresh)
        raise objects.ObjectError(
            f"fetch object: {entry.uri}: it is no longer as it was listed",
            "give every version of it a name of its own",
        )
    os.replace(fresh, kept)


def _now_ns() -> int:
    import time

    return time.time_ns()


def _link(kept: str, path: str) -> None:
    # When it was used last, for who makes room; reading it need not change that everywhere.
    facts = os.stat(kept)
    os.utime(kept, ns=(_now_ns(), facts.st_mtime_ns))
    try:
        os.link(kept, path)
    except FileNotFoundError:
        raise
    except OSError:
        # Another file system, or one without links.
        objects.fetch(objects.uri_of(kept), path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Yield whether we hold the lock; when not, who held it has just ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_ours = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        is_ours = _is_at(descriptor, path)
        yield is_ours
    finally:
        if is_ours:
            os.unlink(path)
        os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
