"""Fetch the code of a job, verify that it is what was sent, and move it into place as a whole.

Nothing is written until the manifests of all layers add up to the tree whose digest the job was
given. Each content is verified as it is written, into a new folder, which is moved into place only
when it is complete. Whatever a store contains, nothing is written outside that folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import posixpath
import zipfile
from typing import IO, Iterable, Iterator, Mapping, NamedTuple, Sequence

from jobentry import objects
from jobentry.contract import packages
from jobentry.contract.manifest import is_name
from jobentry.contract.packages import FILE, FOLDER, LINK, Entry, FormatError, name_bytes
from jobentry.contract.zip_layer import open_layer, refusing_bad_zip
from jobentry.errors import EntryError
from jobentry.objects.base import Progress, in_parallel, no_progress
from jobentry.system.trees import remove_tree

LIMIT_BYTES = 10 * 1024**3

_PIECE_BYTES = 1024 * 1024
_FETCHERS = 4
# Up to 64 nodes ask a store at the same moment. In a larger job, 100 nodes start each second, and
# the last ones after 30 seconds.
_AT_ONCE = 64
_TURNS_PER_S = 100
_LAST_TURN = 3000
# The longest target of a link that Linux can follow.
_TARGET_LIMIT_BYTES = 4095


class _DamagedError(FormatError):
    """A layer is not what was sent."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


def turn_s(node: int, nodes: int) -> float:
    """Return how long a node waits before it asks the store, so that not all ask at once.

    The nodes of a large job take turns from the start, rather than after the store refuses.
    """
    return 0.0 if nodes <= _AT_ONCE else min(node, _LAST_TURN) / _TURNS_PER_S


def fetch_code(
    uri: str,
    digest: str,
    folder: str,
    *,
    limit_bytes: int = LIMIT_BYTES,
    progress: Progress = no_progress,
) -> None:
    """Fetch a code package and make ``folder`` hold exactly its files.

    A folder that already exists (the container was restarted) is replaced as a whole, and stays
    unchanged if anything fails.

    Args:
        uri: The package's descriptor.
        digest: ``sha256:`` and the digest of the tree in hexadecimal.
        folder: Where the files go; the folder above it must be writable.
        limit_bytes: The most that all files together may take.
        progress: Called with the number of bytes of each step.

    Raises:
        EntryError: The package cannot be fetched, does not match ``digest`` or contains something
            that is never packed, or the file system refuses.
    """
    folder = os.path.abspath(folder)
    with _translated(uri, folder), contextlib.ExitStack() as opened:
        descriptor = packages.load_descriptor(objects.read(uri))
        if descriptor.digest != digest:
            raise EntryError(
                "verify code: %s: digest is %s, not %s" % (uri, descriptor.digest, digest)
            )
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        scratch = "%s.%s" % (folder, os.urandom(4).hex())
        opened.callback(_remove, scratch)
        os.mkdir(scratch, 0o700)
        uris = [packages.layer_uri(uri, each) for each in descriptor.layers]
        paths = _fetch_all(uris, scratch, progress)
        layers = [
            opened.enter_context(_opened(path, layer))
            for path, layer in zip(paths, descriptor.layers)
        ]
        fresh = posixpath.join(scratch, "code")
        _unpack(layers, digest, fresh, limit_bytes)
        _move_into_place(fresh, folder)


# ---- layers --------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """An open layer that has the expected manifest."""

    key: str
    archive: zipfile.ZipFile
    manifest: packages.Manifest


def _fetch_all(uris: Sequence[str], scratch: str, progress: Progress) -> list[str]:
    """Fetch the layers, several at a time; return their files."""
    paths, waiting = [], []
    for number, uri in enumerate(uris):
        # A layer in a local folder is read in place; its contents are verified, too.
        is_here = uri.startswith("file:")
        paths.append(objects.path_of(uri) if is_here else posixpath.join(scratch, str(number)))
        if not is_here:
            waiting.append(functools.partial(_fetch, uri, paths[-1], progress))
    for _ in in_parallel(waiting, _FETCHERS):
        pass
    return paths


def _fetch(uri: str, path: str, progress: Progress) -> None:
    try:
        objects.fetch(uri, path, progress=progress)
    except objects.ObjectDamaged as error:
        raise _DamagedError(packages.LAYERS + posixpath.basename(uri), str(error)) from error


@contextlib.contextmanager
def _opened(path: str, layer: packages.Layer) -> Iterator[_Layer]:
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(open(path, "rb"))
            layer_and_manifest = opened.enter_context(open_layer(file, layer.digest))
        except FormatError as error:
            raise _DamagedError(layer.key, str(error)) from error
        yield _Layer(layer.key, *layer_and_manifest)


# ---- checks before unpacking ---------------------------------------------------------------------


