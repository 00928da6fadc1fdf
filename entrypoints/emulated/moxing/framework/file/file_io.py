"""The functions of ``moxing.file``, each with the arguments that the vendor documents."""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import re
import shutil
from functools import partial
from typing import Any, Iterator, NamedTuple, Sequence

from jobentry import objects
from jobentry.objects.base import in_parallel
from jobentry.secrets import private_environ
from moxing.framework.file.file_object import File
from moxing.framework.file.locations import (
    Location,
    MoxFileNameDuplicateException,
    MoxFileNotExistsException,
    MoxFileReadException,
    MoxFileRespException,
    PathInfo,
    is_remote,
    make_folder,
    missing,
    translated,
)

__all__ = [
    "File",
    "MoxFileNameDuplicateException",
    "MoxFileNotExistsException",
    "MoxFileReadException",
    "MoxFileRespException",
    *("append", "append_remote", "copy", "copy_parallel", "exists", "get_size", "glob"),
    *("is_directory", "list_directory", "make_dirs", "mk_dir", "read", "remove", "rename"),
    *("scan_dir", "set_auth", "stat", "walk", "write"),
]

# Scripts set these to tune the real MoXing; here they have no effect.
_LARGE_FILE_METHOD = 1
_LARGE_FILE_TASK_NUM = 8
_NUMBER_OF_PROCESSES = 8
_THREADS = 16
_MAGIC = re.compile("[*?[]")


class FileStatistics(NamedTuple):
    """What ``stat`` returns."""

    length: int
    mtime_nsec: int
    is_directory: bool


# -- copy -----------------------------------------------------------------------------------------


def copy(src_url: Any, dst_url: Any, client_id: Any = None) -> None:
    """Copy one file."""
    source, target = Location(src_url), Location(dst_url)
    with translated("copying", src_url, dst_url):
        if source.file() is None:
            raise missing(src_url)
        if target.is_named_folder:
            raise IsADirectoryError(f"copying {src_url} to {dst_url}: the target is a folder")
        _copy_file(source.uri, target)


def copy_parallel(
    src_url: Any,
    dst_url: Any,
    file_list: Sequence[str] | None = None,
    threads: int | None = _THREADS,
    is_processing: bool = True,
    use_queue: bool = True,
) -> None:
    """Copy a single file, or a folder, of which ``file_list`` can select files."""
    source, target = Location(src_url), Location(dst_url)
    with translated("copying", src_url, dst_url):
        single = source.file()
        if single is not None:
            if source.is_remote and source.is_folder():
                text = f"copying {src_url}: there are an object and a folder of this name"
                raise MoxFileNameDuplicateException(text)
            if target.is_named_folder or target.is_folder():
                target = target.child(os.path.basename(source.url))
            _copy_file(single.uri, target)
            return
        if not source.is_remote and not source.is_folder():
            raise missing(src_url)
        items = list(source.below())
        if file_list is not None:
            requested = {name.strip("/") for name in file_list}
            items = [item for item in items if item.name in requested]
        _copy_all(items, target, threads or 1)


def _copy_all(items: list[PathInfo], target: Location, threads: int) -> None:
    if not items or not target.is_remote:
        make_folder(target)
    files = [item for item in items if not item.is_folder]
    if not files:
        logging.getLogger("moxing").warning("No files to copy.")
    # In OBS a folder exists through the keys below it; only an empty one needs an object of its
    # own.
    used = {os.path.dirname(item.name) for item in items} if target.is_remote else set()
    for item in items:
        if item.is_folder and item.name not in used:
            make_folder(target.child(item.name))
    tasks = [partial(_copy_file, item.uri, target.child(item.name)) for item in files]
    in_parallel(tasks, threads)


def _copy_file(uri: str, target: Location) -> None:
    if not target.is_remote:
        objects.fetch(uri, target.path)
    elif uri.startswith("file:"):
        objects.put(objects.path_of(uri), target.uri)
    else:
        # s3:// and obs:// are two names of one service.
        scheme = target.uri.partition("://")[0]
        objects.copy(f"{scheme}://{uri.partition('://')[2]}", target.uri)


# -- one file -------------------------------------------------------------------------------------


def read(url: Any, binary: bool = False, client_id: Any = None) -> Any:
    """Return the contents of a file, as text or bytes."""
    with File(url, "rb" if binary else "r") as file:
        return file.read()


def write(url: Any, data: Any, binary: bool = False, client_id: Any = None) -> None:
    """Replace the contents of a file."""
    with File(url, "wb" if binary else "w") as file:
        file.write(data)


def append(url: Any, data: Any, binary: bool = False, client_id: Any = None) -> None:
    """Append to a file; create it if it does not exist."""
    with File(url, "ab" if binary else "a") as file:
        file.write(data)


