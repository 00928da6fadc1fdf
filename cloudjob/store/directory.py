"""``file://`` stores: objects are files below a folder, which may be on a shared file system."""

from __future__ import annotations

import errno
import os
import stat
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

from cloudjob.errors import ObjectMissing, StoreError, UnreadableObject
from cloudjob.home import file_systems
from cloudjob.model.progress import log_once
from cloudjob.store.base import GET_LIMIT_BYTES, RETRY_S, OnBytes, ignore_bytes
from cloudjob.store.files import (
    TEMPORARY,
    check_key,
    hint,
    is_temporary,
    replacing,
    replacing_below,
    text,
    too_large,
)
from cloudjob.store.parallel import iterate_in_parallel
from jobentry.system.trees import folder_below, has_holes, open_file_below, write_sparse

_CHUNK_BYTES = 1024 * 1024
# Of the entries of a folder that are no objects, the number that a warning names.
_NAMED = 5
_WATCHED = 64
# In the class, ``list`` is a method.
_Names = list[str]


def from_uri(
    uri: str,
    _environ: Mapping[str, str] | None = None,
    *,
    retry_s: float = RETRY_S,  # noqa: ARG001 (the kernel decides how long to retry a disk)
) -> DirectoryStore:
    """Return the store whose root is the folder of a ``file:///absolute/path`` URI."""
    path = uri.removeprefix("file://").removeprefix("localhost")
    if not path.startswith("/"):
        raise StoreError(
            f"opening the store {uri!r}: not an absolute path", hint="file:///its/path"
        )
    name = os.fsdecode(urllib.parse.unquote_to_bytes(os.fsencode(path)))
    if "\0" in name:
        raise StoreError(f"opening the store {uri!r}: a path cannot contain NUL")
    return DirectoryStore(Path(name))


