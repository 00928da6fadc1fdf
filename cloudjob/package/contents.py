"""Lists the contents of a package in a store, and reads single files of it."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Collection
from typing import Any

from cloudjob.errors import StoreError
from cloudjob.store.base import ObjectStore
from cloudjob.store.parallel import in_parallel
from jobentry.contract.packages import (
    DESCRIPTOR_LIMIT_BYTES,
    Entry,
    FormatError,
    Layer,
    Manifest,
    load_descriptor,
    merge,
)
from jobentry.contract.zip_layer import open_layer

# Bytes at the end of a layer; in most layers, they hold the manifest and the zip directory.
_TAIL_BYTES = 64 * 1024
# Bytes that are fetched at a time from before the end, and the most that one read may ask for: the
# zip directory of a million files. Others may store a layer of any size, which takes no space.
_PIECE_BYTES = 16 * 1024 * 1024
_READ_LIMIT_BYTES = 256 * 1024 * 1024


def read(store: ObjectStore, key: str) -> list[Entry]:
    """Return the files, folders and links of the package whose descriptor is ``key``, by name.

    Raises:
        StoreError: The package cannot be read, or a layer is damaged.
    """
    try:
        data = store.get_bytes(key, limit_bytes=DESCRIPTOR_LIMIT_BYTES)
        layers = load_descriptor(data).layers

        def load(layer: Layer) -> Manifest:
            with open_layer(open_stored(store, layer), layer.digest) as (_, manifest):
                return manifest

        # The directory of a large layer, which others may have written, may fill the memory.
        is_large = any(layer.size_bytes > _PIECE_BYTES for layer in layers)
        tree = merge(in_parallel(load, layers, at_once=1 if is_large else 16, abort=store.abort))
    except FormatError as error:
        raise StoreError(f"reading the package {store.uri(key)}: {error}") from error
    return [tree[name] for name in sorted(tree)]


def read_files(
    store: ObjectStore, key: str, digests: Collection[str], *, limit_bytes: int
) -> dict[str, bytes]:
    """Return the contents of files of a package by digest, without those that are larger.

    Raises:
        StoreError: The package cannot be read, or a layer is damaged.
    """
    content_of = {}
    try:
        data = store.get_bytes(key, limit_bytes=DESCRIPTOR_LIMIT_BYTES)
        for layer in load_descriptor(data).layers:
            with open_layer(open_stored(store, layer), layer.digest) as (archive, manifest):
                for digest in manifest.contents.keys() & set(digests):
                    with archive.open(manifest.contents[digest]) as file:
                        content = file.read(limit_bytes + 1)
                    if len(content) <= limit_bytes:
                        content_of[digest] = content
    except (FormatError, zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError) as error:
        raise StoreError(f"reading the package {store.uri(key)}: {error}") from error
    return content_of


def open_stored(store: ObjectStore, layer: Layer) -> io.BufferedReader:
    """Open a layer in a store as a file; only the part that is read, near its end, is fetched.

    Raises:
        FormatError: The layer has another size.
    """
    return io.BufferedReader(_StoredLayer(store, layer))


class _StoredLayer(io.RawIOBase):
    def __init__(self, store: ObjectStore, layer: Layer) -> None:
        self._store, self._layer = store, layer
        self._place = 0
        self._begin = max(0, layer.size_bytes - _TAIL_BYTES)
        # One byte more reveals an object that is too long.
        expected = layer.size_bytes - self._begin
        self._data = store.get_range(layer.key, self._begin, expected + 1)
        if len(self._data) != expected:
            raise FormatError(f"the size of layer {layer.key} is not {layer.size_bytes} bytes")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._layer.size_bytes}
        self._place = begin[whence] + offset
        if self._place < 0:
            raise ValueError("the position is before the start of the file")
        return self._place

    def readinto(self, room: Any) -> int:
        if len(room) > _READ_LIMIT_BYTES:
            raise FormatError(f"the zip directory of layer {self._layer.key} is too long")
        if not self._begin <= self._place < self._begin + len(self._data):
            self._fetch(max(len(room), _PIECE_BYTES))
        at = self._place - self._begin
        data = self._data[at : at + len(room)]
        room[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _fetch(self, limit_bytes: int) -> None:
        """Fetch bytes from the present place on, and keep the others if these end before them."""
        is_before = self._place < self._begin
        missing = (self._begin if is_before else self._layer.size_bytes) - self._place
        is_near = is_before and missing <= limit_bytes and len(self._data) <= limit_bytes
        rest = self._data if is_near else b""
        count = min(missing, limit_bytes)
        new = self._store.get_range(self._layer.key, self._place, count) if count > 0 else b""
        self._begin, self._data = self._place, new + rest
