"""Where cloudjob keeps its state on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudjob.errors import BackendError


def home() -> Path:
    """Return ``$CLOUDJOB_HOME``, by default the platform's data folder."""
    given = os.environ.get("CLOUDJOB_HOME")
    if given:
        return Path(given).absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("cloudjob", appauthor=False))


@contextmanager
def writing(doing: str, path: Path) -> Iterator[None]:
    """Translate what the disk has against ``doing`` something at ``path``, below our folder.

    Raises:
        BackendError: There is no room for it, or no right to write there.
    """
    try:
        yield
    except OSError as error:
        raise BackendError(
            f"{doing}: {error.filename or path}: {error.strerror or error}",
            hint="is there room, and may you write there? CLOUDJOB_HOME can point elsewhere",
        ) from error


def records_path(folder: Path) -> Path:
    """Return the file of the job records."""
    return folder / "records.db"


def store_uri(folder: Path) -> str:
    """Return the store that is used when none is named."""
    return (folder / "store").as_uri()
