"""What is staged in the container: the outputs after the ranks have ended."""

from __future__ import annotations

import os
from typing import Iterator

from jobentry import objects


class StageError(Exception):
    """Outputs cannot be staged: *doing what: to which thing: what came back*."""


def upload(folder: str, uri: str) -> tuple[str, ...]:
    """Put every file below ``folder`` under the URI ``uri`` and return the objects' URIs.

    A link to a file is stored as that file; links to folders, pipes and sockets are passed over.

    Raises:
        StageError: Some files could not be stored; the others have been.
    """
    stored: list[str] = []
    faults: list[str] = []
    for name in sorted(_files_below(folder, faults)):
        target = objects.uri_below(uri, name)
        try:
            objects.put(os.path.join(folder, name), target)
        except objects.ObjectError as error:
            faults.append(str(error))
        else:
            stored.append(target)
    if faults:
        raise StageError(f"upload outputs: {folder}: {'; '.join(faults)}")
    return tuple(stored)


def _files_below(folder: str, faults: list[str]) -> Iterator[str]:
    """Yield the files' names relative to the folder; note the folders that cannot be read."""

    def note(error: OSError) -> None:
        faults.append(f"{error.filename}: {_came_back(error)}")

    for parent, _, names in os.walk(folder, onerror=note):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield os.path.relpath(path, folder)


def _came_back(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
