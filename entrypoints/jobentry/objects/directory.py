"""Objects as files on this machine or on a shared file system: ``file://``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from functools import partial
from typing import IO, Iterator

from jobentry.contract import names
from jobentry.contract.lists import some
from jobentry.log import log_message
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
    opened,
    translated,
)
from jobentry.system.trees import folder_below, has_holes, is_open, sync, write_sparse

_FILE = "file://"
# Of the entries of a folder that are no objects.
_SHOWN_NAMES = 5


def path_of(uri: str) -> str:
    """Return the path of the file that a ``file://`` URI names, with all its bytes unchanged.

    An emulated node may have it at another path than the machine on which the URI was written.

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
    moved: dict[str, str] = json.loads(os.environ.get(names.CLOUDJOB_MOVED) or "{}")
    for folder, here in moved.items():
        if name == folder or name.startswith(folder + "/"):
            return here + name[len(folder) :]
    return name


def uri_of(path: str) -> str:
    """Return the URI of an absolute path."""
    from urllib.parse import quote_from_bytes

    return _FILE + quote_from_bytes(os.fsencode(path))


def check(uri: str) -> None:
    """Raise an ``ObjectError`` if this is not the URI of a file."""
    path_of(uri)


class FileObject:
    """An object that is a file.

    Args:
        below: The URI of a folder above it, below which no link is followed to write or delete it.
    """

    def __init__(self, uri: str, below: str = "") -> None:
        self.uri = uri
        self._path = path_of(uri)
        self._root, name = os.path.split(self._path)
        if below:
            self._root = path_of(below).rstrip("/")
            name = self._path[len(self._root) + 1 :]
        self._above, _, self._name = name.rpartition("/")

    def fetch(self, path: str, sha256: str = "", progress: Progress = no_progress) -> None:
        """Copy the object to the file ``path``."""
        import hashlib

        digest = hashlib.sha256()
        with translated("fetching", self.uri):
            source = open(self._path, "rb")  # noqa: SIM115 (errors of the target are others)
        with source, translated("writing", path), fresh_file(path) as fresh:
            with open(fresh, "wb") as target:
                for piece in _pieces(source):
                    write_sparse(target, piece)
                    if sha256:
                        digest.update(piece)
                    progress(len(piece))
                target.truncate()
            if sha256:
                check_digest(self.uri, digest.hexdigest(), sha256)

    def read(self) -> bytes:
        """Return the object's bytes."""
        with translated("reading", self.uri), open(self._path, "rb") as file:
            return file.read()

    def stat(self) -> Entry:
        """Return the metadata of the object; a folder is not an object."""
        with translated("looking for", self.uri):
            status = os.stat(self._path)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectMissing(f"looking for {self.uri}: no such file")
        return _entry("", self._path, status)

    def put(self, path: str, progress: Progress = no_progress) -> None:
        """Store the file at ``path`` as the object."""
        with translated("reading", path):
            source = opened(path)  # errors of the target are others
        with source, translated("writing", self.uri), self._stored() as target:
            is_sparse = has_holes(os.fstat(source.fileno()))
            for piece in _pieces(source):
                if is_sparse:
                    write_sparse(target, piece)
                else:
                    target.write(piece)
                progress(len(piece))
            if is_sparse:
                target.truncate()

    def write(self, data: bytes) -> None:
        """Store ``data`` as the object."""
        with translated("writing", self.uri), self._stored() as target:
            target.write(data)

    def copy_to(self, target: FileObject) -> None:
        """Copy the object."""
        target.put(self._path)

    def delete(self) -> None:
        """Delete the object if there is one, and its folder if that is empty now."""
        with translated("deleting", self.uri), contextlib.suppress(
            FileNotFoundError, NotADirectoryError
        ), folder_below(self._root, self._above) as folder:
            os.unlink(self._name, dir_fd=folder)
        with contextlib.suppress(OSError):
            if not self._above:
                os.rmdir(self._root)
                return
            above, _, name = self._above.rpartition("/")
            with folder_below(self._root, above) as folder:
                os.rmdir(name, dir_fd=folder)

    @contextlib.contextmanager
    def _stored(self) -> Iterator[IO[bytes]]:
        """Yield a new file that, on success, becomes the object and survives a crash."""
        for new_folder in make_folders(self._root):
            above = os.path.dirname(new_folder)
            os.chmod(new_folder, 0o777 if is_open(os.stat(above)) else 0o700)
            with folder_below(above, "") as folder:
                sync(folder)
        with folder_below(self._root, self._above, makes=True, shares=True) as folder:
            temporary = TEMPORARY + os.urandom(8).hex()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                    os.fchmod(file.fileno(), 0o666 if is_open(os.fstat(folder)) else 0o600)
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            sync(folder)


def listed(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``; links are followed."""
    path = path_of(prefix)
    folder = path[: path.rfind("/") + 1]
    left_out: list[str] = []
    with translated("listing", prefix):
        if not os.path.isdir(folder):
            return
        for file in _files_below(folder):
            name = file[len(path) :]
            status = _stat(file) if file.startswith(path) else None
            if status is not None and stat.S_ISREG(status.st_mode):
                yield _entry(name, file, status)
            elif file.startswith(path) and (status is not None or os.path.islink(file)):
                left_out.append(name)
    if left_out:
        names_left_out = some(left_out, _SHOWN_NAMES)
        # A link that leads nowhere, a pipe, a device.
        log_message("%s: left out, as there is no file on this node: %s" % (prefix, names_left_out))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; ``is_dir`` fails for a link to itself."""
    if not entry.is_symlink():
        return entry.is_dir()
    status = _stat(entry.path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _stat(path: str) -> os.stat_result | None:
    """Return the facts of the file that a path or a link leads to; None if it leads nowhere."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def _files_below(top: str) -> Iterator[str]:
    """Yield the files below a folder; not recursive, as recursion fails at a thousand folders."""
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while waiting:
        path, above = waiting.pop()
        if not path.endswith("/"):
            yield path
            continue
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise ObjectError(f"listing {path}: a link leads back to a folder above it")
        with os.scandir(path) as children:
            names = sorted(child.name + "/" * _is_folder(child) for child in children)
        inside = above | {identity}
        waiting += [
            (path + name, inside) for name in reversed(names) if not name.startswith(TEMPORARY)
        ]


def _entry(name: str, path: str, status: os.stat_result) -> Entry:
    tag = "%d-%d" % (status.st_dev, status.st_ino)
    return Entry(name, uri_of(path), status.st_size, tag, status.st_mtime_ns)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.read, CHUNK_BYTES), b"")


object_at = FileObject
