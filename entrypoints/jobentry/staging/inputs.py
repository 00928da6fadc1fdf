"""Fetch inputs to a node: single objects, and all objects below a prefix.

An input is always a copy, so no job can damage the data of others. The jobs of one machine share
copies through a cache: read-only hard links to its files, or copies of these for root.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Iterator, Mapping, NamedTuple, Sequence

from jobentry import objects
from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.manifest import is_name
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.log import log_message, size_text
from jobentry.node.journal import Journal, Transfer
from jobentry.objects.base import TEMPORARY, in_parallel, translated
from jobentry.system.trees import remove_tree

if TYPE_CHECKING:
    from jobentry.staging.cache import Cache

# The interval of progress reports.
_REPORT_S = 10.0
_THREADS = 8
# Larger objects are fetched one after another, each in parallel ranges.
_LARGE_BYTES = 32 * 1024 * 1024
_DEFAULT_CACHE_GB = 50.0


class _File(NamedTuple):
    """An object and the path of its file."""

    entry: objects.Entry
    path: str


def stage(
    node: NodeEnv, paths: NodePaths, environ: Mapping[str, str], journal: Journal | None = None
) -> None:
    """Fetch every input that this node needs; inputs that exist, after a restart, stay.

    Raises:
        EntryError: An input cannot be fetched.
    """
    from jobentry.staging.cache import Cache

    cache = Cache.in_folder(environ.get(names.CLOUDJOB_CACHE_DIR, ""), _limit_bytes(environ))
    for name, uri in node.inputs_here:
        target = paths.input(name)
        if os.path.lexists(target):
            continue
        try:
            _fetch_input(name, uri, target, cache, journal or Journal())
        except (objects.ObjectError, OSError) as error:
            hint = getattr(error, "hint", "")
            raise EntryError(f"fetching the input {name}: {error}", hint=hint) from error


def _limit_bytes(environ: Mapping[str, str]) -> int:
    try:
        limit_gb = float(environ.get(names.CLOUDJOB_CACHE_LIMIT_GB) or _DEFAULT_CACHE_GB)
    except ValueError:
        limit_gb = _DEFAULT_CACHE_GB
    return int(limit_gb * 10**9)


def _fetch_input(name: str, uri: str, target: str, cache: Cache, journal: Journal) -> None:
    """Fetch one input, which appears under its name only once it is complete."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    fresh = f"{target}.new-{os.urandom(4).hex()}"
    try:
        with journal.during(f"input {name}") as transfer:
            files = list(_files(uri, fresh))
            progress = _Progress(name, files, transfer)
            _fetch_all(files, cache, progress)
            os.replace(fresh, target)
        progress.finish()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        with contextlib.suppress(OSError):
            remove_tree(fresh)


def _files(uri: str, target: str) -> Iterator[_File]:
    """Yield the object at the URI, or else all objects below it as a prefix.

    An empty object is a folder, not a file, if its name ends in a slash or there are objects below
    it: some tools make such objects.
    """
    missing = objects.ObjectMissing(f"listing {objects.shown(uri)}: there are none")
    if not uri.endswith("/"):
        try:
            stored = objects.stat(uri)
            if stored.size_bytes != 0 or not _has_objects_below(uri):
                yield _File(stored, target)
                return
        except objects.ObjectMissing as error:
            missing = error
        uri += "/"
    # A platform that uploads the folder of a node also uploads files that are half written.
    entries = [
        entry
        for entry in objects.list(uri)
        if not entry.name.rpartition("/")[2].startswith(TEMPORARY)
    ]
    if not entries and not objects.is_folder(uri):
        raise missing
    folders = {name for entry in entries for name in _folders_above(entry.name)}
    for entry in entries:
        if entry.name in folders or entry.name.endswith("/") or not entry.name:
            _check_is_folder(entry)
        else:
            yield _File(entry, _path_below(target, entry))
    os.makedirs(target, exist_ok=True)


def _has_objects_below(uri: str) -> bool:
    # Not every store can list, and not every user may.
    with contextlib.suppress(objects.ObjectError):
        return any(True for _ in objects.list(uri + "/"))
    return False


def _folders_above(name: str) -> Iterator[str]:
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)


def _check_is_folder(entry: objects.Entry) -> None:
    if entry.size_bytes > 0:
        raise objects.ObjectError(
            f"fetching {objects.shown(entry.uri)}: it has contents, but its name is that of a"
            " folder with other objects",
            "rename it, or choose a prefix without it",
        )


def _path_below(folder: str, entry: objects.Entry) -> str:
    """Return the path of an object's file; refuse a name that leads out of the folder."""
    if not is_name(entry.name):
        raise objects.ObjectError(
            f"fetching {entry.uri}: {entry.name!r} cannot be the name of a file",
            "rename the object, or name single objects as inputs",
        )
    return os.path.join(folder, *entry.name.split("/"))


def _fetch_all(files: Sequence[_File], cache: Cache, progress: _Progress) -> None:
    for folder in sorted({os.path.dirname(file.path) for file in files}):
        with translated("creating the folder", folder):
            os.makedirs(folder, exist_ok=True)
    small = [file for file in files if file.entry.size_bytes < _LARGE_BYTES]
    large = [file for file in files if file.entry.size_bytes >= _LARGE_BYTES]

    stop = threading.Event()

    def report(moved_bytes: int) -> None:
        # End the others soon after a failure, so that no file appears after the clean-up.
        if stop.is_set():
            raise objects.ObjectError("another object cannot be fetched")
        progress.add_bytes(moved_bytes)

    def fetch(file: _File) -> None:
        cache.fetch(file.entry, file.path, report)
        progress.add_file()

    in_parallel([partial(fetch, file) for file in small], _THREADS, stop)
    for file in large:
        fetch(file)


class _Progress:
    """Reports the progress of a slow input at intervals."""

    def __init__(self, name: str, files: Sequence[_File], transfer: Transfer) -> None:
        self._name = name
        self._transfer = transfer
        self._lock = threading.RLock()
        self._files = len(files)
        self._total_bytes = sum(max(0, file.entry.size_bytes) for file in files)
        transfer.total_bytes = self._total_bytes
        self._begun = self._shown = time.monotonic()
        self._done_bytes = self._done_files = 0

    def add_bytes(self, moved_bytes: int) -> None:
        """Count transferred bytes."""
        self._transfer.add(moved_bytes)
        with self._lock:
            self._done_bytes += moved_bytes
            self._show()

    def add_file(self) -> None:
        """Count a file that is complete."""
        with self._lock:
            self._done_files += 1
            self._show()

    def _show(self) -> None:
        """Report the progress if the interval has passed."""
        now = time.monotonic()
        if now - self._shown < _REPORT_S:
            return
        self._shown = now
        rate = self._done_bytes / (now - self._begun)
        left_s = (self._total_bytes - self._done_bytes) / rate if rate else 0
        log_message(
            f"input {self._name}: {size_text(self._done_bytes)} of {size_text(self._total_bytes)},"
            f" {self._done_files} of {self._files} files, {size_text(rate)}/s,"
            f" about {max(0, left_s):.0f} s left"
        )

    def finish(self) -> None:
        """Report the total after a long transfer."""
        took_s = time.monotonic() - self._begun
        if took_s >= _REPORT_S:
            log_message(
                f"input {self._name}: {size_text(self._total_bytes)} fetched in {took_s:.0f} s"
                f" (files: {self._files})"
            )
