"""Objects as files on this machine or on a shared file system: ``file://``."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import partial
from typing import IO, Iterator

from jobentry.objects.base import (
    CHUNK_BYTES,
    TEMPORARY,
    Entry,
    ObjectError,
    ObjectMissing,
    Progress,
    check_digest,
    fresh_file,
    make_folders,
    no_progress,
    translated,
)

_FILE = "file://"


def path_of(uri: str) -> str:
    """Return the absolute path that a ``file://`` URI names, with all its bytes unchanged.

    Raises:
        ObjectError: It is not such a URI.
    """
    from urllib.parse import unquote_to_bytes  # start-up time counts, and not every entry needs it

    path = uri[len(_FILE) :]
    if path.startswith("localhost/"):
        path = path[len("localhost") :]
    name = os.fsdecode(unquote_to_bytes(os.fsencode(path)))
    if not uri.startswith(_FILE) or not path.startswith("/") or "\0" in name:
        raise ObjectError(f"looking for {uri!r}: not a URI of the form file:///its/path")
    return name


def uri_of(path: str) -> str:
    """Return the URI of an absolute path."""
    from urllib.parse import quote_from_bytes

    return _FILE + quote_from_bytes(os.fsencode(path))


def check(uri: str) -> None:
    """Raise an ``ObjectError`` if this is not the URI of a file."""
    path_of(uri)


class FileObject:
    """An object that is a file."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._path = path_of(uri)

    def fetch(self, path: str, sha256: str = "", progress: Progress = no_progress) -> None:
        """Copy the object to the file ``path``."""
        import hashlib

        digest = hashlib.sha256()
        with translated("fetching", self.uri):
            source = open(self._path, "rb")  # noqa: SIM115 (errors of the target are others)
        with source, translated("writing", path), fresh_file(path) as fresh:
            with open(fresh, "wb") as target:
                for piece in _pieces(source):
                    target.write(piece)
                    if sha256:
                        digest.update(piece)
                    progress(len(piece))
            if sha256:
                check_digest(self.uri, digest.hexdigest(), sha256)

    def read(self) -> bytes:
        """Return the object's bytes."""
        with translated("reading", self.uri), open(self._path, "rb") as file:
            return file.read()

    def stat(self) -> Entry:
        """Return the metadata of the object; a folder is not an object."""
        with translated("looking for", self.uri):
            found = os.stat(self._path)
        if not stat.S_ISREG(found.st_mode):
            raise ObjectMissing(f"looking for {self.uri}: no such file")
        return _entry("", self._path, found)

    def put(self, path: str, progress: Progress = no_progress) -> None:
        """Store the file at ``path`` as the object."""
        with translated("reading", path):
            source = open(path, "rb")  # noqa: SIM115 (errors of the target are others)
        with source, translated("writing", self.uri), _stored_file(self._path) as target:
            for piece in _pieces(source):
                target.write(piece)
                progress(len(piece))

    def write(self, data: bytes) -> None:
        """Store ``data`` as the object."""
        with translated("writing", self.uri), _stored_file(self._path) as target:
            target.write(data)

    def copy_to(self, target: FileObject) -> None:
        """Copy the object."""
        target.put(self._path)

    def delete(self) -> None:
        """Delete the object if there is one, and its folder if that is empty now."""
        with translated("deleting", self.uri), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self._path))


def listed(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``; links are followed."""
    path = path_of(prefix)
    folder = path[: path.rfind("/") + 1]
    with translated("listing", prefix):
        if not os.path.isdir(folder):
            return
        for file in _files_below(folder):
            if file.startswith(path):
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(file)
                    if stat.S_ISREG(found.st_mode):
                        yield _entry(file[len(path) :], file, found)


def _files_below(top: str) -> Iterator[str]:
    """Yield the files below a folder; not recursive, as recursion fails at a thousand folders."""
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while waiting:
        path, above = waiting.pop()
        if not path.endswith("/"):
            yield path
            continue
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino)
        if identity in above:
            raise ObjectError(f"listing {path}: a link leads back to a folder above it")
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
def _stored_file(path: str) -> Iterator[IO[bytes]]:
    """Yield a new file that, on success, becomes ``path`` and survives a crash."""
    folder = os.path.dirname(os.path.abspath(path))
    for made in make_folders(folder):
        above = os.path.dirname(made)
        os.chmod(made, 0o777 if _is_open(above) else 0o700)
        _sync_folder(above)
    with fresh_file(path) as fresh, open(fresh, "wb") as file:
        os.fchmod(file.fileno(), 0o666 if _is_open(folder) else 0o600)
        yield file
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _is_open(folder: str) -> bool:
    """Whether a folder is shared with other users, who then read and remove the files in it.

    A folder with the sticky bit, like /tmp, does not count.
    """
    mode = os.stat(folder).st_mode
    return bool(mode & 0o002) and not mode & 0o1000


def _sync_folder(folder: str) -> None:
    """Make the names in a folder survive a crash, which may otherwise undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.read, CHUNK_BYTES), b"")


object_at = FileObject
