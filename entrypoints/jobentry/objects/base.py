"""Code shared by all kinds of objects: metadata, errors, URIs, new files and parallel work."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import BinaryIO, Callable, Iterator, NamedTuple, Sequence, TypeVar

Result = TypeVar("Result")

# The laptop half uses the same name for partial files, so both halves leave them out of lists.
TEMPORARY = ".cloudjob-tmp-"
CHUNK_BYTES = 1024 * 1024
# How long to wait for running tasks after another one has failed.
_LEAVE_S = 2.0


class ObjectError(Exception):
    """An object cannot be read or written: *doing what to which object: what happened*.

    Args:
        hint: What to try.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ObjectMissing(ObjectError):
    """The object does not exist."""


class ObjectDamaged(ObjectError):
    """The bytes are not those that were stored, or belong to two versions."""


class Entry(NamedTuple):
    """The metadata of one object, from a list or a request for it.

    Args:
        name: The object's key relative to the listed prefix; empty for the object itself.
        tag: Changes with the content, as far as the server knows.
        modified_ns: Nanoseconds since 1970; 0 if the server does not send it.
    """

    name: str
    uri: str
    size_bytes: int
    tag: str = ""
    modified_ns: int = 0


# Called with the number of bytes after each block that was transferred.
Progress = Callable[[int], None]


def no_progress(_moved_bytes: int) -> None:
    """Ignore the progress."""


def scheme_of(uri: str) -> str:
    """Return the part before ``://`` in lower case; empty if there is none."""
    return uri.partition("://")[0].lower() if "://" in uri else ""


def shown(uri: str) -> str:
    """Return a URI as a message may show it: without a signature, a user or a password."""
    scheme, separator, rest = uri.partition("://")
    if scheme.lower() not in ("http", "https"):
        return uri
    address, question, _ = rest.partition("?")
    host, slash, path = address.partition("/")
    host = host.rpartition("@")[2]
    return scheme + separator + host + slash + path.partition("#")[0] + ("?***" if question else "")


def reason_of(error: BaseException) -> str:
    """Return the text of a foreign error, as the end of a message."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).lower()


def check_digest(uri: str, actual: str, expected: str) -> None:
    """Raise ``ObjectDamaged`` if the digest of what was fetched is not the expected one."""
    if actual != expected:
        raise ObjectDamaged(
            f"fetching {uri}: its digest is {actual}, not {expected}",
            "it was damaged in transit or in the store, or is another version: store it again",
        )


@contextlib.contextmanager
def translated(doing: str, what: str) -> Iterator[None]:
    """Turn an ``OSError`` of the file system into an ``ObjectError``."""
    try:
        yield
    except OSError as error:
        kind = ObjectMissing if error.errno == errno.ENOENT else ObjectError
        hint = _HINTS.get(error.errno or 0, "")
        raise kind(f"{doing} {what}: {reason_of(error)}", hint) from error


_FULL = "free some space there, or use a node with a larger disk"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "is there a limit on the size of files (ulimit -f)?",
    errno.EACCES: "may the user of the job read and write there?",
    errno.EPERM: "may the user of the job read and write there?",
    errno.EROFS: "choose a path on a writable file system",
}


def opened(path: str) -> BinaryIO:
    """Open a file to read it, without waiting for a pipe that has taken its place meanwhile.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    # A file object of a folder cannot be made, and would leave its descriptor open.
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


@contextlib.contextmanager
def fresh_file(path: str) -> Iterator[str]:
    """Yield the path of a new file, which becomes ``path`` on success and is removed otherwise.

    The file is not synced to the disk: what was fetched can be fetched again.
    """
    folder = os.path.dirname(os.path.abspath(path))
    make_folders(folder)
    temporary = os.path.join(folder, TEMPORARY + os.urandom(8).hex())
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def make_folders(folder: str) -> list[str]:
    """Make a folder and its parents, and return the new ones.

    ``os.makedirs`` is recursive, and fails at a depth of a thousand.
    """
    missing, created = [], []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
            created.append(folder)
        except FileExistsError as error:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
    return created


def in_parallel(
    tasks: Sequence[Callable[[], Result]], threads: int, stop: threading.Event | None = None
) -> list[Result]:
    """Run the tasks in a few threads and return their results in order.

    The first failure is raised; tasks that have not started by then are not run.

    Args:
        stop: Set at the first failure, and when a signal ends the wait.
    """
    if len(tasks) <= 1:
        return [task() for task in tasks]
    # Imported late: it takes several milliseconds, and most nodes do without.
    from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

    stop = stop or threading.Event()
    errors: list[BaseException] = []

    def run(task: Callable[[], Result]) -> Result:
        try:
            return task()
        except BaseException as error:
            errors.append(error)
            stop.set()
            raise

    pool = ThreadPoolExecutor(min(threads, len(tasks)), "objects")
    futures: list[Future[Result]] = []
    try:
        futures += [pool.submit(run, task) for task in tasks]
        wait(futures, return_when=FIRST_EXCEPTION)
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
    except BaseException:
        stop.set()
        raise
    finally:
        for future in futures:
            future.cancel()
        wait(futures, _LEAVE_S)
        pool.shutdown(wait=False)
