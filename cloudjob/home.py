"""Where cloudjob keeps its state on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return ``$CLOUDJOB_HOME``, by default the platform's data folder."""
    given = os.environ.get("CLOUDJOB_HOME")
    if given:
        return Path(given).absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("cloudjob", appauthor=False))


def records_path(folder: Path) -> Path:
    """Return the file of the job records."""
    return folder / "records.db"


def store_uri(folder: Path) -> str:
    """Return the store that is used when none is named."""
    return (folder / "store").as_uri()
