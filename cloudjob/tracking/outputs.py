"""Finds and fetches a job's outputs by its nodes' manifests, which list complete files only."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qsl

from cloudjob.errors import ObjectMissing, StoreError, UnreadableObject
from cloudjob.model import progress
from cloudjob.model.rules import VOLUME_SCHEMES
from cloudjob.model.text import one_line
from cloudjob.store import with_store_options
from cloudjob.store.base import ObjectStore, OnBytes, ignore_bytes
from cloudjob.store.parallel import consume_in_parallel, in_parallel
from cloudjob.tracking import download
from cloudjob.tracking.access import JobAccess
from jobentry.contract import manifest
from jobentry.contract.manifest import Contents, Others, StoredFile
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
# The errors of a name that this file system or the folder does not allow.
_OF_ONE_FILE = (
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.EILSEQ,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
)
# The number of lost files that an error names, and of notes on one output.
_NAMED = 5
_MOST_NOTES = 20
# A longer path leads to no file through a link.
_PATH_CHARS = 4096


class _BadFile(StoreError):
    """One file cannot be fetched; the others may be."""


# Errors of one file, which do not keep the others from being fetched.
_KEEPS_NO_OTHER = (ObjectMissing, UnreadableObject, _BadFile)


class _BadManifests(StoreError):
    """No manifest of an output can be read; other outputs can be."""


class _FilesLost(StoreError):
    """Files that cannot be fetched, although all others were.

    Args:
        lost: The error of each, by the name of the file.
    """

    def __init__(self, lost: Mapping[str, StoreError]) -> None:
        first = lost[min(lost)]
        message = first.message
        if len(lost) > 1:
            names = ", ".join(sorted(lost)[:_NAMED]) + (", …" if len(lost) > _NAMED else "")
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
        mode: Its permission bits; 0 if unknown.
        link: Where it leads to if it is a link, relative to its folder.
    """

    name: str
    key: str
    size_bytes: int
    digests: frozenset[str]
    modified_ns: int
    is_incomplete: bool = False
    mode: int = 0
    link: str = ""


class Stored(NamedTuple):
    """What is stored of an output.

    Args:
        others: What it has besides files.
        problems: Entries of manifests that cannot be read, as text for people.
    """

    files: list[Output]
    others: Others = Others()
    problems: tuple[str, ...] = ()


class Outputs(Collection[Output]):
    """The output files of a job that were stored when this was created."""

    def __init__(
        self, locations: Sequence[OutputLocation], refused: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._locations = locations
        # Outputs at URIs that are not read, by name: see ``Locations``.
        self.refused = refused
        stored = read_each(locations)
        self._files = tuple(file for _, each in stored for file in each.files)
        self._notes = tuple(note for location, each in stored for note in _notes(location, each))

    def __iter__(self) -> Iterator[Output]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, file: object) -> bool:
        return file in self._files

    def __repr__(self) -> str:
        return f"Outputs({[file.name for file in self._files]})"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not stored, or not as it was, in words for people."""
        return self._notes

    def read(self, file: Output) -> Iterator[bytes]:
        """Yield the content of one file in pieces; the last one only if the digest is right.

        Raises:
            StoreError: It cannot be read, or does not match its manifest.
        """
        location = next(each for each in self._locations if file.name.startswith(f"{each.name}/"))
        sha256 = hashlib.sha256()
        held, start = b"", 0
        check_size = _size_check(location, file)
        while piece := location.store.get_range(file.key, start, _PIECE_BYTES):
            if held:
                yield held
            sha256.update(piece)
            check_size(len(piece))
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
            except _BadManifests as error:
                lost[location.name] = error
        if lost:
            raise _FilesLost(lost)
        return fetched


class Locations(NamedTuple):
    """Where the outputs of a job are stored.

    Args:
        refused: Outputs at URIs that are not read, by name: a description of others must not
            choose them, or only pods reach them.
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
    readable: list[OutputLocation] = []
    refused: dict[str, str] = {}
    for name, uri in sorted(uris.items()):
        store: ObjectStore | None = access.store
        prefix = f"{folder}/{name}/"
        if not _is_own(access, uri, f"{folder}/{name}"):
            store, prefix = _opened(access, uri), ""
        if store is None:
            refused[name] = uri
        else:
            readable.append(OutputLocation(name, store, prefix, access.backend.copies_files))
    return Locations(readable, refused)


def _is_own(access: JobAccess, uri: str, folder: str) -> bool:
    """Whether an output is in the job's own store, which has another path on other machines."""
    if access.record.is_ours:
        return uri == access.store.uri(folder)
    return uri.endswith(f"/{folder}")


def _opened(access: JobAccess, uri: str) -> ObjectStore | None:
    """Open the place of an output; None if it must not or cannot be read from here.

    It must not if others have named it, and it cannot if it is a volume in a cluster.
    """
    if uri.partition("://")[0] in VOLUME_SCHEMES:
        return None
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


