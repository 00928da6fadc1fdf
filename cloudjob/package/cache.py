"""What is remembered of a source between two packs of it, so that what is known is not read again.

A file whose size, times and inode are as they were has the bytes that it had: git's rule, with
git's exception. A file that was changed just before it was read may change again within one tick of
the file system's clock, so it is not trusted, and read again the next time.

One file a source and store, JSON behind its own digest, private, replaced as a whole: a submit that
is killed leaves the one of before, and whatever is wrong with it costs no more than reading the
source again.
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
from cloudjob.package import collector
from cloudjob.package.tree import Seen
from jobentry.contract.packages import Entry, Layer

_FORMAT = 1
# The clocks of file systems tick every few milliseconds, of FAT every two seconds.
_TICK_NS = 2_000_000_000


class Known(NamedTuple):
    """One entry of the tree that was packed the last time.

    Args:
        layer: The number of the layer that speaks of it.
        holder: The number of the layer that holds a file's content.
        stored_bytes: How long the content is there.
        seen: What ``stat`` said of a file; None when that is not to be trusted.
        scanned: The rules that found no secret in it; empty when it was not looked through.
    """

    entry: Entry
    layer: int
    holder: int = 0
    stored_bytes: int = 0
    seen: Seen | None = None
    scanned: str = ""


class KnownLayer(NamedTuple):
    """One layer of the package.

    Args:
        removed: The names that it removes from the layers below.
        content_bytes: How long it is without its index.
    """

    layer: Layer
    removed: tuple[str, ...]
    content_bytes: int


class Memory(NamedTuple):
    """All that is remembered of one source: nothing, when it was never packed.

    Args:
        entries: In the order of the bytes of their names.
        digest: Of the tree.
    """

    layers: tuple[KnownLayer, ...] = ()
    entries: tuple[Known, ...] = ()
    digest: str = ""


def path_of(home: Path, source: Path, store: str) -> Path:
    """Return the file that remembers ``source`` as it lies in ``store``."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(source)) + b"\0" + os.fsencode(store))
    return home / "packages" / f"{name.hexdigest()[:32]}.json"


def trusted(seen: Seen, now_ns: int) -> Seen | None:
    """Return what ``stat`` said if a later change is sure to show in it.

    Args:
        now_ns: When the scan began.
    """
    return seen if max(seen.mtime_ns, seen.ctime_ns) < now_ns - _TICK_NS else None


@collector.stopped()
def load(path: Path) -> Memory:
    """Return what is remembered; nothing when the file is not there or makes no sense."""
    try:
        digest_line, _, data = path.read_bytes().partition(b"\n")
        # What somebody has edited, or a disk has damaged, could make no sense in many ways.
        if digest_line.decode("ascii") != hashlib.sha256(data).hexdigest():
            return Memory()
        value = json.loads(data)
        if value["format"] != _FORMAT:
            return Memory()
        layers = tuple(
            KnownLayer(Layer(*layer), tuple(removed), content_bytes)
            for layer, removed, content_bytes in value["layers"]
        )
        entries = tuple(
            Known(Entry(*entry), layer, holder, stored, seen and Seen(*seen), scanned)
            for entry, layer, holder, stored, seen, scanned in value["entries"]
        )
        digest = str(value["digest"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Memory()
    return Memory(layers, entries, digest)


def with_layers(memory: Memory, layers: Sequence[Layer]) -> Memory:
    """Return ``memory`` with its layers named as they are in the store."""
    known = zip(memory.layers, layers, strict=True)
    return memory._replace(layers=tuple(each._replace(layer=layer) for each, layer in known))


def save(path: Path, memory: Memory) -> None:
    """Remember ``memory``; when that fails, the next pack reads more, and that is all."""
    value = {
        "format": _FORMAT,
        "layers": memory.layers,
        "entries": memory.entries,
        "digest": memory.digest,
    }
    new = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    with suppress(OSError):
        private_folder(path.parent)
        try:
            new.touch(mode=0o600)
            data = json.dumps(value, separators=(",", ":")).encode("ascii")
            new.write_bytes(hashlib.sha256(data).hexdigest().encode("ascii") + b"\n" + data)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
