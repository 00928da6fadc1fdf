"""Puts the layers of a package into a store, where jobs share them.

A submit finds most of the layers that it needs in the store. So one cloudjob process must not
delete a layer that another one is about to use, and processes coordinate only through notes in the
store. Each process writes its own note before it reads the notes of others:

- A submit puts a *claim* that names its layers, then looks for *deletions*, then for the layers.
- ``collection.collect`` puts a deletion that names the layers it is about to delete, then looks for
  claims, then for jobs, and spares the layers that one of them needs.

The process that writes second sees the note of the first, so no layer is both used and deleted. A
submit that finds a layer it needs in a deletion puts it under another key instead of waiting. The
note of a killed process is ignored when it is a day old; a submit or a collection that takes nearly
as long gives up.

Before a submit reuses a layer, it checks the layer's size and manifest. A node verifies the
contents too, and marks a damaged layer; the next submit that needs the layer sends it again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from cloudjob.errors import CloudJobError, ObjectMissing, StoreError, UnreadableObject
from cloudjob.model.progress import log_once
from cloudjob.package.contents import open_stored
from cloudjob.package.pack import CodePackage
from cloudjob.store.base import ObjectStore, OnBytes, ignore_bytes
from cloudjob.store.parallel import call_with_timeout
from jobentry.contract.packages import (
    DAMAGED,
    LAYERS,
    Descriptor,
    FormatError,
    Layer,
    damage_key,
    dump_descriptor,
)
from jobentry.contract.zip_layer import has_manifest

CLAIMS = "claims/"
DELETIONS = "sweeps/"
# Other processes ignore a note that is older; ours gives up well before.
NOTE_LIFETIME_S = 24 * 3600.0
WORK_LIMIT_S = 20 * 3600.0

# Seconds that a failed or cancelled submit tries to delete its claim.
_UNDO_S = 1.0


class LayerMissing(CloudJobError):
    """A layer that was in the store is gone or damaged: pack everything again."""

    exit_code = 4


class _BadNote(StoreError):
    """A claim or a deletion is not what cloudjob writes."""


class StoredLayers(NamedTuple):
    """The layers of a package that are in the store now.

    Args:
        layers: The layers of the package, as its descriptor names them.
        sent_bytes: How many bytes were sent because the store did not have them.
        sent_layers: How many layers were sent.
    """

    layers: tuple[Layer, ...]
    sent_bytes: int
    sent_layers: int


class Claim:
    """A claim on layers: use it as a context manager until the job's descriptor is in the store.

    Args:
        watch: Called with the number of bytes to send; returns the callback for their progress.
    """

    def __init__(
        self,
        store: ObjectStore,
        job: str,
        watch: Callable[[int], OnBytes] = lambda _: ignore_bytes,
    ) -> None:
        self._store = store
        self._watch = watch
        self._key = f"{CLAIMS}{job}-{os.urandom(4).hex()}.json"
        self._started_s = time.monotonic()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        with suppress(StoreError, TimeoutError):
            if error is None:
                self._store.delete(self._key)
            else:
                call_with_timeout(_UNDO_S, lambda: self._store.delete(self._key))

    def keep(self, package: CodePackage) -> StoredLayers:
        """Make sure that the store holds the layers of a package, and claim them.

        Raises:
            LayerMissing: An old layer is gone, damaged, or about to be deleted.
            StoreError: The store refused.
        """
        self._write(package.layers)
        # What others wrote there must not stop every submit; the nodes report a layer that goes
        # missing after all.
        marked_keys = noted_keys(self._store, DELETIONS, is_tolerant=True)
        damaged = set(damaged_layers(self._store))
        old = package.layers if package.new is None else package.layers[:-1]
        for layer in old:
            if layer.key in marked_keys | damaged or not _is_stored(self._store, layer):
                raise LayerMissing(f"looking for {layer.key}: it is not in the store, or damaged")
        if package.new is None:
            return StoredLayers(package.layers, 0, 0)
        layer = package.layers[-1]
        if layer.key in marked_keys:
            # No other process knows this key, so none deletes it.
            layer = layer._replace(key=f"{LAYERS}{layer.digest}.{os.urandom(4).hex()}")
            self._write((*old, layer))
        elif layer.key not in damaged and _is_stored(self._store, layer):
            return StoredLayers(package.layers, 0, 0)
        self._store.put(package.new, layer.key, on_progress=self._watch(layer.size_bytes))
        if layer.key in damaged:
            self._store.delete(damage_key(layer.key))
        return StoredLayers((*old, layer), layer.size_bytes, 1)

    def check(self) -> None:
        """Check that other processes still respect the claim.

        Raises:
            StoreError: The claim is so old that they may ignore it.
        """
        if time.monotonic() - self._started_s > WORK_LIMIT_S:
            raise StoreError(
                "storing the package: it took so long that its layers may have been deleted",
                hint="submit again: layers that are already in the store are not sent again",
            )

    def _write(self, layers: Iterable[Layer]) -> None:
        self._store.put_bytes(note(layer.key for layer in layers), self._key)


def descriptor(package: CodePackage, layers: tuple[Layer, ...]) -> bytes:
    """Return the contents of the object at ``code.uri``."""
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


def damaged_layers(store: ObjectStore) -> Iterator[str]:
    """Yield the keys of the layers that are marked as damaged."""
    for mark in store.list(DAMAGED):
        key = LAYERS + mark.removeprefix(DAMAGED)
        with suppress(FormatError):
            damage_key(key)
            yield key


def _is_stored(store: ObjectStore, layer: Layer) -> bool:
    """Whether the store holds a zip of this size whose manifest has the layer's digest.

    The contents are not read: a node verifies them, and marks a layer that is damaged.
    """
    try:
        return has_manifest(open_stored(store, layer), layer.digest)
    except (FormatError, ObjectMissing):
        return False


# ---- notes ---------------------------------------------------------------------------------------


def note(keys: Iterable[str]) -> bytes:
    """Return the contents of a claim or a deletion."""
    return json.dumps({"written_s": time.time(), "layers": sorted(keys)}).encode("ascii")


class Note(NamedTuple):
    """A claim or a deletion.

    Args:
        is_stale: Whether it is so old that the process that wrote it must have been killed.
    """

    key: str
    is_stale: bool
    layers: tuple[str, ...]


def noted_keys(store: ObjectStore, prefix: str, *, is_tolerant: bool = False) -> set[str]:
    """Return the layers in all claims or all deletions that are not too old.

    Args:
        is_tolerant: Whether to go on, with a warning, without those that cloudjob has not written.

    Raises:
        StoreError: One cannot be read.
    """
    notes = notes_of(store, prefix, is_tolerant=is_tolerant)
    return {layer for each in notes if not each.is_stale for layer in each.layers}


def notes_of(store: ObjectStore, prefix: str, *, is_tolerant: bool = False) -> Iterator[Note]:
    """Yield all claims or all deletions; see ``noted_keys``."""
    for key in list(store.list(prefix)):
        try:
            yield _note(store, key)
        except ObjectMissing:
            # Deleted in the meantime.
            pass
        except UnreadableObject as error:
            # Not written by cloudjob, so it claims nothing.
            log_once(error.message)
        except _BadNote as error:
            if not is_tolerant:
                raise
            log_once(error.message)


def _note(store: ObjectStore, key: str) -> Note:
    data = store.get_bytes(key)
    try:
        value = json.loads(data)
        is_stale = time.time() - float(value["written_s"]) > NOTE_LIFETIME_S
        return Note(key, is_stale, tuple(str(layer) for layer in value["layers"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise _BadNote(
            f"reading {store.uri(key)}: it was not written by cloudjob",
            hint="was it written by a newer version of cloudjob? if not, delete it",
        ) from error
