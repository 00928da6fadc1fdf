"""Open a layer of a package, and refuse any zip file that ``cloudjob`` does not write.

The laptop uses this to check a layer before reusing it, and a node to unpack one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import zipfile
import zlib
from typing import IO, Iterator

from jobentry.contract import packages
from jobentry.contract.packages import MANIFEST, FormatError, Manifest

_UTF8_NAME = 0x800
_LOCAL_HEADER_BYTES = 30
_END_RECORD = struct.Struct("<4s16sH")
# The exceptions of ``zipfile`` for a file that is not a zip file, or is damaged.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, NotImplementedError,
    MemoryError, OverflowError, RuntimeError, ValueError,
)  # fmt: skip


def has_manifest(file: IO[bytes], digest: str) -> bool:
    """Whether the layer in ``file`` has the manifest with this digest.

    Raises:
        FormatError: It is not a zip file that ``cloudjob`` writes.
    """
    with refusing_bad_zip():
        _check_end(file)
        with zipfile.ZipFile(file) as archive:
            return hashlib.sha256(_manifest(archive)).hexdigest() == digest


@contextlib.contextmanager
def open_layer(file: IO[bytes], digest: str) -> Iterator[tuple[zipfile.ZipFile, Manifest]]:
    """Open the layer in ``file``, which must have this digest and contain nothing else.

    Raises:
        FormatError: It does not, or it is a zip file that ``cloudjob`` does not write.
    """
    with refusing_bad_zip():
        _check_end(file)
        archive = zipfile.ZipFile(file)
    with archive:
        with refusing_bad_zip():
            _check_entries(archive)
            data = _manifest(archive)
        actual = hashlib.sha256(data).hexdigest()
        if actual != digest:
            raise FormatError("its manifest has the digest %s, not %s" % (actual, digest))
        manifest = packages.load_manifest(data)
        if {*manifest.contents.values(), MANIFEST} != set(archive.namelist()):
            raise FormatError("its manifest and the zip file list different entries")
        yield archive, manifest


@contextlib.contextmanager
def refusing_bad_zip() -> Iterator[None]:
    """Turn the exceptions of ``zipfile`` into a ``FormatError``."""
    try:
        yield
    except _ZIP_ERRORS as error:
        raise FormatError("not a valid zip file: %r" % error) from error
    except OSError as error:
        # EINVAL means a seek to an impossible offset in the file; anything else is a disk error.
        if error.errno != errno.EINVAL:
            raise
        raise FormatError("not a valid zip file: a wrong offset") from error


def _manifest(archive: zipfile.ZipFile) -> bytes:
    info = archive.getinfo(MANIFEST)
    if info.file_size > packages.MANIFEST_LIMIT_BYTES:
        raise FormatError("its manifest is too long")
    with archive.open(info) as source:
        # Read no more than the zip file declares; without a limit, everything would be inflated.
        return source.read(info.file_size)


def _check_end(file: IO[bytes]) -> None:
    """Refuse a file with bytes after the zip directory, which ``zipfile`` would skip."""
    if file.seek(0, os.SEEK_END) < _END_RECORD.size:
        raise FormatError("not a zip file")
    file.seek(-_END_RECORD.size, os.SEEK_END)
    mark, _, comment_bytes = _END_RECORD.unpack(file.read(_END_RECORD.size))
    if mark != b"PK\5\6" or comment_bytes:
        raise FormatError("it does not end where a zip file ends")


def _check_entries(archive: zipfile.ZipFile) -> None:
    """Refuse entries that ``cloudjob`` never writes, that overlap, or that leave hidden bytes."""
    infos = archive.infolist()
    if len(set(archive.namelist())) != len(infos):
        raise FormatError("an entry is listed twice")
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.flag_bits & ~_UTF8_NAME:
            raise FormatError("entry %a is encrypted or has unknown flags" % info.filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError("entry %a is compressed by an unknown method" % info.filename)
        if info.header_offset < end or (end == 0 and info.header_offset):
            raise FormatError(
                "entry %a does not begin where the one before it ends" % info.filename
            )
        end = info.header_offset + _LOCAL_HEADER_BYTES + info.compress_size
        end += len(info.orig_filename.encode("utf-8"))
    if end > archive.start_dir:
        raise FormatError("its entries overlap its directory")
