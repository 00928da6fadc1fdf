"""The cache of inputs that the jobs of one machine share, with one copy of each object version.

A version is identified by the object's URI and metadata, so the data is not read to find it. A
cached file has its object's modification time. If a job writes to the file nevertheless, the time
changes and the object is fetched again. Root, who may write to every file, gets copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from typing import Iterator

from jobentry import objects
from jobentry.objects.base import Progress
from jobentry.system.trees import remove_below, set_modified

_READ_ONLY = 0o444
# The suffix of lock files; a process that fetches an object holds its lock.
_PART = ".part"
# 2001-09-09, for objects whose modification time is not known.
_UNKNOWN_TIME_NS = 10**18


class Cache:
    """Copies of objects below a folder; without a folder, every object is fetched."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    @classmethod
    def in_folder(cls, folder: str, limit_bytes: int) -> Cache:
        """Return the cache in ``folder``, or one that stores nothing if that cannot be used."""
        try:
            if folder:
                os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError:
            folder = ""
        return cls(folder, limit_bytes)

    def fetch(self, entry: objects.Entry, path: str, progress: Progress) -> None:
        """Create the file ``path`` with the bytes of the object.

        Raises:
            objects.ObjectError: The object cannot be fetched.
            OSError: The file cannot be created.
        """
        is_cached = self._folder and entry.tag and 0 <= entry.size_bytes <= self._limit_bytes // 2
        if not is_cached:
            objects.fetch(entry.uri, path, progress=progress)
            return
        cached = os.path.join(self._folder, _key(entry))
        while True:
            if not _is_valid(cached, entry):
                self._add(entry, cached, progress)
            try:
                _link(cached, path)
            except (FileNotFoundError, objects.ObjectMissing):
                # Another job has just removed the file to make room.
                continue
            return

    def _add(self, entry: objects.Entry, cached: str, progress: Progress) -> None:
        os.makedirs(os.path.dirname(cached), mode=0o700, exist_ok=True)
        with _locked(cached + _PART) as is_ours:
            if not is_ours or _is_valid(cached, entry):
                return
            objects.fetch(entry.uri, cached + _PART + "-new", progress=progress)
            _add_verified(cached + _PART + "-new", cached, entry)
        self._evict()

    def _evict(self) -> None:
        """Remove the least recently used files until the cache is within its limit."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._limit_bytes:
                return
            with contextlib.suppress(OSError):
                # Scripts may write to this folder, too.
                remove_below(self._folder, os.path.relpath(path, self._folder))
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
    """Return the cache key of this version; the signature of a URI is not part of it."""
    address = entry.uri.partition("?")[0]
    facts = "\n".join((address, entry.tag, str(entry.size_bytes), str(entry.modified_ns)))
    digest = hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(digest[:2], digest)


def _time_ns(entry: objects.Entry) -> int:
    return entry.modified_ns or _UNKNOWN_TIME_NS


def _is_valid(cached: str, entry: objects.Entry) -> bool:
    try:
        facts = os.stat(cached)
    except FileNotFoundError:
        return False
    return facts.st_size == entry.size_bytes and facts.st_mtime_ns == _time_ns(entry)


def _add_verified(fresh: str, cached: str, entry: objects.Entry) -> None:
    os.chmod(fresh, _READ_ONLY)
    os.utime(fresh, ns=(time.time_ns(), _time_ns(entry)))
    if not _is_valid(fresh, entry):
        os.unlink(fresh)
        raise objects.ObjectError(
            f"fetching {entry.uri}: it has changed since it was listed",
            "store each version under its own name",
        )
    os.replace(fresh, cached)


def _link(cached: str, path: str) -> None:
    # Set the access time for ``_evict``, as not every file system updates it on a read.
    facts = os.stat(cached)
    os.utime(cached, ns=(time.time_ns(), facts.st_mtime_ns))
    # Permission bits do not stop root, who would change this input of other nodes and jobs, too.
    if not os.access(cached, os.W_OK):
        try:
            os.link(cached, path)
            return
        except FileNotFoundError:
            raise
        except OSError:
            pass  # Another file system, or one without hard links.
    objects.fetch(objects.uri_of(cached), path)
    set_modified(path, facts.st_mtime_ns)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Yield whether we hold the lock; if not, its holder has just finished."""
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
