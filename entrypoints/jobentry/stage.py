"""What is staged in the container before the ranks start: the code."""

from __future__ import annotations

import contextlib
import os
import posixpath
from typing import IO, TYPE_CHECKING, Iterator

from jobentry import objects

if TYPE_CHECKING:
    import tarfile

LIMIT_BYTES = 10 * 1024**3

_CHUNK_BYTES = 1024 * 1024
_FILE, _FOLDER, _LINK = "file", "folder", "link"


class StageError(Exception):
    """Code or outputs cannot be staged: *doing what: to which thing: what came back*."""


def fetch_code(uri: str, digest: str, folder: str) -> None:
    """Fetch a code package and make ``folder`` hold exactly its files.

    Raises:
        StageError: The package cannot be fetched, or is not what ``digest`` says.
    """
    archive = f"{os.path.abspath(folder)}.{os.urandom(4).hex()}.tar"
    try:
        try:
            objects.fetch(uri, archive)
        except objects.ObjectError as error:
            raise StageError(f"fetch code: {error}") from error
        unpack(archive, digest, folder)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(archive)


def unpack(archive: str, digest: str, folder: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
    """Make ``folder`` hold exactly what the archive holds, once its digest is verified.

    A folder that is there already (the container was restarted) is replaced as a whole, and is
    left alone when anything fails.

    Args:
        archive: An uncompressed tar, as ``cloudjob`` packs it.
        digest: ``sha256:`` and the digest in hexadecimal.
        folder: Where the files go; the folder above it must be writable.
        limit_bytes: The most that all files together may take.

    Raises:
        StageError: The digest differs, a member would leave the folder or is of a kind that is
            never packed, or the file system refuses.
    """
    folder = os.path.abspath(folder)
    with _translated(archive, folder), open(archive, "rb") as file:
        _check_digest(file, archive, digest)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        fresh = f"{folder}.new-{os.urandom(4).hex()}"
        os.mkdir(fresh, 0o755)
        try:
            _extract(file, archive, fresh, limit_bytes)
            _take_place(fresh, folder)
        finally:
            _remove(fresh)


def _check_digest(file: IO[bytes], archive: str, digest: str) -> None:
    import hashlib

    sha256 = hashlib.sha256()
    for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
        sha256.update(chunk)
    found = "sha256:" + sha256.hexdigest()
    if found != digest:
        raise StageError(f"verify code: {archive}: digest is {found}, not {digest}")
    # The same open file is unpacked: nobody can put another under its name in between.
    file.seek(0)


def _extract(file: IO[bytes], archive: str, fresh: str, limit_bytes: int) -> None:
    """Write every member below ``fresh``, an empty folder that nobody else knows of."""
    import tarfile

    kinds: dict[str, str] = {}
    modes: list[tuple[bytes, int]] = []
    room_bytes = limit_bytes
    try:
        with tarfile.open(
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as members:
            for member in members:
                _check(member, kinds, archive)
                room_bytes -= member.size
                if room_bytes < 0:
                    raise StageError(
                        f"unpack code: {archive}: more than {limit_bytes} bytes of files"
                    )
                path = os.path.join(os.fsencode(fresh), _bytes(member.name))
                _create(members, member, path)
                if not member.issym():
                    modes.append((path, member.mode & 0o777))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise StageError(f"unpack code: {archive}: {error}") from error
    _check_links(fresh, kinds, archive)
    # Last and from the leaves up: a folder may be one that its owner cannot write to.
    for path, mode in reversed(modes):
        os.chmod(path, mode)


def _check_links(fresh: str, kinds: dict[str, str], archive: str) -> None:
    """Refuse links that lead out in a chain, though the letters of each one stay inside."""
    root = os.path.realpath(os.fsencode(fresh))
    for name in (name for name, kind in kinds.items() if kind == _LINK):
        real = os.path.realpath(os.path.join(root, _bytes(name)))
        if not (real + b"/").startswith(root + b"/"):
            raise StageError(f"unpack code: {archive}: link {name!r} leaves the folder")


def _check(member: tarfile.TarInfo, kinds: dict[str, str], archive: str) -> None:
    """Refuse a member that ``cloudjob`` never packs, and note its kind."""
    fault = _fault(member, kinds)
    if fault:
        raise StageError(f"unpack code: {archive}: {member.name!r} {fault}")
    kinds[member.name] = _kind(member)


def _fault(member: tarfile.TarInfo, kinds: dict[str, str]) -> str:
    segments = member.name.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\0" in member.name:
        return "is not a path below the folder"
    if not _kind(member):
        return "is neither a file, a folder nor a symbolic link"
    if member.name in kinds:
        return "is there twice"
    # Folders come before what is in them, so nothing is ever written through a link.
    above = posixpath.dirname(member.name)
    if above and kinds.get(above) != _FOLDER:
        return "does not lie in a folder of the archive"
    if member.issym() and _leaves(member.name, member.linkname):
        return "is a link that leaves the folder"
    return ""


def _kind(member: tarfile.TarInfo) -> str:
    if member.isdir():
        return _FOLDER
    if member.issym():
        return _LINK
    # A sparse member is a regular file to tarfile, and terabytes out of nothing to the disk.
    return _FILE if member.isreg() and not member.issparse() else ""


def _leaves(name: str, target: str) -> bool:
    landing = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return not target or posixpath.isabs(target) or landing.split("/", 1)[0] == ".."


def _bytes(name: str) -> bytes:
    """Return a member's name as the laptop had it, whatever the locale of this container is."""
    return name.encode("utf-8", "surrogateescape")


def _create(members: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
    if member.isdir():
        os.mkdir(path, 0o700)
        return
    if member.issym():
        os.symlink(_bytes(member.linkname), path)
        return
    source = members.extractfile(member)
    assert source is not None, "a regular member has bytes"
    with open(path, "xb") as file:
        written = 0
        for chunk in iter(lambda: source.read(_CHUNK_BYTES), b""):
            written += file.write(chunk)
    if written != member.size:
        raise EOFError(f"{member.name!r} ends early")


def _take_place(fresh: str, folder: str) -> None:
    """Rename the new folder into place; the one there is gone only when the new one is."""
    if not os.path.lexists(folder):
        os.rename(fresh, folder)
        return
    old = f"{folder}.old-{os.urandom(4).hex()}"
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except OSError:
        os.rename(old, folder)
        raise
    _remove(old)


def _remove(path: str) -> None:
    """Remove a file, or a folder with everything in it, also where nobody may write."""
    import shutil

    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for parent, folders, _ in os.walk(path):
        for name in folders:
            if not os.path.islink(os.path.join(parent, name)):
                os.chmod(os.path.join(parent, name), 0o700)
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _translated(archive: str, folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StageError(f"unpack code: {archive} to {folder}: {_came_back(error)}") from error


def _came_back(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