def read_each(locations: Iterable[OutputLocation]) -> list[tuple[OutputLocation, Stored]]:
    """Read several outputs; one whose manifests cannot be read does not hide the others.

    Raises:
        StoreError: The store cannot be read, or none of the outputs can.
    """
    stored: list[tuple[OutputLocation, Stored]] = []
    bad: list[_BadManifests] = []
    for location in locations:
        try:
            stored.append((location, _read(location)))
        except _BadManifests as error:
            bad.append(error)
            stored.append((location, Stored([], problems=(error.message,))))
    if bad and len(bad) == len(stored):
        raise bad[0]
    return stored


def _read(location: OutputLocation) -> Stored:
    if location.is_listed:
        return Stored(_listed(location))
    files: dict[str, Output] = {}
    links: dict[str, str] = {}
    folders: dict[str, int] = {}
    left_out: dict[str, str] = {}
    modes: dict[str, int] = {}
    problems: list[str] = []
    for node in _manifests(location, problems):
        problems += node.refused
        for kept in node.manifest.files:
            files[kept.name] = _merged(location, kept, files.get(kept.name))
        modes = {**node.others.modes, **modes}
        links = {**node.others.links, **links}
        folders = {**node.others.folders, **folders}
        left_out = {**node.others.left_out, **left_out}
    for name, file in files.items():
        target = links.get(name, "")
        is_link = bool(target) and _is_there(name, target, files, links)
        files[name] = file._replace(mode=modes.get(name, 0), link=target if is_link else "")
    links = {name: target for name, target in links.items() if name not in files}
    others = Others(links, modes, folders, left_out)
    return Stored([files[name] for name in sorted(files)], others, tuple(problems))


