"""A file or folder, local or in OBS, with the files below it, and MoXing's exceptions."""

from __future__ import annotations

import contextlib
import os
import re
from types import SimpleNamespace
from typing import Any, Iterator, NamedTuple
from urllib.parse import quote

from jobentry import objects
from jobentry.objects import ObjectError, ObjectMissing

_REMOTE = re.compile(r"(s3|obs)://")


class MoxFileNotExistsException(Exception):
    """There is no such file or folder."""


class MoxFileNameDuplicateException(Exception):
    """An object and a folder have the same name."""


class MoxFileRespException(Exception):
    """OBS refused a request; ``resp.status`` is the HTTP status, 300 or above."""

    def __init__(self, message: str, resp: Any = None) -> None:
        super().__init__(message)
        self.resp = resp


class MoxFileReadException(MoxFileRespException):
    """OBS did not answer, or not completely."""


class PathInfo(NamedTuple):
    """A file or folder below another folder.

    Args:
        name: Relative to that folder, with single slashes and none at the end.
        uri: The URI of the object; its key in OBS may contain double slashes.
    """

    name: str
    uri: str
    is_folder: bool = False
    size_bytes: int = 0
    modified_ns: int = 0


def is_remote(url: Any) -> bool:
    """Whether this URL is in OBS."""
    return isinstance(url, str) and _REMOTE.match(url) is not None


class Location:
    """A file or folder.

    Attributes:
        uri: The URI of the file, or of the folder without a slash at the end.
        is_named_folder: Whether the user wrote a slash at the end.
    """

    def __init__(self, url: Any) -> None:
        self.url: str = os.fspath(url)
        if not self.url:
            # An empty path is not the current folder: it may be an unset parameter of the script.
            raise missing("''")
        self.is_remote = is_remote(self.url)
        self.is_named_folder = self.url.endswith("/")
        if self.is_remote:
            scheme, _, rest = self.url.partition("://")
            # Joined URLs contain double slashes, which mean a single one.
            bucket, _, key = re.sub("/+", "/", rest.strip("/")).partition("/")
            self.key = key
            self.uri = f"{scheme}://{bucket}/" + quote(key, "/~", errors="surrogateescape")
        else:
            self.path = os.path.abspath(self.url)
            self.uri = objects.uri_of(self.path)

    def child(self, name: str) -> Location:
        """Return the file or folder ``name`` of this folder."""
        return Location(f"{self.url.rstrip('/')}/{name}")

    @property
    def folder_uri(self) -> str:
        """The beginning of the URIs of everything in this folder."""
        return self.uri.rstrip("/") + "/"

    def file(self) -> PathInfo | None:
        """Return the file, None if there is none."""
        if self.is_named_folder or (self.is_remote and not self.key):
            return None
        try:
            entry = objects.stat(self.uri)
        except ObjectError as error:
            if not _is_missing(error):
                raise
            return None
        return PathInfo("", self.uri, False, entry.size_bytes, entry.modified_ns)

    def is_folder(self) -> bool:
        """Whether the folder exists; in OBS, whether some key begins with its name."""
        if not self.is_remote:
            return os.path.isdir(self.path)
        try:
            return next(objects.list(self.folder_uri), None) is not None or not self.key
        except ObjectError as error:
            if not _is_missing(error):
                raise
            return False

    def below(self) -> Iterator[PathInfo]:
        """Yield all files and folders in this folder, each folder before what it contains."""
        return self._objects_below() if self.is_remote else self._files_below()

    def _objects_below(self) -> Iterator[PathInfo]:
        seen: set[str] = set()
        for item in objects.list(self.folder_uri):
            parts = [part for part in item.name.split("/") if part]
            if ".." in parts:
                raise MoxFileReadException(f"listing {self.url}: {item.name!r} points outside it")
            is_marker = item.name.endswith("/")
            for depth in range(1, len(parts) + is_marker):
                folder = "/".join(parts[:depth])
                if folder not in seen:
                    seen.add(folder)
                    yield PathInfo(folder, self.child(folder).uri, is_folder=True)
            if parts and not is_marker:
                name = "/".join(parts)
                yield PathInfo(name, item.uri, False, item.size_bytes, item.modified_ns)

    def _files_below(self) -> Iterator[PathInfo]:
        """Yield local files and folders; follow links, except to a folder above."""
        waiting = [("", frozenset((os.path.realpath(self.path),)))]
        while waiting:
            folder, above = waiting.pop()
            for entry in sorted(os.scandir(os.path.join(self.path, folder)), key=_name_of):
                name = folder + entry.name
                uri = objects.uri_of(entry.path)
                real = os.path.realpath(entry.path)
                if entry.is_dir() and real not in above:
                    yield PathInfo(name, uri, is_folder=True)
                    waiting.append((name + "/", above | {real}))
                elif entry.is_file():
                    at = entry.stat()
                    yield PathInfo(name, uri, False, at.st_size, at.st_mtime_ns)


def _name_of(entry: os.DirEntry[str]) -> str:
    return entry.name


def make_folder(location: Location) -> None:
    """Create a folder and its parents; in OBS it is an object whose key ends with a slash."""
    if not location.is_remote:
        os.makedirs(location.path, exist_ok=True)
    elif location.key and not location.is_folder():
        objects.write(b"", location.folder_uri)


@contextlib.contextmanager
def translated(doing: str, *urls: Any) -> Iterator[None]:
    """Turn the errors of the object client into those that MoXing documents."""
    what = "{} {}".format(doing, " to ".join(map(str, urls)))
    try:
        yield
    except ObjectError as error:
        text = f"{what}: {error}" + (f" ({error.hint})" if error.hint else "")
        answer = getattr(error, "answer", None)
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno:
            raise OSError(cause.errno, text) from error
        if _is_missing(error):
            raise MoxFileNotExistsException(text) from error
        if answer is not None:
            resp = SimpleNamespace(
                status=answer.status, errorCode=answer.code, errorMessage=answer.message
            )
            raise MoxFileRespException(text, resp) from error
        raise MoxFileReadException(text) from error


def _is_missing(error: ObjectError) -> bool:
    """Whether an object, or its bucket, does not exist."""
    return isinstance(error, ObjectMissing) or (
        getattr(getattr(error, "answer", None), "status", 0) == 404
    )


def missing(url: Any) -> MoxFileNotExistsException:
    """Return the error about a file or folder that does not exist."""
    return MoxFileNotExistsException(f"{url}: no such file or folder")
