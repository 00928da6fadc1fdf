"""Writes a layer: a zip file with the contents of files and a manifest as its last entry."""

from __future__ import annotations

import hashlib
import stat
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cloudjob.package.messages import writing
from jobentry.contract.packages import LAYERS, MANIFEST, Layer, Manifest, dump_manifest, zip_name

_LEVEL = 1
_SAMPLE_BYTES = 16 * 1024


class LayerFile:
    """A layer being written; a context manager that removes the file unless it was finished.

    Args:
        is_compressed: Deflate contents that shrink.
    """

    def __init__(self, path: Path, *, is_compressed: bool) -> None:
        self._path = path
        self._is_compressed = is_compressed
        self._is_finished = False
        self.contents: dict[str, str] = {}
        self.content_bytes = 0

    def __enter__(self) -> LayerFile:
        with writing(self._path):
            self._file = self._path.open("wb")
        self._zip = zipfile.ZipFile(self._file, "w")
        return self

    def __exit__(self, *_: object) -> None:
        with writing(self._path):
            if self._is_finished:
                self._file.close()
                return
        with suppress(OSError, ValueError):
            self._zip.close()
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, name: str, mode: int, digest: str, data: bytes) -> None:
        """Add the content of the file ``name``."""
        info = self._info(zip_name(name, digest), mode, data[:_SAMPLE_BYTES])
        with writing(self._path):
            self._zip.writestr(info, data, compresslevel=_LEVEL)
        self.contents[digest] = info.filename
        self.content_bytes += len(data)

    def add_pieces(
        self, name: str, mode: int, digest: str, size_bytes: int, pieces: Iterable[bytes]
    ) -> None:
        """Add the content of a file that is too large to be read at once."""
        rest = iter(pieces)
        first = next(rest)
        info = self._info(zip_name(name, digest), mode, first[:_SAMPLE_BYTES])
        info.file_size = size_bytes
        with writing(self._path), self._zip.open(info, "w") as target:
            target.write(first)
            for piece in rest:
                target.write(piece)
        self.contents[digest] = info.filename
        self.content_bytes += size_bytes

    def finish(self, manifest: Manifest) -> Layer:
        """Add the manifest, and return the layer's reference."""
        data = dump_manifest(manifest)
        info = self._info(MANIFEST, 0o644, data[:_SAMPLE_BYTES])
        with writing(self._path):
            self._zip.writestr(info, data, compresslevel=_LEVEL)
            self._zip.close()
            self._file.flush()
            size_bytes = self._file.tell()
        self._is_finished = True
        digest = hashlib.sha256(data).hexdigest()
        return Layer(LAYERS + digest, digest, size_bytes)

    def _info(self, name: str, mode: int, sample: bytes) -> zipfile.ZipInfo:
        # Without the time of the file, so that the same contents give the same bytes.
        info = zipfile.ZipInfo(name)
        info.create_system = 3  # Unix, for the mode
        info.external_attr = (stat.S_IFREG | mode) << 16
        if self._is_compressed and len(zlib.compress(sample, _LEVEL)) <= 0.9 * len(sample):
            info.compress_type = zipfile.ZIP_DEFLATED
        return info
