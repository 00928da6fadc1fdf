"""Objects as files of this machine, or of one that it shares: ``file://``."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import IO, Iterator

from jobentry.objects.base import (
    CHUNK_BYTES,
    TEMPORARY,
    Entry,
    ObjectError,
    ObjectMissing,
    Tell,
    fresh_file,
    make_folders,
    quiet,
    translated,
)

_FILE = "file://"


def path_of(uri: str) -> str:
    """Return the absolute path that a ``file://`` URI names; its bytes survive, whatever they are.

    Raises:
        ObjectError: It is no such URI.
    """
    from urllib.parse import unquote_to_bytes  # start-up time counts, and not every entry needs it

    path = uri[len(_FILE) :]
    if path.startswith("localhost/"):
        path = path[len("localhost") :]
    name = os.fsdecode(unquote_to_bytes(os.fsencode(path)))
    if not uri.startswith(_FILE) or not path.startswith("/") or "\0" in name:
        raise ObjectError(f"find object: {uri!r}: not a URI of the form file:///its/path")
    return name


def uri_of(path: str) -> str:
    """Return the URI of an absolute path."""
    from urllib.parse import quote_from_bytes

    return _FILE + quote_from_bytes(os.fsencode(path))


def check(uri: str) -> None:
    """Raise an ``ObjectError`` for what cannot be a URI."""
    path_of(uri)


def fetch(uri: str, path: str, sha256: str = "", tell: Tell = quiet) -> None:
    """Write the object to the file ``path``, whole or not at all."""
    with contextlib.ExitStack() as opened:
        with translated("fetch object", uri):
            source = opened.enter_context(open(path_of(uri), "rb"))
        with translated("write file", path):
            make_folders(path)
            target = opened.enter_context(fresh_file(path))
            _clone(source.fileno(), target, tell)
            found = _digest(target) if sha256 else ""
            if found != sha256:
                raise ObjectError(
                    f"fetch object: {uri}: its digest is {found}, not {sha256}",
                    "it is another version, or was damaged: store it anew",
                )


def read(uri: str) -> bytes:
    """Return the object's bytes."""
    with translated("read object", uri), open(path_of(uri), "rb") as file:
        return file.read()


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Return ``length`` of the object's bytes, fewer where it ends before."""
    with translated("read object", uri), open(path_of(uri), "rb") as file:
        file.seek(offset)
        return file.read(length)


def put(path: str, uri: str, tell: Tell = quiet) -> None:
    """Store the file at ``path`` as the object ``uri``; when this returns it outlives a crash."""
    with contextlib.ExitStack() as opened:
        with translated("read file", path):
            source = opened.enter_context(open(path, "rb"))
        with translated("put object", uri), _replacing(path_of(uri)) as file:
            _clone(source.fileno(), file.fileno(), tell)


def write(data: bytes, uri: str) -> None:
    """Store ``data`` as the object ``uri``; when this returns it outlives a crash."""
    with translated("write object", uri), _replacing(path_of(uri)) as file:
        file.write(data)


def copy(uri: str, target: str) -> None:
    """Make the object ``target`` the same as ``uri``."""
    put(path_of(uri), target)


def delete(uri: str) -> None:
    """Leave no object ``uri``, whether or not there was one, nor a folder that it leaves empty."""
    path = path_of(uri)
    with translated("delete object", uri), contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def look(uri: str) -> Entry:
    """Return the facts of one object.

    Raises:
        ObjectMissing: It is not there, or is a folder.
    """
    with translated("find object", uri):
        found = os.stat(path_of(uri))
    if not stat.S_ISREG(found.st_mode):
        raise ObjectMissing(f"find object: {uri}: no file")
    return _entry("", path_of(uri), found)


def listed(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``; links are followed."""
    path = path_of(prefix)
    folder = path[: path.rfind("/") + 1]
    with translated("list objects", prefix):
        if not os.path.isdir(folder):
            return
        for file in _files_below(folder):
            if file.startswith(path):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(file)
                    if stat.S_ISREG(found.st_mode):
                        yield _entry(file[len(path) :], file, found)


def _files_below(top: str) -> Iterator[str]:
    """Yield the files below a folder; without recursion, which ends at a thousand folders."""
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while waiting:
        path, above = waiting.pop()
        if not path.endswith("/"):
            yield path
            continue
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino)
        if identity in above:
            raise ObjectError(f"list objects: {path}: a link leads back to a folder above it")
        with os.scandir(path) as children:
            names = sorted(child.name + "/" * child.is_dir() for child in children)
        inside = above | {identity}
        waiting += [
            (path + name, inside) for name in reversed(names) if not name.startswith(TEMPORARY)
        ]


def _entry(name: str, path: str, found: os.stat_result) -> Entry:
    tag = "%d-%d" % (found.st_dev, found.st_ino)
    return Entry(name, uri_of(path), found.st_size, tag, found.st_mtime_ns)


@contextlib.contextmanager
def _replacing(target: str) -> Iterator[IO[bytes]]:
    """Open a file that becomes ``target`` when all of it is on the disk, or else vanishes."""
    folder = os.path.dirname(os.path.abspath(target))
    _make_folders(folder)
    temporary = os.path.join(folder, TEMPORARY + os.urandom(8).hex())
    try:
        with open(temporary, "xb", opener=_private) as file:
            if _is_open(folder):
                os.fchmod(file.fileno(), 0o666)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make_folders(folder: str) -> None:
    """Make a folder and the ones above it, each of them on the disk when this returns."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for made in reversed(missing):
        above = os.path.dirname(made)
        with contextlib.suppress(FileExistsError):
            os.mkdir(made, 0o700)
            if _is_open(above):
                os.chmod(made, 0o777)
        _sync_folder(above)


def _is_open(folder: str) -> bool:
    """Whether a folder is open to all, as one that another user of the machine shares with us.

    What we leave there is as open, or who shares it could neither read nor remove it. In a folder
    like /tmp (the sticky bit) everybody keeps to his own.
    """
    mode = os.stat(folder).st_mode
    return bool(mode & 0o002) and not mode & 0o1000


def _sync_folder(folder: str) -> None:
    """Make the names in a folder outlive a crash: without this a rename may be forgotten."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clone(source: int, target: int, tell: Tell) -> None:
    """Copy a file, without moving its bytes where the file system can share them."""
    clone = getattr(os, "copy_file_range", None)
    try:
        while clone is not None:
            copied = clone(source, target, 64 * CHUNK_BYTES)
            if not copied:
                break
            tell(copied)
    except OSError:
        # Not between these two file systems, or not on this kernel: what is there goes on by hand.
        pass
    # Some files (in /proc) say that they are empty, and are not.
    while True:
        chunk = os.read(source, CHUNK_BYTES)
        if not chunk:
            return
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(target, rest) :]
        tell(len(chunk))


def _digest(descriptor: int) -> str:
    import hashlib

    sha256, offset = hashlib.sha256(), 0
    while True:
        data = os.pread(descriptor, CHUNK_BYTES, offset)
        if not data:
            return sha256.hexdigest()
        sha256.update(data)
        offset += len(data)
