"""Finds and fetches a job's outputs by its nodes' manifests, which list complete files only."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qsl

from cloudjob.errors import ObjectMissing, StoreError
from cloudjob.model import progress
from cloudjob.store import with_store_options
from cloudjob.store.base import ObjectStore, OnBytes, ignore_bytes
from cloudjob.store.files import replacing
from cloudjob.store.parallel import consume_in_parallel, in_parallel
from cloudjob.tracking.access import JobAccess
from jobentry.contract import manifest
from jobentry.contract.manifest import Manifest
from jobentry.contract.paths import JobPaths
from jobentry.contract.stores import STORE_SECTIONS

_CHUNK_BYTES = 1024 * 1024
# The number of bytes that ``Outputs.read`` requests at a time.
_PIECE_BYTES = 4 * 1024 * 1024
# Attempts to fetch a set of files that the job is replacing.
_ROUNDS = 3
# Files up to this size are read into memory, many at a time.
_TINY_BYTES = 32 * 1024
# Larger files are fetched one after another: the store transfers the parts of each in parallel.
_SMALL_BYTES = 8 * 1024 * 1024


class _Damaged(StoreError):
    """A file does not match its manifest."""


# Errors of one file, which do not keep the others from being fetched.
_OF_ONE_FILE = (ObjectMissing, _Damaged)
# The number of lost files that an error names.
_NAMED = 5


class _FilesLost(StoreError):
    """Files that cannot be fetched, although all others were.

    Args:
        lost: The error of each, by the name of the file.
    """

    def __init__(self, lost: Mapping[str, StoreError]) -> None:
        first = next(iter(lost.values()))
        message = first.message
        if len(lost) > 1:
            names = ", ".join([*lost][:_NAMED]) + (", …" if len(lost) > _NAMED else "")
            message = f"fetching outputs: {len(lost)} files are lost: {names}; first: {message}"
        super().__init__(message, hint=first.hint)
        self.lost = lost


class OutputLocation(NamedTuple):
    """Where one output is stored.

    Args:
        name: The output's name in the job file.
        prefix: The start of its keys in the store, empty or ending in ``/``.
        is_listed: Whether the platform stores the output, so that there are no manifests and its
            files are those that the store lists.
    """

    name: str
    store: ObjectStore
    prefix: str
    is_listed: bool = False


class Output(NamedTuple):
    """One file of an output.

    Args:
        name: Its path, starting with the output's name.
        digests: The SHA-256 digests that it may have: several when nodes wrote different files with
            this name, none when they are unknown.
        modified_ns: When the script last wrote it, in nanoseconds since 1970.
        is_incomplete: Whether it is still being written, or was when the job failed.
    """

    name: str
    key: str
    size_bytes: int
    digests: frozenset[str]
    modified_ns: int
    is_incomplete: bool = False


class Outputs(Collection[Output]):
    """The output files of a job that were stored when this was created."""

    def __init__(
        self, locations: Sequence[OutputLocation], refused: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._locations = locations
        # Outputs of a job of others, by name, at URIs that are not read: its description must not
        # choose a folder of this machine or a host.
        self.refused = refused
        self._files = tuple(file for location in locations for file in find(location))

    def __iter__(self) -> Iterator[Output]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, file: object) -> bool:
        return file in self._files

    def __repr__(self) -> str:
        return f"Outputs({[file.name for file in self._files]})"

    def read(self, file: Output) -> Iterator[bytes]:
        """Yield the content of one file in pieces; the last one only if the digest is right.

        Raises:
            StoreError: It cannot be read, or does not match its manifest.
        """
        location = next(each for each in self._locations if file.name.startswith(f"{each.name}/"))
        sha256 = hashlib.sha256()
        held, start = b"", 0
        while piece := location.store.get_range(file.key, start, _PIECE_BYTES):
            if held:
                yield held
            sha256.update(piece)
            held, start = piece, start + len(piece)
        if file.digests:
            _check(location, file, sha256.hexdigest())
        yield held

    def download(
        self,
        folder: str | os.PathLike[str] = ".",
        *,
        on_progress: progress.OnProgress = progress.log_warnings,
    ) -> list[Output]:
        """Copy the files, as they are stored now, below ``folder`` and return them.

        The file ``output`` is then at ``folder / output.name``.

        Raises:
            StoreError: A file cannot be fetched or written. If the store has lost some, all others
                are fetched first.
        """
        total_bytes = sum(file.size_bytes for file in self._files)
        step = progress.meter("fetching", total_bytes, on_progress)
        fetched: list[Output] = []
        lost: dict[str, StoreError] = {}
        for location in self._locations:
            try:
                fetched += fetch(location, Path(folder), on_progress=step)
            except _FilesLost as error:
                lost.update(error.lost)
        if lost:
            raise _FilesLost(lost)
        return fetched


class Locations(NamedTuple):
    """Where the outputs of a job are stored.

    Args:
        refused: Outputs of a job of others at URIs that its description must not choose, by name.
    """

    found: list[OutputLocation]
    refused: Mapping[str, str]


def locations_of(access: JobAccess) -> Locations:
    """Return where a job's outputs are stored: in its own store, or at URIs chosen by the user."""
    folder = JobPaths(access.record.job).outputs
    uris = access.submission().get("outputs")
    if not isinstance(uris, dict):
        # The record is damaged, but the outputs in the job's own store can still be listed.
        return Locations([OutputLocation("outputs", access.store, f"{folder}/", True)], {})
    found: list[OutputLocation] = []
    refused: dict[str, str] = {}
    for name, uri in sorted(uris.items()):
        store: ObjectStore | None = access.store
        prefix = f"{folder}/{name}/"
        if not _is_own(access, uri, f"{folder}/{name}"):
            store, prefix = _opened(access, uri), ""
        if store is None:
            refused[name] = uri
        else:
            found.append(OutputLocation(name, store, prefix, access.backend.copies_files))
    return Locations(found, refused)


