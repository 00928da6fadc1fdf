"""Reads a large source with all processors: a child each takes a part of the files.

Threads would do worse: most of the time goes into calls so short that they fight over the
interpreter. The bytes written do not depend on how many parts there are.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cloudjob.errors import PackageError
from cloudjob.package import contents
from cloudjob.package.contents import ChangedError, Read, Stored
from cloudjob.package.secrets import Finding, Searcher
from cloudjob.package.tree import Entry
from cloudjob.package.words import came_back, shown

# Less is read sooner than a child is started.
_LEAST_BYTES = 16 * 1024 * 1024
_LEAST_FILES = 1500
_MOST_PARTS = 8
_CHUNK_BYTES = 1024 * 1024
# What opening a file costs, in bytes that could be read meanwhile.
_FILE_BYTES = 20_000


def read(
    source: Path,
    entries: Sequence[Entry],
    destination: Path,
    *,
    is_compressed: bool,
    searcher: Searcher | None,
) -> Read:
    """Read files in order and make ``destination`` hold their bytes.

    Raises:
        ChangedError: A file is not what it was when the source was scanned.
        PackageError: A file cannot be read, or the destination cannot be written.
    """
    parts = _split(entries)
    if searcher is not None:
        searcher.prepare()
    begin, children = 0, []
    with writing(destination) as file:
        try:
            for number, part in enumerate(parts[1:], 1):
                begin += sum(entry.size_bytes for entry in parts[number - 1])
                # Where a content begins is known beforehand only when it is stored as it is.
                path = destination.with_name(f"{destination.name}.{number}")
                children.append(
                    _Child(source, part, path if is_compressed else destination, begin,
                           is_compressed, searcher)
                )  # fmt: skip
            result = contents.read(
                source, parts[0], file.write, is_compressed=is_compressed, searcher=searcher
            )
            for child in children:
                result = _joined(result, child.result())
                if is_compressed:
                    file.take(child.path)
        finally:
            for child in children:
                child.end()
    return result


def _split(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the files in stretches of about the same cost."""
    size_bytes = sum(entry.size_bytes for entry in entries)
    is_small = size_bytes < _LEAST_BYTES and len(entries) < _LEAST_FILES
    # A child of a process with threads could wait for a lock that nobody will ever release.
    if is_small or threading.active_count() > 1:
        return [list(entries)]
    count = min(len(os.sched_getaffinity(0)), _MOST_PARTS)
    share = (size_bytes + _FILE_BYTES * len(entries)) / count
    parts: list[list[Entry]] = [[]]
    taken = 0.0
    for entry in entries:
        if taken >= share * len(parts) and len(parts) < count:
            parts.append([])
        parts[-1].append(entry)
        taken += entry.size_bytes + _FILE_BYTES
    return parts


def _joined(first: Read, second: Read) -> Read:
    moved = [stored._replace(offset=stored.offset + first.size_bytes) for stored in second.stored]
    return Read(
        first.stored + moved,
        first.findings + second.findings,
        first.size_bytes + second.size_bytes,
    )


class _Child:
    """A child that reads a part of the files and writes their bytes to ``path``."""

    def __init__(
        self,
        source: Path,
        entries: Sequence[Entry],
        path: Path,
        begin: int,
        is_compressed: bool,
        searcher: Searcher | None,
    ) -> None:
        self.path = path
        self._is_own = is_compressed
        self._answer, answer = os.pipe()
        with warnings.catch_warnings():
            # It does nothing that could meet a lock of a library's own threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            os.close(self._answer)
            _run(answer, source, entries, path, 0 if is_compressed else begin,
                 is_compressed, searcher)  # fmt: skip
        os.close(answer)

    def result(self) -> Read:
        """Wait for the child and return what it read.

        Raises:
            PackageError: What stood in its way.
        """
        with os.fdopen(self._answer, "rb") as answer:
            self._answer = -1
            data = answer.read()
        if not data:
            raise PackageError("read source: a process that reads a part of it has been killed")
        value = pickle.loads(data)
        if isinstance(value, PackageError):
            raise value
        stored, findings, size_bytes = value
        return Read(
            [Stored(*each) for each in stored], [Finding(*each) for each in findings], size_bytes
        )

    def end(self) -> None:
        """Leave neither the child nor what it wrote."""
        if self._answer >= 0:
            os.close(self._answer)
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._process, 0)
        if self._is_own:
            self.path.unlink(missing_ok=True)


def _run(  # noqa: PLR0913 (as told)
    answer: int,
    source: Path,
    entries: Sequence[Entry],
    path: Path,
    begin: int,
    is_compressed: bool,
    searcher: Searcher | None,
) -> None:
    """Read a part, in the child; never return."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        value: object
        try:
            value = _read_part(source, entries, path, begin, is_compressed, searcher)
        except (ChangedError, PackageError) as error:
            value = error
        with os.fdopen(answer, "wb") as file:
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
    finally:
        # Nothing of the parent's is flushed, closed or removed by us.
        os._exit(0)


def _read_part(
    source: Path,
    entries: Sequence[Entry],
    path: Path,
    begin: int,
    is_compressed: bool,
    searcher: Searcher | None,
) -> object:
    with _translated(path), path.open("wb" if is_compressed else "r+b", buffering=0) as file:
        file.seek(begin)
        read = contents.read(
            source, entries, Whole(file).write, is_compressed=is_compressed, searcher=searcher
        )
    return (
        [tuple(each) for each in read.stored],
        [tuple(each) for each in read.findings],
        read.size_bytes,
    )


# ---- writing -------------------------------------------------------------------------------------


class Whole:
    """Writes all that it is given, or says why it cannot."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._path = file.name

    def write(self, data: memoryview | bytes) -> None:
        """Write all of ``data``."""
        rest = memoryview(data)
        while rest:
            with _translated(self._path):
                rest = rest[self._file.write(rest) :]

    def take(self, path: Path) -> None:
        """Write what a file holds."""
        with _translated(self._path), path.open("rb") as part:
            for chunk in iter(lambda: part.read(_CHUNK_BYTES), b""):
                self.write(chunk)


@contextmanager
def writing(destination: Path) -> Iterator[Whole]:
    """Open the layer and translate what the file system says; leave no half of one behind."""
    with _translated(destination):
        try:
            with destination.open("wb", buffering=0) as file:
                yield Whole(file)
        except BaseException:
            # A device that somebody named as destination is not ours to remove.
            if destination.is_file():
                destination.unlink()
            raise


@contextmanager
def appending(destination: Path) -> Iterator[Whole]:
    """Open a layer to go on at its end."""
    with _translated(destination), destination.open("ab", buffering=0) as file:
        yield Whole(file)


@contextmanager
def _translated(destination: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PackageError(
            f"write package: to {shown(destination)}: {came_back(error)}",
            hint="TMPDIR names another folder for it",
        ) from error