def _tree(layers: Sequence[_Layer], digest: str, limit_bytes: int) -> dict[str, Entry]:
    """Return the tree that the layers make, after verifying that it is the one that was sent."""
    tree = packages.merge(layer.manifest for layer in layers)
    actual = packages.tree_digest(tree.values())
    if actual != digest:
        raise EntryError("verify code: digest of the tree is %s, not %s" % (actual, digest))
    for entry in tree.values():
        problem = _problem(entry, tree)
        if problem:
            raise FormatError("%a %s" % (entry.name, problem))
    if sum(entry.size_bytes for entry in tree.values()) > limit_bytes:
        raise FormatError("more than %d bytes of files" % limit_bytes)
    return tree


def _problem(entry: Entry, tree: Mapping[str, Entry]) -> str:
    """Return what is wrong with an entry that ``cloudjob`` never packs, or ""."""
    name = entry.name
    if not is_name(name):
        return "is not a path below the folder"
    above = posixpath.dirname(name)
    # So nothing is ever written through a link or below a file.
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


def _unpack(layers: Sequence[_Layer], digest: str, fresh: str, limit_bytes: int) -> None:
    """Create the folder ``fresh``, whose name no other process knows, with all files."""
    tree = _tree(layers, digest, limit_bytes)
    root = os.fsencode(fresh)
    os.mkdir(root, 0o777)
    # The process's umask; ``os.umask`` would change it for a moment.
    withheld = 0o777 & ~os.stat(root).st_mode
    folders = sorted(
        (name_bytes(entry.name), entry.mode) for entry in tree.values() if entry.kind == FOLDER
    )
    for name, _ in folders:
        os.mkdir(root + b"/" + name, 0o700)
    _write_files(layers, tree, root, withheld)
    links = [entry for entry in tree.values() if entry.kind == LINK]
    for entry in links:
        os.symlink(name_bytes(entry.target), root + b"/" + name_bytes(entry.name))
    _check_links(root, links)
    # Last, and from the leaves up: a folder's mode may forbid its owner to write.
    for name, mode in reversed(folders):
        os.chmod(root + b"/" + name, mode)
    os.chmod(root, 0o755)


def _write_files(
    layers: Sequence[_Layer], tree: Mapping[str, Entry], root: bytes, withheld: int
) -> None:
    holders = {digest: layer for layer in layers for digest in layer.manifest.contents}
    for entry in tree.values():
        if entry.kind == FILE:
            if entry.digest not in holders:
                raise FormatError("the content %s is in no layer" % entry.digest)
            path = root + b"/" + name_bytes(entry.name)
            opener = functools.partial(os.open, mode=entry.mode)
            with open(path, "xb", opener=opener) as target:
                _write_content(holders[entry.digest], entry, target)
                if entry.mode & withheld:
                    os.fchmod(target.fileno(), entry.mode)


def _write_content(layer: _Layer, entry: Entry, target: IO[bytes]) -> None:
    """Write the content of a file, never more of it than the manifest announces."""
    sha256, rest = hashlib.sha256(), entry.size_bytes
    try:
        with refusing_bad_zip():
            source = layer.archive.open(layer.manifest.contents[entry.digest])
        with source:
            while rest:
                with refusing_bad_zip():
                    piece = source.read(min(rest, _PIECE_BYTES))
                if not piece:
                    break
                sha256.update(piece)
                rest -= len(piece)
                target.write(piece)
        if rest or sha256.hexdigest() != entry.digest:
            raise FormatError("a content is not the one with the digest %s" % entry.digest)
    except FormatError as error:
        raise _DamagedError(layer.key, str(error)) from error


def _check_links(root: bytes, links: Iterable[Entry]) -> None:
    """Refuse chains of links that leave the folder although the text of each link stays inside."""
    real_root = os.path.realpath(root)
    for entry in links:
        real = os.path.realpath(os.path.join(real_root, name_bytes(entry.name)))
        if not (real + b"/").startswith(real_root + b"/"):
            raise FormatError("link %a leaves the folder" % entry.name)


# ---- the folder ----------------------------------------------------------------------------------


def _move_into_place(fresh: str, folder: str) -> None:
    """Rename the new folder into place; an old one is removed only after that."""
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
    """Remove a file, or a folder with everything in it, even without write permission."""
    if os.path.isdir(path) and not os.path.islink(path):
        with contextlib.suppress(OSError):
            remove_tree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _translated(uri: str, folder: str) -> Iterator[None]:
    try:
        yield
    except objects.ObjectError as error:
        raise EntryError("fetching the code: %s" % error, hint=error.hint) from error
    except _DamagedError as error:
        # If the store cannot be written, the record of the job reports the damage.
        with contextlib.suppress(objects.ObjectError, OSError):
            objects.write(b"", packages.damage_uri(uri, error.key))
        what = error.key[: len(packages.LAYERS) + 12]
        raise EntryError(
            "unpacking the code: %s: %s is damaged: %s" % (uri, what, error),
            hint="submit again: the next submit sends this layer again",
            damaged_layers=(error.key,),
        ) from error
    except FormatError as error:
        raise EntryError("unpacking the code: %s: %s" % (uri, error)) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EntryError("unpacking the code: %s to %s: %s" % (uri, folder, reason)) from error