def _is_own(access: JobAccess, uri: str, folder: str) -> bool:
    """Whether an output is in the job's own store, which has another path on other machines."""
    if access.record.is_ours:
        return uri == access.store.uri(folder)
    return uri.endswith(f"/{folder}")


def _opened(access: JobAccess, uri: str) -> ObjectStore | None:
    """Open the place of an output; None if others have named it, and it must not be read."""
    full = with_store_options(uri, access.record.store)
    if access.record.is_ours:
        return access.open_store(full)
    with contextlib.suppress(StoreError):
        if _is_within_reach(uri, access.record.store):
            return access.open_store(full)
    return None


def _is_within_reach(uri: str, store_uri: str) -> bool:
    """Whether an output that others have named is at the service of the store that we named.

    It may be in another bucket there, but neither in a folder of this machine nor at a host or with
    credentials of their choice.
    """
    where, _, query = uri.partition("?")
    scheme, mark, _ = where.partition("://")
    theirs, ours = (set(parse_qsl(text)) for text in (query, store_uri.partition("?")[2]))
    is_bucket = bool(mark) and scheme in STORE_SECTIONS
    return is_bucket and store_uri.startswith(f"{scheme}://") and theirs <= ours


def find(location: OutputLocation) -> list[Output]:
    """Return the files named by the manifests of all nodes, sorted by name.

    Raises:
        StoreError: The store or a manifest cannot be read.
    """
    if location.is_listed:
        return _listed(location)
    found: dict[str, Output] = {}
    for node in _manifests(location):
        for kept in node.files:
            other = found.get(kept.name)
            digests = frozenset((kept.sha256,)) | (other.digests if other else frozenset())
            found[kept.name] = Output(
                f"{location.name}/{kept.name}",
                location.prefix + kept.key,
                kept.size_bytes,
                digests,
                kept.modified_ns,
                kept.is_incomplete or (other is not None and other.is_incomplete),
            )
    return [found[name] for name in sorted(found)]


def fetch(
    location: OutputLocation, folder: Path, *, on_progress: OnBytes = ignore_bytes
) -> list[Output]:
    """Copy the files of one output below ``folder`` and return them.

    All files belong to the same version of the output: if the job replaces it during the fetch, the
    new version is fetched.

    Args:
        on_progress: Called, from any thread, with the number of bytes of each step.

    Raises:
        StoreError: A file cannot be fetched, or does not match its manifest; all others were
            fetched if only files are lost.
    """
    fetched: dict[str, frozenset[str]] = {}
    files = find(location)
    for left in reversed(range(_ROUNDS)):
        try:
            _fetch_missing(location, files, folder, fetched, on_progress)
            return files
        except StoreError:
            before, files = files, find(location)
            if files == before or not left:
                raise
    raise AssertionError("the last round returns or raises")


