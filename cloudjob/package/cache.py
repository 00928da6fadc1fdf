"""Remembers a source folder between two packs, so that unchanged files are not read again.

As in git, a file with the same size, times and inode has the same content, with one exception: a
file that changed just before it was read may change again within one tick of the file system's
clock, so it is read again the next time.

There is one private file for each source and store: JSON after its own digest, replaced as a whole.
A killed submit leaves the previous one; if the file is damaged, the source is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cloudjob.home import private_folder
from cloudjob.package.tree import FileStat
from jobentry.contract.packages import Entry, Layer

_FORMAT = 2
# The clocks of file systems tick every few milliseconds, that of FAT every two seconds.
_TICK_NS = 2_000_000_000


class CachedEntry(NamedTuple):
    """One entry of the tree that was packed the last time.

    Args:
        layer: The number of the layer whose manifest lists it.
        holder: The number of the layer that holds a file's content.
        file_stat: What ``stat`` returned for a file; None if it cannot be trusted.
        scanned: The version of the rules that found no secret in it; empty if not searched.
    """

    entry: Entry
    layer: int
    holder: int = 0
    file_stat: FileStat | None = None
    scanned: str = ""


class CachedLayer(NamedTuple):
    """One layer of the package.

    Args:
        removed: The names that it removes from the layers below.
        content_bytes: The size of its contents, before compression.
    """

    layer: Layer
    removed: tuple[str, ...]
    content_bytes: int


class SourceCache(NamedTuple):
    """Everything remembered about one source; empty if it was never packed.

    Args:
        entries: Sorted by the bytes of their names.
        digest: The digest of the tree.
    """

    layers: tuple[CachedLayer, ...] = ()
    entries: tuple[CachedEntry, ...] = ()
    digest: str = ""


def path_of(home: Path, source: Path, store: str) -> Path:
    """Return the file that remembers earlier submits of ``source`` to ``store``."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(source)) + b"\0" + os.fsencode(store))
    return home / "packages" / f"{name.hexdigest()[:32]}.json"


def trusted(file_stat: FileStat | None, now_ns: int) -> FileStat | None:
    """Return ``file_stat`` if every later change of the file will alter it; otherwise None.

    Args:
        now_ns: When the scan began.
    """
    if file_stat is None or max(file_stat.mtime_ns, file_stat.ctime_ns) >= now_ns - _TICK_NS:
        return None
    return file_stat


def load(path: Path) -> SourceCache:
    """Return the saved cache; empty if the file is missing or damaged."""
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
        if digest.decode("ascii") != hashlib.sha256(data).hexdigest():
            return SourceCache()
        value = json.loads(data)
        if value["format"] != _FORMAT:
            return SourceCache()
        layers = tuple(
            CachedLayer(Layer(*layer), tuple(removed), content_bytes)
            for layer, removed, content_bytes in value["layers"]
        )
        entries = tuple(
            CachedEntry(Entry(*entry), layer, holder, file_stat and FileStat(*file_stat), scanned)
            for entry, layer, holder, file_stat, scanned in value["entries"]
        )
        return SourceCache(layers, entries, str(value["digest"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return SourceCache()


def with_layers(source_cache: SourceCache, layers: Sequence[Layer]) -> SourceCache:
    """Return ``source_cache`` with the names that its layers have in the store."""
    pairs = zip(source_cache.layers, layers, strict=True)
    return source_cache._replace(layers=tuple(each._replace(layer=layer) for each, layer in pairs))


def save(path: Path, source_cache: SourceCache) -> None:
    """Save ``source_cache``; if that fails, the next pack only reads more."""
    data = json.dumps({"format": _FORMAT, **source_cache._asdict()}, separators=(",", ":")).encode()
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    with suppress(OSError):
        private_folder(path.parent)
        try:
            new.touch(mode=0o600)
            new.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