def append_remote(src_url: Any, dsturl: Any, client_id: Any = None) -> None:
    """Append one file to another."""
    with File(src_url, "rb") as source, File(dsturl, "ab") as target:
        shutil.copyfileobj(source, target)


def exists(url: Any, client_id: Any = None) -> bool:
    """Whether the file or folder exists."""
    if not is_remote(url):
        return os.path.exists(url)
    with translated("looking for", url):
        location = Location(url)
        return location.file() is not None or location.is_folder()


def is_directory(url: Any, client_id: Any = None) -> bool:
    """Whether the folder exists."""
    if not is_remote(url):
        return os.path.isdir(url)
    with translated("looking for", url):
        return Location(url).is_folder()


def stat(url: Any, client_id: Any = None) -> FileStatistics:
    """Return the size, the time and the type of a file or folder."""
    with translated("looking for", url):
        location = Location(url)
        stats = location.file()
        if stats is not None:
            return FileStatistics(stats.size_bytes, stats.modified_ns, False)
        if not location.is_folder():
            raise missing(url)
        at_ns = 0 if location.is_remote else os.stat(location.path).st_mtime_ns
        return FileStatistics(0, at_ns, True)


def get_size(url: Any, recursive: bool = False, client_id: Any = None) -> int:
    """Return the size of a file; for a folder 0, or with ``recursive`` the total of its files."""
    stats = stat(url)
    if not stats.is_directory or not recursive:
        return stats.length
    with translated("listing", url):
        return sum(item.size_bytes for item in Location(url).below())


def remove(url: Any, recursive: bool = False, client_id: Any = None) -> None:
    """Remove a file, or with ``recursive`` a folder; otherwise do nothing, as documented."""
    location = Location(url)
    with translated("removing", url):
        if location.file() is not None:
            if location.is_remote:
                objects.delete(location.uri)
            else:
                # The client would also remove the folder if it is empty now.
                os.remove(location.path)
        if recursive and location.is_remote:
            _remove_objects(location.folder_uri)
        elif recursive and location.is_folder():
            shutil.rmtree(location.path)


def _remove_objects(prefix: str) -> None:
    uris = [item.uri for item in objects.list(prefix)]
    in_parallel([partial(objects.delete, uri) for uri in uris if uri[-1] != "/"], _THREADS)
    # Some servers refuse to remove a folder that is not empty, so nested folders come first.
    for uri in sorted((uri for uri in uris if uri[-1] == "/"), reverse=True):
        objects.delete(uri)


def rename(src_url: Any, dst_url: Any) -> None:
    """Rename or move a file or folder, also between OBS and this node."""
    source, target = Location(src_url), Location(dst_url)
    if not source.is_remote and not target.is_remote:
        os.rename(src_url, dst_url)
        return
    if not exists(src_url):
        raise missing(src_url)
    copy_parallel(src_url, dst_url)
    remove(src_url, recursive=True)


# -- folders --------------------------------------------------------------------------------------


def make_dirs(url: Any, client_id: Any = None) -> None:
    """Create a folder and its parents; an existing folder stays as it is."""
    with translated("creating the folder", url):
        location = Location(url)
        if location.is_remote and Location(url.rstrip("/")).file() is not None:
            raise MoxFileNameDuplicateException(
                f"creating the folder {url}: there is an object of its name"
            )
        make_folder(location)


def mk_dir(url: Any, client_id: Any = None) -> None:
    """Create a folder in an existing one.

    Raises:
        OSError: The parent folder does not exist.
    """
    if not is_remote(url):
        os.mkdir(url)
        return
    above = Location(url.rstrip("/").rpartition("/")[0])
    if above.is_remote and not is_directory(above.url):
        raise OSError(f"creating the folder {url}: {above.url} does not exist")
    make_dirs(url)


def list_directory(
    url: Any = ".",
    recursive: bool = False,
    remove_sep: bool = True,
    skip_file: bool = False,
    skip_dir: bool = False,
    client_id: Any = None,
) -> list[str]:
    """Return the names of a folder's entries, relative to it, as ``os.listdir`` does."""
    end = "" if remove_sep else "/"
    return [
        item.name + (end if item.is_folder else "")
        for item in _listed(url, recursive=recursive)
        if not (skip_dir if item.is_folder else skip_file)
    ]


def _listed(url: Any, *, recursive: bool) -> list[PathInfo]:
    location = Location(url)
    with translated("listing", url):
        if not location.is_folder():
            if location.file() is not None:
                raise NotADirectoryError(errno.ENOTDIR, f"listing {url}: it is a file")
            raise missing(url)
        if recursive or location.is_remote:
            return [item for item in location.below() if recursive or "/" not in item.name]
        return [
            PathInfo(entry.name, objects.uri_of(entry.path), is_folder=entry.is_dir())
            for entry in os.scandir(location.path)
        ]