def _listed(location: OutputLocation) -> list[Output]:
    return [
        Output(f"{location.name}/{key[len(location.prefix) :]}", key, 0, frozenset(), 0)
        for key in location.store.list(location.prefix)
        # Object stores accept keys that are not paths, such as "a/../b".
        if manifest.is_name(key[len(location.prefix) :])
    ]


def _manifests(location: OutputLocation) -> Iterable[Manifest]:
    folder = f"{location.prefix}{manifest.FOLDER}/"
    for key in sorted(location.store.list(folder + "node-")):
        if manifest.node_of(key[len(folder) :]) < 0:
            continue
        try:
            yield manifest.load(location.store.get_bytes(key))
        except manifest.ManifestError as error:
            raise StoreError(
                f"reading the output {location.name}: {location.store.uri(key)}: {error}",
                hint="was it written by another version of cloudjob?",
            ) from error


def _fetch_missing(
    location: OutputLocation,
    files: Iterable[Output],
    folder: Path,
    fetched: dict[str, frozenset[str]],
    on_progress: OnBytes,
) -> None:
    """Fetch the files that are not in ``fetched`` and add them to it; small files in parallel."""
    lost: dict[str, StoreError] = {}

    def fetch_one(file: Output) -> None:
        try:
            _fetch(location, file, folder / file.name, on_progress)
        except _OF_ONE_FILE as error:
            lost[file.name] = error
        else:
            fetched[file.name] = file.digests

    def write_one(item: tuple[str, bytes]) -> None:
        key, data = item
        file = tiny[key]
        _write(location, file, data, folder / file.name)
        on_progress(len(data))
        fetched[file.name] = file.digests

    missing = [file for file in files if fetched.get(file.name) != file.digests]
    # Only a manifest gives a file's size.
    known = [file for file in missing if file.digests and file.size_bytes <= _SMALL_BYTES]
    tiny = {file.key: file for file in known if file.size_bytes <= _TINY_BYTES}
    with contextlib.suppress(*_OF_ONE_FILE):
        # What this does not fetch because of another file is fetched one by one below.
        each = location.store.get_each(list(tiny), limit_bytes=_TINY_BYTES)
        consume_in_parallel(write_one, each)
    small = [file for file in known if file.size_bytes > _TINY_BYTES]
    in_parallel(fetch_one, small, abort=location.store.abort)
    rest = [file for file in missing if fetched.get(file.name) != file.digests]
    unfetched = [file for file in rest if file.name not in lost]
    in_parallel(fetch_one, [file for file in unfetched if file.key in tiny])
    for file in unfetched:
        if file.key not in tiny:
            fetch_one(file)
    if lost:
        raise _FilesLost({name: lost[name] for name in sorted(lost)})


def _fetch(location: OutputLocation, file: Output, path: Path, on_progress: OnBytes) -> None:
    """Fetch one file under a temporary name; rename it once its digest is verified."""
    fresh = path.with_name(f".cloudjob-tmp-{os.urandom(8).hex()}")
    with _writing(file, path):
        try:
            _make_folders(path.parent)
            location.store.fetch(file.key, fresh, on_progress=on_progress)
            if file.digests:
                _check(location, file, _digest(fresh))
            if file.modified_ns:
                os.utime(fresh, ns=(file.modified_ns, file.modified_ns))
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


def _write(location: OutputLocation, file: Output, data: bytes, path: Path) -> None:
    """Write the bytes of one file if their digest is right."""
    _check(location, file, hashlib.sha256(data).hexdigest())
    with _writing(file, path):
        # ``replacing`` would make private folders, as in a store; these follow the user's umask.
        _make_folders(path.parent)
        with replacing(path, is_durable=False) as target:
            target.write(data)
            target.flush()
            if file.modified_ns:
                os.utime(target.fileno(), ns=(file.modified_ns, file.modified_ns))


@contextlib.contextmanager
def _writing(file: Output, path: Path) -> Iterator[None]:
    """Turn ``OSError`` into an error that names the file and its destination."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"fetching {file.name} to {path}: {error.strerror}",
            hint="choose a folder that you may write to, on a disk with enough space",
        ) from error


def _make_folders(folder: Path) -> None:
    """Make a folder and its parents; ``Path.mkdir`` fails at a depth of about a thousand."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)


def _check(location: OutputLocation, file: Output, digest: str) -> None:
    if digest not in file.digests:
        raise _Damaged(
            f"fetching {file.name}: {location.store.uri(file.key)}: it does not match its manifest",
            hint="another node or job wrote to the same location; give each its own",
        )


def _digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            sha256.update(chunk)
    return sha256.hexdigest()
