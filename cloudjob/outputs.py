"""What a job has kept so far: read by the manifests of its nodes, so never half of anything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import StoreError
from cloudjob.store.base import ObjectStore
from cloudjob.store.files import replacing
from cloudjob.store.parallel import as_they_come, in_parallel
from jobentry.contract import manifest
from jobentry.contract.manifest import Manifest

_CHUNK_BYTES = 1024 * 1024
# How often a set that is replaced while it is fetched is begun anew.
_ROUNDS = 3
# Of these a store gives many at a time, in memory.
_TINY_BYTES = 32 * 1024
# Larger files are fetched one after another: a store has its own way with each of them.
_SMALL_BYTES = 8 * 1024 * 1024


class Place(NamedTuple):
    """Where one output is kept.

    Args:
        name: What the job calls it.
        prefix: What its keys in the store begin with, empty or up to a ``/``.
        is_listed: Whether its platform keeps it, and so nobody writes manifests: what is there is
            all that is known.
    """

    name: str
    store: ObjectStore
    prefix: str
    is_listed: bool = False


class Output(NamedTuple):
    """One file of an output.

    Args:
        name: Its path, with the output's name in front.
        digests: The SHA-256 that it may have: several when nodes wrote different files of a name;
            none when nobody knows.
        modified_ns: When the script wrote it, nanoseconds since 1970.
        is_incomplete: Whether it is still being written, or was when the job failed.
    """

    name: str
    key: str
    size_bytes: int
    digests: frozenset[str]
    modified_ns: int
    is_incomplete: bool = False


def find(place: Place) -> list[Output]:
    """Return the files that the manifests of all nodes name, in the order of their names.

    Raises:
        StoreError: The store or a manifest cannot be read.
    """
    if place.is_listed:
        return _listed(place)
    found: dict[str, Output] = {}
    for node in _manifests(place):
        for kept in node.files:
            other = found.get(kept.name)
            digests = frozenset((kept.sha256,)) | (other.digests if other else frozenset())
            found[kept.name] = Output(
                f"{place.name}/{kept.name}",
                place.prefix + kept.key,
                kept.size_bytes,
                digests,
                kept.modified_ns,
                kept.is_incomplete or (other is not None and other.is_incomplete),
            )
    return [found[name] for name in sorted(found)]


def fetch(place: Place, folder: Path) -> list[Output]:
    """Copy a set of files that belong together below ``folder``, by their names; return them.

    When the job keeps the next set meanwhile, that one is fetched.

    Raises:
        StoreError: A file cannot be fetched, or is not what its manifest says.
    """
    have: dict[str, frozenset[str]] = {}
    files = find(place)
    for left in reversed(range(_ROUNDS)):
        try:
            _fetch_missing(place, files, folder, have)
            return files
        except StoreError:
            before, files = files, find(place)
            if files == before or not left:
                raise
    raise AssertionError("the last round returns or raises")


def _listed(place: Place) -> list[Output]:
    return [
        Output(f"{place.name}/{key[len(place.prefix) :]}", key, 0, frozenset(), 0)
        for key in place.store.list(place.prefix)
    ]


def _manifests(place: Place) -> Iterable[Manifest]:
    folder = f"{place.prefix}{manifest.FOLDER}/"
    for key in sorted(place.store.list(folder + "node-")):
        if manifest.node_of(key[len(folder) :]) < 0:
            continue
        try:
            yield manifest.load(place.store.get_bytes(key))
        except manifest.ManifestError as error:
            raise StoreError(
                f"reading what was kept of {place.name}: {place.store.uri(key)}: {error}",
                hint="was it written by another version of cloudjob?",
            ) from error


def _fetch_missing(
    place: Place, files: Iterable[Output], folder: Path, have: dict[str, frozenset[str]]
) -> None:
    """Fetch what is not in ``have``, and note there what came; many small files at a time."""

    def fetch_one(file: Output) -> None:
        _fetch(place, file, folder / file.name)
        have[file.name] = file.digests

    def keep_one(came: tuple[str, bytes]) -> None:
        key, data = came
        file = tiny[key]
        _keep(place, file, data, folder / file.name)
        have[file.name] = file.digests

    missing = [file for file in files if have.get(file.name) != file.digests]
    # How long a file is only its manifest says.
    known = [file for file in missing if file.digests and file.size_bytes <= _SMALL_BYTES]
    tiny = {file.key: file for file in known if file.size_bytes <= _TINY_BYTES}
    as_they_come(keep_one, place.store.get_each(list(tiny)))
    small = [file for file in known if file.size_bytes > _TINY_BYTES]
    in_parallel(fetch_one, small, abort=place.store.abort)
    for file in missing:
        if have.get(file.name) != file.digests:
            fetch_one(file)


def _fetch(place: Place, file: Output, path: Path) -> None:
    """Fetch one file, and let it have its name when its bytes are what they should be."""
    fresh = path.with_name(f".cloudjob-tmp-{os.urandom(8).hex()}")
    try:
        _make_folders(path.parent)
        place.store.fetch(file.key, fresh)
        if file.digests:
            _check(place, file, _digest(fresh))
        if file.modified_ns:
            os.utime(fresh, ns=(file.modified_ns, file.modified_ns))
        fresh.replace(path)
    except OSError as error:
        raise StoreError(
            f"fetching {file.name} to {path}: {error.strerror}",
            hint="give --to a folder that you may write to and that has room",
        ) from error
    finally:
        fresh.unlink(missing_ok=True)


def _keep(place: Place, file: Output, data: bytes, path: Path) -> None:
    """Write the bytes of one file, when they are what they should be."""
    _check(place, file, hashlib.sha256(data).hexdigest())
    try:
        # The folders of a store are its owner's alone; these are like any other of the user's.
        _make_folders(path.parent)
        with replacing(path, is_durable=False) as target:
            target.write(data)
            target.flush()
            if file.modified_ns:
                os.utime(target.fileno(), ns=(file.modified_ns, file.modified_ns))
    except OSError as error:
        raise StoreError(
            f"fetching {file.name} to {path}: {error.strerror}",
            hint="give --to a folder that you may write to and that has room",
        ) from error


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it; ``Path.mkdir`` stops at a thousand."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)


def _check(place: Place, file: Output, digest: str) -> None:
    if digest not in file.digests:
        raise StoreError(
            f"fetching {file.name}: {place.store.uri(file.key)}: it is not what its manifest says",
            hint="another node or another job has written there; give each a place of its own",
        )


def _digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            sha256.update(chunk)
    return sha256.hexdigest()
