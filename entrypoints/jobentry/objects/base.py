"""What every kind of object has in common: its facts, its faults, and how a URI is shown."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence, TypeVar

Result = TypeVar("Result")

# The same name that the store gives its half-written files, so that its list passes over ours.
TEMPORARY = ".cloudjob-tmp-"
CHUNK_BYTES = 1024 * 1024


class ObjectError(Exception):
    """An object cannot be read or written: *doing what: to which thing: what came back*.

    Args:
        hint: What to try.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ObjectMissing(ObjectError):
    """There is no such object."""


class ObjectDamaged(ObjectError):
    """What came is not what was stored, however often it was fetched."""


class Entry(NamedTuple):
    """What a list, or a look at one object, says of it.

    Args:
        name: The object's key relative to what was listed; empty for that itself.
        tag: What changes when its content does, as far as its server says.
        modified_ns: When it was last written, nanoseconds since 1970; 0 where nobody says.
    """

    name: str
    uri: str
    size_bytes: int
    tag: str = ""
    modified_ns: int = 0


# Hears of every run of bytes that has been moved.
Tell = Callable[[int], None]


def quiet(_moved_bytes: int) -> None:
    """Tell nobody."""


def scheme_of(uri: str) -> str:
    """Return what stands before ``://``, in small letters; empty when nothing does."""
    return uri.partition("://")[0].lower() if "://" in uri else ""


def shown(uri: str) -> str:
    """Return a URI as a message may show it: what signs it, or logs in with it, is a secret."""
    scheme, separator, rest = uri.partition("://")
    if scheme.lower() not in ("http", "https"):
        return uri
    place, question, _ = rest.partition("?")
    host, slash, path = place.partition("/")
    host = host.rpartition("@")[2]
    return scheme + separator + host + slash + path.partition("#")[0] + ("?***" if question else "")


def came_back(error: BaseException) -> str:
    """Return what an operating system or a library says, as the end of a message."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).lower()


@contextlib.contextmanager
def translated(doing: str, what: str) -> Iterator[None]:
    """Turn what the file system says into an ``ObjectError``."""
    try:
        yield
    except OSError as error:
        kind = ObjectMissing if error.errno == errno.ENOENT else ObjectError
        hint = _HINTS.get(error.errno or 0, "")
        raise kind(f"{doing}: {what}: {came_back(error)}", hint) from error


_FULL = "free some space there, or take a node with a larger disk"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "is there a limit on the size of files (ulimit -f)?",
    errno.EACCES: "may the user of the job read and write there?",
    errno.EPERM: "may the user of the job read and write there?",
    errno.EROFS: "choose a place on a file system that is not read-only",
}


@contextlib.contextmanager
def fresh_file(path: str, size_bytes: int = 0) -> Iterator[int]:
    """Yield the descriptor of a file that becomes ``path`` when all goes well, or else vanishes.

    For what can be fetched again: unlike an object that is put, it is not forced to the disk.

    Args:
        size_bytes: Room that is taken at once, so that a full disk is noticed before hours are
            spent; 0 where nobody knows the size.
    """
    temporary = os.path.join(os.path.dirname(path), TEMPORARY + os.urandom(8).hex())
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, size_bytes)
            yield descriptor
            # As open() would have made it; only now may others read it.
            os.fchmod(descriptor, 0o666 & ~_umask())
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def make_folders(path: str) -> None:
    """Make the folder of a file, and the ones above it; ``os.makedirs`` stops at a thousand."""
    folder = os.path.dirname(os.path.abspath(path))
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError as error:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def _reserve(descriptor: int, size_bytes: int) -> None:
    if not size_bytes:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        # Not every file system can; one that is full, or has a limit, says so here.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
    os.ftruncate(descriptor, size_bytes)


def _umask() -> int:
    # The process-wide call changes it for a moment, and there are threads.
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class Stop:
    """Says to all who work on one thing that it is of no use any more."""

    def __init__(self) -> None:
        self.is_set = False


def in_parallel(
    tasks: Sequence[Callable[[], Result]], threads: int, stop: Stop, leave_s: float = 0.0
) -> Iterator[Result]:
    """Do the tasks in a few threads and yield what they return, in their order.

    The first that fails sets ``stop``, and so does whoever takes no more results. The threads never
    hold up the end of the process.

    Args:
        leave_s: How long those that have begun are waited for when ``stop`` is set.
    """
    if len(tasks) <= 1 or threads <= 1:
        yield from (task() for task in tasks)
        return
    crew = _Crew(tasks, stop)
    workers = [
        threading.Thread(target=crew.work, name="objects", daemon=True)
        for _ in range(min(threads, len(tasks)))
    ]
    for worker in workers:
        worker.start()
    try:
        for index in range(len(tasks)):
            yield crew.result(index)
    finally:
        stop.is_set = True
        end = time.monotonic() + leave_s
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))


class _Crew:
    def __init__(self, tasks: Sequence[Callable[[], object]], stop: Stop) -> None:
        self._tasks = tasks
        self._stop = stop
        self._next = 0
        self._done: dict[int, object] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        while not self._stop.is_set:
            with self._changed:
                index, self._next = self._next, self._next + 1
            if index >= len(self._tasks):
                return
            try:
                result = self._tasks[index]()
            except BaseException as error:  # noqa: BLE001 (whoever waits for the result is told)
                with self._changed:
                    self._error = self._error or error
                    self._stop.is_set = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._done[index] = result
                self._changed.notify_all()

    def result(self, index: int) -> Any:
        with self._changed:
            while index not in self._done and self._error is None:
                # A time limit, so that a signal is heard on every Python.
                self._changed.wait(1.0)
            if self._error is not None:
                raise self._error
            return self._done.pop(index)