class DirectoryStore:
    """An object store in a folder. New folders have mode 0700, objects 0600.

    Others may write to it, so no link below the root is followed: a link is no object.

    Args:
        root: The folder; the first ``put`` creates it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: Path, key: str, *, on_progress: OnBytes = ignore_bytes) -> str:
        self._check("writing", key)
        try:
            source = path.open("rb")
        except OSError as error:
            raise StoreError(
                f"writing {key} in {self.root}: reading {path}: {text(error)}"
            ) from error
        with source, self._translate_errors("writing", key), replacing_below(self.root, key) as f:
            _copy(source, f, on_progress)
        return self.uri(key)

    def put_bytes(self, data: bytes, key: str) -> str:
        self._check("writing", key)
        with self._translate_errors("writing", key), replacing_below(self.root, key) as file:
            file.write(data)
        return self.uri(key)

    def get_bytes(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        with self._open("reading", key) as file, self._translate_errors("reading", key):
            size_bytes = os.fstat(file.fileno()).st_size
            # One byte more reveals a file that has grown.
            data = b"" if size_bytes > limit_bytes else file.read(limit_bytes + 1)
        if size_bytes > limit_bytes or len(data) > limit_bytes:
            raise too_large(f"reading {key} in {self.root}", limit_bytes)
        return data

    def get_range(self, key: str, offset: int, count: int) -> bytes:
        with self._open("reading", key) as file, self._translate_errors("reading", key):
            file.seek(offset)
            return file.read(count)

    def get_each(
        self, keys: Sequence[str], *, limit_bytes: int = GET_LIMIT_BYTES
    ) -> Iterator[tuple[str, bytes]]:
        return iterate_in_parallel(partial(self.get_bytes, limit_bytes=limit_bytes), keys)

    def fetch(self, key: str, path: Path, *, on_progress: OnBytes = ignore_bytes) -> None:
        with self._open("fetching", key) as source:
            try:
                with replacing(path, is_durable=False) as file:
                    _copy(source, file, on_progress)
            except OSError as error:
                raise StoreError(
                    f"fetching {key} from {self.root} to {path}: {text(error)}",
                    hint=hint(error),
                ) from error

    def copy(self, key: str, target: str) -> None:
        self._check("copying", target)
        with (
            self._open("copying", key) as source,
            self._translate_errors("copying", key),
            replacing_below(self.root, target) as file,
        ):
            _copy(source, file, ignore_bytes)

    def list(self, prefix: str = "", *, with_unfinished: bool = False) -> Iterator[str]:
        _watch(self.root)
        folder = prefix[: prefix.rfind("/") + 1]
        if folder:
            check_key("listing", folder[:-1])
        others: _Names = []
        for key, is_file in self._keys_below(folder, prefix):
            if not is_file and not with_unfinished:
                others.append(key)
            elif with_unfinished or not is_temporary(key):
                yield key
        if others:
            named = ", ".join(others[:_NAMED]) + ", …" * (len(others) > _NAMED)
            log_once(f"listing {self.root}: not read, as it is no file: {named}")

    def exists(self, key: str) -> bool:
        self._check("looking for", key)
        above, _, name = key.rpartition("/")
        with (
            self._translate_errors("looking for", key),
            suppress(*_NO_OBJECT),
            folder_below(os.fspath(self.root), above) as folder,
        ):
            return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        return False

    def delete(self, key: str) -> None:
        self._check("deleting", key, may_be_temporary=True)
        above, _, name = key.rpartition("/")
        with (
            self._translate_errors("deleting", key),
            suppress(*_NO_OBJECT),
            folder_below(os.fspath(self.root), above) as folder,
        ):
            os.unlink(name, dir_fd=folder)
        # An object store has no empty folders.
        while above:
            outer, _, name = above.rpartition("/")
            try:
                with folder_below(os.fspath(self.root), outer) as folder:
                    os.rmdir(name, dir_fd=folder)
            except OSError:
                return
            above = outer

    def uri(self, key: str) -> str:
        self._check("naming", key)
        path = os.path.abspath(self.root / key)  # noqa: PTH100 (Path.resolve follows links)
        return "file://" + urllib.parse.quote_from_bytes(os.fsencode(path))

    def access(self) -> dict[str, str]:
        """Return no variables: the path is enough."""
        return {}

    def abort(self) -> None:
        """Do nothing: calls to a file system cannot be aborted."""

    def remove_unfinished(self, older_than_s: float) -> int:
        """Remove unfinished writes older than ``older_than_s`` and return how many were removed."""
        before_s = time.time() - older_than_s
        count = 0
        for key, is_file in self._keys_below("", ""):
            above, _, name = key.rpartition("/")
            if not is_file or not name.startswith(TEMPORARY):
                continue
            with (
                self._translate_errors("removing", key),
                suppress(*_NO_OBJECT),
                folder_below(os.fspath(self.root), above) as folder,
            ):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime <= before_s:
                    os.unlink(name, dir_fd=folder)
                    count += 1
        return count

    @property
    def clock_ahead_s(self) -> float:
        """Zero: there is only one clock."""
        return 0.0

    def _check(self, doing: str, key: str, *, may_be_temporary: bool = False) -> None:
        _watch(self.root)
        check_key(doing, key, may_be_temporary=may_be_temporary)

    def _open(self, doing: str, key: str) -> IO[bytes]:
        """Open an object for reading.

        Raises:
            UnreadableObject: It is not a regular file.
        """
        self._check(doing, key)
        with self._translate_errors(doing, key):
            try:
                return os.fdopen(open_file_below(os.fspath(self.root), key), "rb")
            except OSError as error:
                if error.errno not in _LINK_OR_SOCKET:
                    raise
                raise UnreadableObject(
                    f"{doing} {key} in {self.root}: it is not a regular file",
                    hint="cloudjob stores only files: who may write to this folder?",
                ) from error

    def _keys_below(self, folder: str, prefix: str) -> Iterator[tuple[str, bool]]:
        """Yield keys in order: a folder sorts as ``name/``, so ``a.txt`` comes before ``a/b``.

        Each with whether it is a file: links, FIFOs and devices are no objects.

        Not recursive, as Python's recursion limit is about a thousand folders.
        """
        waiting = [(folder, False)]
        while waiting:
            key, is_file = waiting.pop()
            if key and not key.endswith("/"):
                yield key, is_file
                continue
            names, others = self._names(key, prefix)
            keys = [(key + name, True) for name in names]
            keys += [(key + name, False) for name in others]
            keys.sort(key=lambda each: os.fsencode(each[0]), reverse=True)
            waiting += [each for each in keys if each[0].startswith(prefix)]

    def _names(self, folder: str, prefix: str) -> tuple[_Names, _Names]:
        """Return the names of the files and folders in a folder, and those of anything else.

        Names of folders end in a slash.
        """
        names: _Names = []
        others: _Names = []
        with self._translate_errors("listing", prefix):
            try:
                with _entries(self.root, folder) as entries:
                    for child in entries:
                        if child.is_dir(follow_symlinks=False):
                            names.append(f"{child.name}/")
                        else:
                            is_file = child.is_file(follow_symlinks=False)
                            (names if is_file else others).append(child.name)
            except (FileNotFoundError, NotADirectoryError):
                # A missing root is an empty store, but a root that is a file is an error.
                if not folder and self.root.exists():
                    raise
        return names, others

    @contextmanager
    def _translate_errors(self, doing: str, key: str) -> Iterator[None]:
        """Turn an ``OSError`` of the file system into a ``StoreError``."""
        try:
            yield
        except OSError as error:
            reason = "no such object" if error.errno == errno.ENOENT else text(error)
            kind = ObjectMissing if isinstance(error, _NO_OBJECT) else StoreError
            where = f"{key or 'keys'} in {self.root}"
            raise kind(f"{doing} {where}: {reason}", hint=hint(error)) from error


@lru_cache(_WATCHED)
def _watch(root: Path) -> None:
    """Let a file system that does not answer be reported; once for each store."""
    file_systems.watch(root)


@contextmanager
def _entries(root: Path, folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Yield the entries of a folder of the store."""
    with folder_below(os.fspath(root), folder) as above:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def _copy(source: IO[bytes], file: IO[bytes], on_progress: OnBytes) -> None:
    is_sparse = has_holes(os.fstat(source.fileno()))
    while data := source.read(_CHUNK_BYTES):
        if is_sparse:
            write_sparse(file, data)
        else:
            file.write(data)
        on_progress(len(data))
    if is_sparse:
        file.truncate()


# The key names a folder, or lies below a file: in both cases there is no such object.
_NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# What Linux and macOS report when a link or a socket is opened; FreeBSD's EMLINK for a link, too.
_LINK_OR_SOCKET = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EOPNOTSUPP)
