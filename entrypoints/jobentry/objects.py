"""The container's hold on objects: ``file://`` URIs, read and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Iterator

# The same name that the store gives its half-written files, so that its list passes over ours.
_TEMPORARY = ".cloudjob-tmp-"
_CHUNK_BYTES = 1024 * 1024
_FILE = "file://"


class ObjectError(Exception):
    """An object cannot be read or written: *doing what: to which thing: what came back*."""


def fetch(uri: str, path: str) -> None:
    """Write the object to the file ``path``, whole or not at all; a folder is linked, not copied.

    Raises:
        ObjectError: The object is not there, or one of the two cannot be used.
    """
    if os.path.isdir(path_of(uri)):
        with _translated("link folder", path):
            os.symlink(path_of(uri), path)
        return
    with contextlib.ExitStack() as opened:
        with _translated("fetch object", uri):
            source = opened.enter_context(open(path_of(uri), "rb"))
        with _translated("write file", path), _replacing(path) as file:
            _copy(source, file)


def read(uri: str) -> bytes:
    """Return the object's bytes.

    Raises:
        ObjectError: The object is not there or cannot be read.
    """
    with _translated("read object", uri), open(path_of(uri), "rb") as file:
        return file.read()


def put(path: str, uri: str) -> None:
    """Store the file at ``path`` as the object ``uri``; when this returns it outlives a crash.

    Raises:
        ObjectError: The file cannot be read or the object cannot be written.
    """
    with contextlib.ExitStack() as opened:
        with _translated("read file", path):
            source = opened.enter_context(open(path, "rb"))
        with _translated("put object", uri), _replacing(path_of(uri)) as file:
            _copy(source, file)


def write(data: bytes, uri: str) -> None:
    """Store ``data`` as the object ``uri``; when this returns it outlives a crash.

    Raises:
        ObjectError: The object cannot be written.
    """
    with _translated("write object", uri), _replacing(path_of(uri)) as file:
        file.write(data)


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


def uri_below(uri: str, name: str) -> str:
    """Return the URI of the object ``name``, a path relative to the folder ``uri``."""
    from urllib.parse import quote_from_bytes

    return uri.rstrip("/") + "/" + quote_from_bytes(os.fsencode(name))


@contextlib.contextmanager
def _translated(doing: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        came_back = (error.strerror or str(error)).lower()
        raise ObjectError(f"{doing}: {what}: {came_back}") from error


@contextlib.contextmanager
def _replacing(target: str) -> Iterator[IO[bytes]]:
    """Open a file that becomes ``target`` when all of it is on the disk, or else vanishes."""
    folder = os.path.dirname(os.path.abspath(target))
    _make_folders(folder)
    temporary = os.path.join(folder, _TEMPORARY + os.urandom(8).hex())
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
    if os.path.isdir(folder) or folder == "/":
        return
    above = os.path.dirname(folder)
    _make_folders(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        if _is_open(above):
            os.chmod(folder, 0o777)
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


def _copy(source: IO[bytes], file: IO[bytes]) -> None:
    while True:
        chunk = source.read(_CHUNK_BYTES)
        if not chunk:
            return
        file.write(chunk)
