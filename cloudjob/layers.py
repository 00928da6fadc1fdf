"""The layers of packages in a store: put before a job needs them, removed when no job does.

Layers are shared: a submit finds most of what it needs in the store already. So one cloudjob must
not delete what another one relies on at that moment, and they know of each other only through
notes in the store. Each writes its note before it looks for those of others:

- A submit puts a *claim* that names its layers, then looks for *sweeps*, then for the layers.
- ``collect`` puts a sweep that names what it is about to delete, then looks for claims, then for
  jobs; what one of these needs is spared.

Whoever writes second sees the note of the other, so no layer is both relied on and deleted. A
submit that finds a layer it needs in a sweep does not wait: it puts it under another key. A note of
a process that was killed only delays: it is ignored when it is a day old, and a submit or a
collection that takes nearly as long gives up.

Before a submit reuses a layer it compares its size and its manifest with what it knows. A node
verifies the contents too, and marks a layer that is damaged; the next submit that needs it sends it
again.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, NamedTuple

from cloudjob.errors import CloudJobError, StoreError
from cloudjob.package import CodePackage
from cloudjob.store.base import ObjectStore, OnProgress, ignore_progress
from cloudjob.store.parallel import call_with_timeout
from jobentry.contract import exits
from jobentry.contract.packages import (
    DAMAGED,
    LAYERS,
    Descriptor,
    FormatError,
    Layer,
    damage_key,
    dump_descriptor,
    load_descriptor,
)
from jobentry.contract.paths import JobPaths
from jobentry.zip_layer import open_layer

_CLAIMS = "claims/"
_SWEEPS = "sweeps/"
_CODE = "/code.json"
# Holds the manifest and the directory of most layers.
_TAIL_BYTES = 64 * 1024

# For how long a submit that failed or was cancelled tries to delete its claim.
_UNDO_S = 1.0
_NOTE_LIVES_S = 24 * 3600.0
# Well before others pass our note over.
_WORK_ENDS_S = 20 * 3600.0


EndedAt = Callable[[str], "str | None"]


class Missing(CloudJobError):
    """A layer that was in the store is gone or damaged: pack everything again."""

    exit_code = 4


class Kept(NamedTuple):
    """What the store holds of a package now.

    Args:
        layers: What the package consists of, as its descriptor names it.
        sent_bytes: How much of it was not there before.
        sent_layers: In how many layers.
    """

    layers: tuple[Layer, ...]
    sent_bytes: int
    sent_layers: int


class Claim:
    """A claim on layers: use it as a context manager until the job's descriptor is in the store.

    Args:
        watch: Called with how many bytes will be sent; what it returns hears of them as they go.
    """

    def __init__(
        self,
        store: ObjectStore,
        job: str,
        watch: Callable[[int], OnProgress] = lambda _: ignore_progress,
    ) -> None:
        self._store = store
        self._watch = watch
        self._key = f"{_CLAIMS}{job}-{os.urandom(4).hex()}.json"
        self._begun_s = time.monotonic()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(StoreError, TimeoutError):
            if error is None:
                self._store.delete(self._key)
            else:
                call_with_timeout(_UNDO_S, lambda: self._store.delete(self._key))

    def keep(self, package: CodePackage) -> Kept:
        """Make sure that the store holds the layers of a package, and claim them.

        Raises:
            Missing: One that is not new is gone, damaged, or about to be deleted.
            StoreError: The store refused.
        """
        self._write(package.layers)
        condemned = _condemned(self._store)
        damaged = set(_damaged(self._store))
        old = package.layers if package.new is None else package.layers[:-1]
        for layer in old:
            if layer.key in condemned | damaged or not _is_whole(self._store, layer):
                raise Missing(f"looking for {layer.key}: it is not in the store, or damaged")
        if package.new is None:
            return Kept(package.layers, 0, 0)
        layer = package.layers[-1]
        if layer.key in condemned:
            # Nobody knows this key, so nobody deletes it.
            layer = layer._replace(key=f"{LAYERS}{layer.digest}.{os.urandom(4).hex()}")
            self._write((*old, layer))
        elif layer.key not in damaged and _is_whole(self._store, layer):
            return Kept(package.layers, 0, 0)
        self._store.put(package.new, layer.key, on_progress=self._watch(layer.size_bytes))
        if layer.key in damaged:
            self._store.delete(damage_key(layer.key))
        return Kept((*old, layer), layer.size_bytes, 1)

    def check(self) -> None:
        """Do nothing while others heed the claim.

        Raises:
            StoreError: It is so old that they may not.
        """
        if time.monotonic() - self._begun_s > _WORK_ENDS_S:
            raise StoreError(
                "keeping the package: it took so long that its layers may have been deleted",
                hint="submit once more: what has been sent is not sent again",
            )

    def _write(self, layers: Iterable[Layer]) -> None:
        self._store.put_bytes(_note(layer.key for layer in layers), self._key)


def descriptor(package: CodePackage, layers: tuple[Layer, ...]) -> bytes:
    """Return what ``code.uri`` holds."""
    return dump_descriptor(Descriptor(package.digest, package.files, package.size_bytes, layers))


# ---- damage --------------------------------------------------------------------------------------


def mark_damaged(store: ObjectStore, keys: Iterable[str]) -> None:
    """Mark layers as damaged, so that the next submit that needs one sends it again.

    Raises:
        StoreError: The store refused.
    """
    for key in keys:
        with suppress(FormatError):
            store.put_bytes(b"", damage_key(key))


def _damaged(store: ObjectStore) -> Iterator[str]:
    """Yield the keys of the layers that are marked as damaged."""
    for mark in store.list(DAMAGED):
        key = LAYERS + mark.removeprefix(DAMAGED)
        with suppress(FormatError):
            if damage_key(key) == mark:
                yield key


def _is_whole(store: ObjectStore, layer: Layer) -> bool:
    """Whether the store holds a zip of this size with the manifest that it is named for.

    The contents are not read: a node verifies them, and marks a layer that is damaged.
    """
    try:
        with open_layer(io.BufferedReader(_End(store, layer)), layer.digest):
            return True
    except FormatError:
        return False
    except StoreError:
        if store.exists(layer.key):
            raise
        return False


class _End(io.RawIOBase):
    """A layer in a store as a file, of which only the end is fetched, as far as it is read."""

    def __init__(self, store: ObjectStore, layer: Layer) -> None:
        self._store, self._layer = store, layer
        self._place = 0
        self._begin = max(0, layer.size_bytes - _TAIL_BYTES)
        # An object that is too long shows in the byte after the last one.
        expected = layer.size_bytes - self._begin
        self._data = store.get_range(layer.key, self._begin, expected + 1)
        if len(self._data) != expected:
            raise FormatError(f"its size is not {layer.size_bytes} bytes")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._layer.size_bytes}
        self._place = begin[whence] + offset
        if self._place < 0:
            raise ValueError("a position before the file")
        return self._place

    def readinto(self, room: Any) -> int:
        if self._place < self._begin:
            missing = self._begin - self._place
            self._data = self._store.get_range(self._layer.key, self._place, missing) + self._data
            self._begin = self._place
        data = self._data[self._place - self._begin :][: len(room)]
        room[: len(data)] = data
        self._place += len(data)
        return len(data)


# ---- collecting ----------------------------------------------------------------------------------


class Collected(NamedTuple):
    """What ``collect`` has deleted, or would delete.

    Args:
        keys: The layers, and the notes of processes that were killed.
        spared: How many layers stay.
    """

    keys: tuple[str, ...]
    spared: int


def collect(
    store: ObjectStore, *, keep_s: float, ended_at: EndedAt, dry_run: bool = False
) -> Collected:
    """Delete the layers that no job needs.

    A job needs its package until it has ended, and for ``keep_s`` seconds longer.

    Args:
        ended_at: When a job has ended, in RFC 3339; empty when it lives; None when that is not
            known here, and the record in the store decides.
        dry_run: Delete nothing.

    Raises:
        StoreError: The store refused, or a descriptor cannot be read: nothing is deleted then.
    """
    begun = time.monotonic()
    candidates = set(store.list(LAYERS))
    condemned = candidates - _needed(store, keep_s, ended_at)
    notes = [key for key in (*store.list(_CLAIMS), *store.list(_SWEEPS)) if _is_old(store, key)]
    if dry_run or not condemned:
        if not dry_run:
            _delete(store, notes)
        return Collected((*sorted(condemned), *notes), len(candidates) - len(condemned))
    sweep = f"{_SWEEPS}{os.urandom(8).hex()}.json"
    try:
        store.put_bytes(_note(condemned), sweep)
        # Claims first: a submit deletes its claim only when its job is there to be seen.
        claimed = _claimed(store)
        condemned -= claimed | _needed(store, keep_s, ended_at)
        deleted = []
        for key in sorted(condemned):
            if time.monotonic() - begun > _WORK_ENDS_S:
                break
            store.delete(key)
            deleted.append(key)
        stale = [key for key in _damaged(store) if key in deleted or key not in candidates]
        _delete(store, [*notes, *map(damage_key, stale)])
    finally:
        with suppress(StoreError):
            store.delete(sweep)
    return Collected((*deleted, *notes), len(candidates) - len(deleted))


def _needed(store: ObjectStore, keep_s: float, ended_at: EndedAt) -> set[str]:
    """Return the layers of all jobs that need theirs."""
    keys = [key for key in store.list() if key.endswith(_CODE) and key.count("/") == 1]
    needed: set[str] = set()
    for key in keys:
        job = key.removesuffix(_CODE)
        if _is_over(store, job, keep_s, ended_at):
            continue
        try:
            needed.update(layer.key for layer in load_descriptor(store.get_bytes(key)).layers)
        except FormatError as error:
            raise StoreError(
                f"collecting layers: {key} in the store cannot be read: {error}",
                hint="was it written by a later cloudjob? Nothing has been deleted",
            ) from error
        except StoreError:
            if store.exists(key):
                raise
    return needed


def _is_over(store: ObjectStore, job: str, keep_s: float, ended_at: EndedAt) -> bool:
    """Whether a job has ended, and so long ago that its package is not kept."""
    ended = ended_at(job)
    record = JobPaths(job).record
    if ended is None and store.exists(record):
        with suppress(exits.RecordError):
            ended = exits.load(store.get_bytes(record)).ended_at
    if not ended:
        return False
    try:
        at = datetime.fromisoformat(ended.replace("Z", "+00:00"))
    except ValueError:
        return False
    return datetime.now(timezone.utc).timestamp() - at.timestamp() > keep_s


# ---- notes ---------------------------------------------------------------------------------------


def _note(keys: Iterable[str]) -> bytes:
    return json.dumps({"written_s": time.time(), "layers": sorted(keys)}).encode("ascii")


def _condemned(store: ObjectStore) -> set[str]:
    """Return the layers that someone may be deleting at this moment."""
    return {key for _, keys in _notes(store, _SWEEPS) for key in keys}


def _claimed(store: ObjectStore) -> set[str]:
    """Return the layers that submits rely on which have not made their job yet."""
    return {key for _, keys in _notes(store, _CLAIMS) for key in keys}


def _notes(store: ObjectStore, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the notes that are not too old, each with the layers that it names."""
    for key in list(store.list(prefix)):
        note = _load_note(store, key)
        if note is not None and time.time() - note[0] <= _NOTE_LIVES_S:
            yield key, note[1]


def _is_old(store: ObjectStore, key: str) -> bool:
    note = _load_note(store, key)
    return note is not None and time.time() - note[0] > _NOTE_LIVES_S


def _load_note(store: ObjectStore, key: str) -> tuple[float, list[str]] | None:
    """Return when a note was written and what it names; None when it has just been taken away."""
    try:
        value = json.loads(store.get_bytes(key))
        return float(value["written_s"]), [str(layer) for layer in value["layers"]]
    except StoreError:
        if store.exists(key):
            raise
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(
            f"reading {key} in the store: it is no note of cloudjob's",
            hint="was it written by a later cloudjob?",
        ) from error


def _delete(store: ObjectStore, keys: Iterable[str]) -> None:
    for key in keys:
        store.delete(key)