def _is_there(name: str, target: str, files: Collection[str], links: Collection[str]) -> bool:
    """Whether a link to a file leads to one that is fetched, too, perhaps through other links."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if path in files or len(path) > _PATH_CHARS:
        return path in files
    return any(path[:at] in links for at in range(len(path)) if path[at] == "/")


def _merged(location: OutputLocation, kept: StoredFile, other: Output | None) -> Output:
    """Return a file that a node has stored, and perhaps another node before it."""
    digests = frozenset((kept.sha256,)) | (other.digests if other else frozenset())
    return Output(
        f"{location.name}/{kept.name}",
        location.prefix + kept.key,
        max(kept.size_bytes, other.size_bytes if other else 0),
        digests,
        kept.modified_ns,
        kept.is_incomplete or (other is not None and other.is_incomplete),
    )


def _notes(location: OutputLocation, stored: Stored) -> Iterator[str]:
    """Yield a line for each thing that was not stored, or not as it was."""
    left_out = sorted(stored.others.left_out.items())
    notes = [
        f"{location.name}/{name} is not kept: {manifest.REASONS[why]}" for name, why in left_out
    ]
    notes += (f"reading the output {location.name}: {problem}" for problem in stored.problems)
    yield from (one_line(note) for note in notes[:_MOST_NOTES])
    if len(notes) > _MOST_NOTES:
        yield f"{location.name}: {len(notes) - _MOST_NOTES} more notes of this kind"


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
    stored = _read(location)
    for left in reversed(range(_ROUNDS)):
        try:
            _fetch_missing(location, stored.files, folder, fetched, on_progress)
        except StoreError:
            before, stored = stored, _read(location)
            if stored == before or not left:
                _add_others(location, stored.others, folder)
                raise
            continue
        _add_others(location, stored.others, folder)
        return stored.files
    raise AssertionError("the last round returns or raises")


def _listed(location: OutputLocation) -> list[Output]:
    """Return the objects that are files: an empty one with objects below it is a folder."""
    keys = [
        key
        for key in location.store.list(location.prefix)
        # Object stores accept keys that are not paths, such as "a/../b".
        if manifest.is_name(key[len(location.prefix) :])
    ]
    folders = {key[:at] for key in keys for at in range(len(key)) if key[at] == "/"}
    return [
        Output(f"{location.name}/{key[len(location.prefix) :]}", key, 0, frozenset(), 0)
        for key in keys
        if key not in folders or _has_contents(location.store, key)
    ]


def _has_contents(store: ObjectStore, key: str) -> bool:
    # SeaweedFS lists the empty object in the place of a folder, and then does not have it.
    with contextlib.suppress(ObjectMissing):
        return bool(store.get_range(key, 0, 1))
    return False


def _manifests(location: OutputLocation, problems: list[str]) -> Iterable[Contents]:
    """Yield the manifests of all nodes; one that cannot be read does not hide the others.

    Raises:
        StoreError: The store cannot be read, or no manifest can.
    """
    refused: list[_BadManifests] = []
    is_empty = True
    for contents in _all_manifests(location):
        if isinstance(contents, _BadManifests):
            refused.append(contents)
            problems.append(contents.message)
        else:
            is_empty = False
            yield contents
    if refused and is_empty:
        raise refused[0]


def _all_manifests(location: OutputLocation) -> Iterator[Contents | _BadManifests]:
    folder = f"{location.prefix}{manifest.FOLDER}/"
    for key in sorted(location.store.list(folder + "node-")):
        if manifest.node_of(key[len(folder) :]) < 0:
            continue
        try:
            yield manifest.load_valid(location.store.get_bytes(key))
        except UnreadableObject as error:
            yield _BadManifests(f"reading the output {location.name}: {error}", hint=error.hint)
        except manifest.ManifestError as error:
            yield _BadManifests(
                f"reading the output {location.name}: {location.store.uri(key)}: {error}",
                hint="was it written by another version of cloudjob?",
            )


def _fetch_missing(
    location: OutputLocation,
    files: Iterable[Output],
    folder: Path,
    fetched: dict[str, frozenset[str]],
    on_progress: OnBytes,
) -> None:
    """Fetch the files that are not in ``fetched`` and add them to it; small files in parallel.

    Raises:
        StoreError: Some files cannot be fetched; all others are.
    """
    bad: dict[str, StoreError] = {}

    def attempt(file: Output, act: Callable[[], None]) -> None:
        try:
            act()
            fetched[file.name] = file.digests
        except _KEEPS_NO_OTHER as error:
            bad[file.name] = error

    def fetch_one(file: Output) -> None:
        attempt(file, lambda: _fetch(location, file, folder, on_progress))

    def write_one(item: tuple[str, bytes]) -> None:
        key, data = item
        attempt(tiny[key], lambda: _write(location, tiny[key], data, folder))
        on_progress(len(data))

    missing = [file for file in files if fetched.get(file.name) != file.digests]
    # Only a manifest gives a file's size.
    fetchable = [f for f in missing if f.digests and not f.link and f.size_bytes <= _SMALL_BYTES]
    tiny = {file.key: file for file in fetchable if file.size_bytes <= _TINY_BYTES}
    # A bad object ends this; the rest is fetched below.
    with contextlib.suppress(*_KEEPS_NO_OTHER):
        each = location.store.get_each(list(tiny), limit_bytes=_TINY_BYTES)
        consume_in_parallel(write_one, each)
    small = [file for file in fetchable if file.size_bytes > _TINY_BYTES]
    in_parallel(fetch_one, small, abort=location.store.abort)
    for file in missing:
        if fetched.get(file.name) != file.digests and file.name not in bad:
            fetch_one(file)
    if bad:
        raise _FilesLost(bad)


def _fetch(location: OutputLocation, file: Output, folder: Path, on_progress: OnBytes) -> None:
    """Fetch one file under a temporary name; rename it once its digest is verified."""
    if file.link:
        with _writing(file, folder):
            download.link(folder, file.name, file.link)
        return
    with _writing(file, folder), download.file(folder, file.name) as fresh:
        check_size = _size_check(location, file)

        def step(moved_bytes: int) -> None:
            check_size(moved_bytes)
            on_progress(moved_bytes)

        location.store.fetch(file.key, fresh, on_progress=step)
        if file.digests:
            _check(location, file, _digest(fresh))
        download.set_metadata(fresh, file.mode, file.modified_ns)


def _write(location: OutputLocation, file: Output, data: bytes, folder: Path) -> None:
    """Write the bytes of one file if their digest is right."""
    _check(location, file, hashlib.sha256(data).hexdigest())
    with _writing(file, folder), download.file(folder, file.name) as fresh:
        fresh.write_bytes(data)
        download.set_metadata(fresh, file.mode, file.modified_ns)


def _add_others(location: OutputLocation, others: Others, folder: Path) -> None:
    """Make the folders and links of an output, as far as there is nothing else in their place."""
    for name, target in others.links.items():
        with contextlib.suppress(OSError):
            download.link(folder, f"{location.name}/{name}", target, replaces=False)
    # The innermost folders first: a folder that forbids to write is changed after its contents.
    for name in sorted(others.folders, reverse=True):
        with contextlib.suppress(OSError):
            download.folder(folder, f"{location.name}/{name}", others.folders[name])


@contextlib.contextmanager
def _writing(file: Output, folder: Path) -> Iterator[None]:
    """Turn ``OSError`` into an error that names the file and its destination."""
    try:
        yield
    except OSError as error:
        kind = _BadFile if error.errno in _OF_ONE_FILE else StoreError
        raise kind(
            f"fetching {file.name} to {folder / file.name}: {error.strerror}",
            hint="choose a folder that you may write to, on a disk with enough space",
        ) from error


def _size_check(location: OutputLocation, file: Output) -> Callable[[int], None]:
    """Return a function that takes the bytes of each step of a fetch, and ends one without end.

    Others may write to the store: what is larger than its manifest says must not fill the disk.
    """
    moved_bytes = 0

    def check(step_bytes: int) -> None:
        nonlocal moved_bytes
        moved_bytes += step_bytes
        if file.digests and moved_bytes > file.size_bytes:
            raise _mismatch(
                location, file, f"it has more than the {file.size_bytes:,} bytes of its manifest"
            )

    return check


def _check(location: OutputLocation, file: Output, digest: str) -> None:
    if digest not in file.digests:
        raise _mismatch(location, file, "it does not match its manifest")


def _mismatch(location: OutputLocation, file: Output, why: str) -> _BadFile:
    return _BadFile(
        f"fetching {file.name}: {location.store.uri(file.key)}: {why}",
        hint="another node or job wrote to the same location; give each its own",
    )


def _digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            sha256.update(chunk)
    return sha256.hexdigest()
