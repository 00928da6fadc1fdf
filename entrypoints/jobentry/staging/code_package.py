"""The code of a job: fetched, proven to be what was sent, and put into place as a whole.

Nothing is written before the indices of all layers together make the tree whose digest the job was
given. Then each content is checked as it is written, into a fresh folder that takes its place only
when it is complete. Whatever a store may hold, nothing is written outside that folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import zlib
from typing import Iterable, Iterator, NamedTuple, Sequence

from jobentry import objects
from jobentry.contract import packages
from jobentry.contract.packages import (
    BELOW,
    FILE,
    FOLDER,
    FOOTER_BYTES,
    LINK,
    RAW,
    Content,
    Entry,
    FormatError,
    Index,
    name_bytes,
)
from jobentry.trees import remove_tree

LIMIT_BYTES = 10 * 1024**3

_WINDOW_BYTES = 4 * 1024 * 1024
_FETCHERS = 4
# Less is not worth a thread.
_PART_BYTES = 8 * 1024 * 1024
_MOST_PARTS = 4
# So many nodes may ask a store at one moment; of more, so many in a second, up to a last turn.
_AT_ONCE = 64
_TURNS_PER_S = 100
_LAST_TURN = 3000
# What making a file costs, in bytes that could be written meanwhile.
_FILE_BYTES = 20_000
# The longest text of a link that Linux can follow.
_TARGET_LIMIT_BYTES = 4095


class UnpackError(Exception):
    """Code cannot be unpacked: *doing what: to which thing: what came back*.

    Args:
        hint: What to try.
        damaged_layers: The keys of the layers that are damaged in the store.
    """

    def __init__(self, message: str, hint: str = "", damaged_layers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self.damaged_layers = damaged_layers


class _DamagedError(FormatError):
    """A layer is not what was sent."""

    def __init__(self, key: str, fault: str) -> None:
        super().__init__(fault)
        self.key = key


def turn_s(node: int, nodes: int) -> float:
    """Return how long a node waits before it asks the store, so that not all ask at one moment.

    The nodes of a large job take turns, as their retries would, but before the store refuses.
    """
    return 0.0 if nodes <= _AT_ONCE else min(node, _LAST_TURN) / _TURNS_PER_S


def fetch_code(uri: str, digest: str, folder: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
    """Fetch a code package and make ``folder`` hold exactly its files.

    A folder that is there already (the container was restarted) is replaced as a whole, and is
    left alone when anything fails.

    Args:
        uri: The package's descriptor.
        digest: ``sha256:`` and the digest of the tree in hexadecimal.
        folder: Where the files go; the folder above it must be writable.
        limit_bytes: The most that all files together may take.

    Raises:
        UnpackError: The package cannot be fetched or is not what ``digest`` says, it holds what is
            never packed, or the file system refuses.
    """
    folder = os.path.abspath(folder)
    with _translated(uri, folder), contextlib.ExitStack() as opened:
        descriptor = packages.load_descriptor(objects.read(uri))
        if descriptor.digest != digest:
            raise UnpackError(
                "verify code: %s: digest is %s, not %s" % (uri, descriptor.digest, digest)
            )
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        scratch = "%s.%s" % (folder, os.urandom(4).hex())
        opened.callback(_remove, scratch)
        os.mkdir(scratch, 0o700)
        uris = [packages.layer_uri(uri, layer) for layer in descriptor.layers]
        paths = _fetch_all(uris, scratch)
        layers = [
            opened.enter_context(_Layer.open(path, layer))
            for path, layer in zip(paths, descriptor.layers)
        ]
        fresh = posixpath.join(scratch, "code")
        _unpack(layers, digest, fresh, limit_bytes)
        _take_place(fresh, folder)


# ---- fetching ------------------------------------------------------------------------------------


def _fetch_all(uris: Sequence[str], scratch: str) -> list[str]:
    """Bring the layers here, several at a time; return their files."""
    paths, waiting = [], []
    for number, uri in enumerate(uris):
        # A folder of this machine is read where it is: each content is checked all the same.
        is_here = uri.startswith("file:")
        paths.append(objects.path_of(uri) if is_here else posixpath.join(scratch, str(number)))
        if not is_here:
            waiting.append((uri, paths[-1]))
    if len(waiting) > 1:
        _fetch_at_once(waiting)
    for uri, path in waiting:
        _fetch(uri, path)
    return paths


def _fetch(uri: str, path: str) -> None:
    try:
        objects.fetch(uri, path)
    except objects.ObjectDamaged as error:
        raise _DamagedError(packages.LAYERS + posixpath.basename(uri), str(error)) from error


def _fetch_at_once(waiting: list[tuple[str, str]]) -> None:
    """Fetch all that waits, and take it away."""
    import threading

    faults = []  # type: list[BaseException]

    def work() -> None:
        while not faults:
            try:
                uri, path = waiting.pop()
            except IndexError:
                return
            try:
                _fetch(uri, path)
            except BaseException as error:  # noqa: BLE001 (told to who waits)
                faults.append(error)

    # A node that is cancelled meanwhile does not wait for the store.
    count = min(_FETCHERS, len(waiting))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


class _Layer:
    """An open layer whose index is the one that was asked for."""

    def __init__(self, descriptor: int, key: str, index: Index) -> None:
        self._descriptor = descriptor
        self.key = key
        self.index = index

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str, layer: packages.Layer) -> Iterator[_Layer]:
        """Open a layer.

        Raises:
            FormatError: Its index is not the one that the layer is named for.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                index = _index(descriptor, layer.digest)
            except FormatError as error:
                raise _DamagedError(layer.key, str(error)) from error
            yield cls(descriptor, layer.key, index)
        finally:
            os.close(descriptor)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` bytes."""
        return _read(self._descriptor, offset, size_bytes)

    def damaged(self, content: Content) -> FormatError:
        """Return the error for a content that is not what was sent."""
        fault = "a content is not the one with the digest %s" % content.digest
        return _DamagedError(self.key, fault)

    def read_some(self, offset: int, most_bytes: int) -> bytes:
        """Return what is there, which is less at the end of the layer."""
        return os.pread(self._descriptor, most_bytes, offset)


def _index(descriptor: int, digest: str) -> Index:
    size_bytes = os.fstat(descriptor).st_size
    tail = _read(descriptor, max(0, size_bytes - FOOTER_BYTES), FOOTER_BYTES)
    footer = packages.load_footer(tail, size_bytes)
    stored = _read(descriptor, footer.offset, footer.stored_bytes)
    data = packages.decode_index(stored, footer)
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise FormatError("its index has the digest %s, not %s" % (found, digest))
    index = packages.load_index(data)
    for content in index.contents:
        if content.offset + content.stored_bytes > footer.offset:
            raise FormatError("a content ends behind the last one")
    return index


def _read(descriptor: int, offset: int, size_bytes: int) -> bytes:
    data = os.pread(descriptor, size_bytes, offset)
    while len(data) < size_bytes:
        more = os.pread(descriptor, size_bytes - len(data), offset + len(data))
        if not more:
            raise FormatError("it ends early")
        data += more
    return data


# ---- what may be unpacked ------------------------------------------------------------------------


def _tree(layers: Sequence[_Layer], digest: str, limit_bytes: int) -> dict[str, Entry]:
    """Return the tree that the layers make, once it is proven to be the one that was sent."""
    tree = packages.merge([layer.index for layer in layers])
    found = packages.tree_digest(tree.values())
    if found != digest:
        raise UnpackError("verify code: digest of the tree is %s, not %s" % (found, digest))
    for entry in tree.values():
        fault = _fault(entry, tree)
        if fault:
            raise FormatError("%a %s" % (entry.name, fault))
    if sum(entry.size_bytes for entry in tree.values()) > limit_bytes:
        raise FormatError("more than %d bytes of files" % limit_bytes)
    return tree


def _fault(entry: Entry, tree: dict[str, Entry]) -> str:
    """Return what is wrong with an entry that ``cloudjob`` never packs, or ""."""
    name = entry.name
    if "\0" in name or any(segment in ("", ".", "..") for segment in name.split("/")):
        return "is not a path below the folder"
    above = posixpath.dirname(name)
    # Nothing is ever written through a link, nor through what is a file.
    if above and (above not in tree or tree[above].kind != FOLDER):
        return "does not lie in a folder of the package"
    if entry.kind == LINK and _leaves(name, entry.target):
        return "is a link that leaves the folder"
    return ""


def _leaves(name: str, target: str) -> bool:
    if not target or "\0" in target or len(name_bytes(target)) > _TARGET_LIMIT_BYTES:
        return True
    landing = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return posixpath.isabs(target) or landing.split("/", 1)[0] == ".."


# ---- unpacking -----------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a content lies, and where it goes: paths and modes."""

    layer: _Layer
    content: Content
    targets: list[tuple[bytes, int]]


def _unpack(layers: Sequence[_Layer], digest: str, fresh: str, limit_bytes: int) -> None:
    """Make ``fresh``, which nobody else knows of, and everything in it."""
    tree = _tree(layers, digest, limit_bytes)
    root = os.fsencode(fresh)
    os.mkdir(root, 0o777)
    # What the process takes from every mode; asking for it in any other way would change it.
    withheld = 0o777 & ~os.stat(root).st_mode
    folders = sorted(
        (name_bytes(entry.name), entry.mode) for entry in tree.values() if entry.kind == FOLDER
    )
    for name, _ in folders:
        os.mkdir(root + b"/" + name, 0o700)
    _write_all(_places(layers, tree, root), withheld)
    links = [entry for entry in tree.values() if entry.kind == LINK]
    for entry in links:
        os.symlink(name_bytes(entry.target), root + b"/" + name_bytes(entry.name))
    _check_links(root, links)
    # Last and from the leaves up: a folder may be one that its owner cannot write to.
    for name, mode in reversed(folders):
        os.chmod(root + b"/" + name, mode)
    os.chmod(root, 0o755)


def _places(layers: Sequence[_Layer], tree: dict[str, Entry], root: bytes) -> list[_Place]:
    """Return all contents that are wanted, in the order that they lie in the layers."""
    targets = {}  # type: dict[tuple[str, int], list[tuple[bytes, int]]]
    for entry in tree.values():
        if entry.kind == FILE:
            target = (root + b"/" + name_bytes(entry.name), entry.mode)
            targets.setdefault((entry.digest, entry.size_bytes), []).append(target)
    places = []
    for layer in layers:
        for content in sorted(layer.index.contents, key=lambda content: content.offset):
            if content.offset != BELOW:
                wanted = targets.pop((content.digest, content.size_bytes), None)
                if wanted:
                    places.append(_Place(layer, content, wanted))
    if targets:
        raise FormatError("the content %s is in no layer" % next(iter(targets))[0])
    return places


def _write_all(places: Sequence[_Place], withheld: int) -> None:
    """Write all contents, with several threads where that pays.

    Reading, hashing and writing leave the interpreter to others. Children would be quicker still,
    but one of a process with threads, as the entry is by now, may wait for a lock for ever.
    """
    parts = _split(places)
    faults = []  # type: list[BaseException]

    def work(part: Sequence[_Place]) -> None:
        try:
            _write_part(part, withheld)
        except BaseException as error:  # noqa: BLE001 (told to who waits)
            faults.append(error)

    if len(parts) == 1:
        _write_part(places, withheld)
        return
    import threading

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _split(places: Sequence[_Place]) -> list[Sequence[_Place]]:
    """Return the contents in stretches of about the same cost."""
    costs = [place.content.size_bytes + _FILE_BYTES for place in places]
    whole = sum(costs)
    count = min(len(os.sched_getaffinity(0)), _MOST_PARTS, whole // _PART_BYTES)
    if count < 2:
        return [places]
    parts, begin, cost = [], 0, 0  # type: list[Sequence[_Place]], int, int
    for number, each in enumerate(costs, 1):
        cost += each
        if cost >= whole * (len(parts) + 1) // count and len(parts) < count - 1:
            parts.append(places[begin:number])
            begin = number
    return [*parts, places[begin:]]


def _write_part(places: Iterable[_Place], withheld: int) -> None:
    """Write contents in the order that they lie in their layers, reading megabytes at a time."""
    source, window, begin = None, memoryview(b""), 0
    for place in places:
        content = place.content
        if max(content.stored_bytes, content.size_bytes) > _WINDOW_BYTES:
            _write_large(place, withheld)
            continue
        end = content.offset + content.stored_bytes
        if source is not place.layer or content.offset < begin or end > begin + len(window):
            source, begin = place.layer, content.offset
            window = memoryview(source.read_some(begin, _WINDOW_BYTES))
        stored = window[content.offset - begin : end - begin]
        data = stored if content.encoding == RAW else _inflated(place.layer, content, stored)
        if len(data) != content.size_bytes or hashlib.sha256(data).hexdigest() != content.digest:
            raise place.layer.damaged(content)
        for path, mode in place.targets:
            descriptor = _create(path, mode, withheld)
            try:
                if os.write(descriptor, data) != len(data):
                    os.lseek(descriptor, 0, os.SEEK_SET)
                    _write(descriptor, data)
            finally:
                os.close(descriptor)


def _write_large(place: _Place, withheld: int) -> None:
    """Write a content piece by piece to its first target, and copy it from there to the others."""
    (path, mode), others = place.targets[0], place.targets[1:]
    sha256, rest = hashlib.sha256(), place.content.size_bytes
    with _created(path, mode, withheld) as descriptor:
        for piece in _pieces(place.layer, place.content):
            rest -= len(piece)
            if rest < 0:
                raise place.layer.damaged(place.content)
            sha256.update(piece)
            _write(descriptor, piece)
    if rest or sha256.hexdigest() != place.content.digest:
        raise place.layer.damaged(place.content)
    for other, other_mode in others:
        with open(path, "rb") as source, _created(other, other_mode, withheld) as descriptor:
            for piece in iter(lambda: source.read(_WINDOW_BYTES), b""):
                _write(descriptor, piece)


def _pieces(layer: _Layer, content: Content) -> Iterator[bytes]:
    """Yield a content in pieces that are never larger than a window."""
    inflater = None if content.encoding == RAW else zlib.decompressobj()
    for offset in range(content.offset, content.offset + content.stored_bytes, _WINDOW_BYTES):
        end = min(offset + _WINDOW_BYTES, content.offset + content.stored_bytes)
        stored = layer.read(offset, end - offset)
        if inflater is None:
            yield stored
            continue
        while stored:
            try:
                yield inflater.decompress(stored, _WINDOW_BYTES)
            except zlib.error as error:
                raise layer.damaged(content) from error
            stored = inflater.unconsumed_tail
            if inflater.eof and stored:
                raise layer.damaged(content)


def _inflated(layer: _Layer, content: Content, stored: memoryview) -> bytes:
    try:
        return packages.inflate(stored, content.size_bytes)
    except FormatError as error:
        raise layer.damaged(content) from error


@contextlib.contextmanager
def _created(path: bytes, mode: int, withheld: int) -> Iterator[int]:
    descriptor = _create(path, mode, withheld)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _create(path: bytes, mode: int, withheld: int) -> int:
    """Make a file that was not there before, with this very mode, and open it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    if mode & withheld:
        os.fchmod(descriptor, mode)
    return descriptor


def _write(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _check_links(root: bytes, links: Iterable[Entry]) -> None:
    """Refuse links that lead out in a chain, though the letters of each one stay inside."""
    real_root = os.path.realpath(root)
    for entry in links:
        real = os.path.realpath(os.path.join(real_root, name_bytes(entry.name)))
        if not (real + b"/").startswith(real_root + b"/"):
            raise FormatError("link %a leaves the folder" % entry.name)


# ---- the folder ----------------------------------------------------------------------------------


def _take_place(fresh: str, folder: str) -> None:
    """Rename the new folder into place; the one there is gone only when the new one is."""
    if not os.path.lexists(folder):
        os.rename(fresh, folder)
        return
    old = "%s.old-%s" % (folder, os.urandom(4).hex())
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        os.rename(old, folder)
        raise
    _remove(old)


def _remove(path: str) -> None:
    """Remove a file, or a folder with everything in it, also where nobody may write."""
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    with contextlib.suppress(OSError):
        remove_tree(path)


def _mark(uri: str, key: str) -> None:
    """Mark a layer as damaged; where that is not possible, the record of the job reports it."""
    with contextlib.suppress(objects.ObjectError, OSError):
        objects.write(b"", packages.damage_uri(uri, key))


@contextlib.contextmanager
def _translated(uri: str, folder: str) -> Iterator[None]:
    try:
        yield
    except objects.ObjectError as error:
        raise UnpackError("fetch code: %s" % error, error.hint) from error
    except _DamagedError as error:
        _mark(uri, error.key)
        what = packages.LAYERS + error.key[len(packages.LAYERS) :][:12]
        raise UnpackError(
            "unpack code: %s: %s is damaged: %s" % (uri, what, error),
            "submit again: the next submit sends this layer again",
            (error.key,),
        ) from error
    except FormatError as error:
        raise UnpackError("unpack code: %s: %s" % (uri, error)) from error
    except OSError as error:
        came_back = (error.strerror or str(error)).lower()
        raise UnpackError("unpack code: %s to %s: %s" % (uri, folder, came_back)) from error