def glob(url: Any) -> list[str]:
    """Return the full paths or URIs of the files and folders that match the pattern."""
    location = Location(url)
    parts = location.url.split("/")
    first = next((at for at, part in enumerate(parts) if _MAGIC.search(part)), None)
    if first is None or (location.is_remote and first < 3):
        return [url] if exists(url) else []
    if not location.is_remote:
        from glob import glob as local_glob

        return local_glob(location.url)
    top, patterns = Location("/".join(parts[:first])), parts[first:]
    with translated("listing", top.url):
        names = [item.name for item in top.below()] if top.is_folder() else []
    return [f"{top.url}/{name}" for name in names if _is_match(name.split("/"), patterns)]


def _is_match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def walk(
    url: Any, topdown: bool = True, onerror: Any = None, followlinks: bool = False
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder with the names of its folders and files, as ``os.walk`` does."""
    if not is_remote(url):
        yield from os.walk(url, topdown, onerror, followlinks)
        return
    top = url.rstrip("/")
    rows: dict[str, tuple[list[str], list[str]]] = {"": ([], [])}
    with translated("listing", url):
        for item in Location(url).below():
            above, _, name = item.name.rpartition("/")
            rows[above][0 if item.is_folder else 1].append(name)
            if item.is_folder:
                rows[item.name] = ([], [])

    def visit(path: str, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        folders, names = rows[folder]
        if topdown:
            yield path, folders, names
        # The caller may have removed folders from the list.
        for name in folders:
            yield from visit(f"{path}/{name}", f"{folder}/{name}".lstrip("/"))
        if not topdown:
            yield path, folders, names

    yield from visit(top, "")


class DirEntry:
    """A file or folder, as ``os.scandir`` describes one."""

    def __init__(self, path: str, info: PathInfo) -> None:
        self.name, self.path, self._found = info.name, path, info

    def is_dir(self, **_: Any) -> bool:
        """Whether it is a folder."""
        return self._found.is_folder

    def is_file(self, **_: Any) -> bool:
        """Whether it is a file."""
        return not self._found.is_folder

    def stat(self, **_: Any) -> FileStatistics:
        """Return its size, time and kind."""
        info = self._found
        return FileStatistics(info.size_bytes, info.modified_ns, info.is_folder)


class _Entries(list):  # type: ignore[type-arg]
    """The result of ``scan_dir``; like that of ``os.scandir``, it can be used with ``with``."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: nothing is open."""


def scan_dir(url: Any = ".") -> Any:
    """Return the entries of a folder, as ``os.scandir`` does."""
    if not is_remote(url):
        return os.scandir(url)
    items = _listed(url, recursive=False)
    return _Entries(DirEntry(f"{url.rstrip('/')}/{item.name}", item) for item in items)


# -- settings -------------------------------------------------------------------------------------


def set_auth(
    ak: str | None = None,
    sk: str | None = None,
    server: str | None = None,
    port: int | None = None,
    is_secure: bool | None = None,
    ssl_verify: bool | None = None,
    long_conn_mode: Any = None,
    path_style: bool | None = None,
    retry: Any = None,
    retry_wait: Any = None,
    client_timeout: Any = None,
    list_max_keys: Any = None,
) -> None:
    """Replace the keys and the server from the environment; None leaves a setting unchanged."""
    environ = private_environ.environ()
    values: dict[str, str] = {}
    if ak is not None and sk is not None:
        values.update(CLOUDJOB_S3_ACCESS_KEY=ak, CLOUDJOB_S3_SECRET_KEY=sk)
        values["CLOUDJOB_S3_SESSION_TOKEN"] = ""
    if server is not None or port is not None or is_secure is not None:
        scheme, separator, host = (server or environ.get("S3_ENDPOINT", "")).rpartition("://")
        if is_secure is not None:
            scheme, separator = "https" if is_secure else "http", "://"
        if port is not None:
            host = re.sub(r":\d+$", "", host) + f":{port}"
        if host:
            values.update(
                dict.fromkeys(_OTHER_ENDPOINTS, ""), S3_ENDPOINT=scheme + separator + host
            )
    if ssl_verify is not None:
        values["S3_VERIFY_SSL"] = str(int(ssl_verify))
    if path_style is not None:
        values["CLOUDJOB_S3_ADDRESSING"] = "path" if path_style else "virtual"
    private_environ.override(values)


_OTHER_ENDPOINTS = ("CLOUDJOB_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
