"""``moxing.file.File``: a file in OBS that can be read and written like a local one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from typing import IO, Any, Callable, Iterator

from jobentry import objects
from moxing.framework.file.locations import Location, is_remote, missing, translated

_MODES = ("r", "w", "a", "r+", "w+", "a+")


class File:
    """An open file; one in OBS is a temporary copy, which ``flush`` and ``close`` upload."""

    def __init__(self, name: Any, mode: str = "r", *_: Any, **options: Any) -> None:
        self.name, self.mode = name, mode
        self._uri = ""
        options.pop("client_id", None)
        self._file: IO[Any] = (
            self._copy(Location(name), options) if is_remote(name) else open(name, mode, **options)
        )

    def _copy(self, location: Location, options: dict[str, Any]) -> IO[Any]:
        how = self.mode.replace("b", "").replace("t", "")
        if how not in _MODES:
            raise ValueError(f"opening {location.url}: invalid mode {self.mode!r}")
        if location.is_named_folder:
            raise IsADirectoryError(f"opening {location.url}: it is a folder")
        descriptor, path = tempfile.mkstemp(prefix="moxing-")
        os.close(descriptor)
        try:
            with translated("opening", location.url):
                if how[0] != "w" and location.file():
                    objects.fetch(location.uri, path)
                elif how[0] == "r":
                    raise missing(location.url)
            text_options = {
                name: options[name] for name in ("encoding", "errors") if name in options
            }
            if "b" not in self.mode:
                text_options.setdefault("encoding", "utf-8")
            file: IO[Any] = open(path, self.mode, **text_options)
        finally:
            os.unlink(path)
        self._uri = "" if how == "r" else location.uri
        return file

    def _upload(self) -> None:
        self._file.flush()
        if self._uri:
            with translated("writing", self.name):
                # The temporary file is already unlinked, so it has no path of its own.
                objects.put(f"/proc/self/fd/{self._file.fileno()}", self._uri)

    def flush(self) -> None:
        """Write buffered data to the file, and upload it if the file is in OBS."""
        self._upload()

    def close(self) -> None:
        """Close the file; in OBS it is complete from then on."""
        if not self._file.closed:
            try:
                self._upload()
            finally:
                self._file.close()

    def size(self) -> int:
        """Return the number of bytes."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def __getattr__(self, name: str) -> Any:
        if name == "_file":  # it could not be opened
            raise AttributeError(name)
        attribute = getattr(self._file, name)
        # ``File(url).read()`` drops the last reference to the file before the call, so keep one.
        return partial(_call, self, attribute) if callable(attribute) else attribute

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __next__(self) -> Any:
        return next(self._file)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # As with ``open``, a file that is dropped without ``close`` is still written.
        with contextlib.suppress(AttributeError):
            self.close()


def _call(_file: File, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return method(*args, **options)
