"""Read the platform's rank table, waiting until it is complete."""

from __future__ import annotations

import json
import os
import time
from typing import Mapping

from jobentry.contract import names
from jobentry.errors import EntryError
from jobentry.launchers.rank_table import COMPLETED, PLATFORM_FOLDER
from jobentry.log import log_message

_NAMES = ("jobstart_hccl.json", "hccl.json")
_POLL_S = 0.2
_HINT = "list the devices in the job file (mindspore.devices), or start it with msrun"


def read(environ: Mapping[str, str], patience_s: float) -> str:
    """Return the platform's rank table as soon as it is complete.

    Raises:
        EntryError: After ``patience_s`` it is still missing or incomplete.
    """
    path = environ.get(names.RANK_TABLE_FILE) or PLATFORM_FOLDER
    deadline = time.monotonic() + patience_s
    is_reported = False
    while True:
        text, problem = _try_read(path)
        if not problem:
            return text
        if time.monotonic() > deadline:
            raise EntryError(
                f"waiting for the rank table: {path}: {problem} after {patience_s:g} s",
                hint=_HINT,
            )
        if not is_reported:
            log_message(f"waiting for the rank table: {path}: {problem}")
            is_reported = True
        time.sleep(_POLL_S)


def _try_read(location: str) -> tuple[str, str]:
    """Return the text of the table and the problem with it, empty if there is none."""
    paths = (
        [os.path.join(location, name) for name in _NAMES] if os.path.isdir(location) else [location]
    )
    path = next((path for path in paths if os.path.exists(path)), "")
    if not path:
        return "", "it does not exist"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        status = json.loads(text).get("status")
    except OSError as error:
        return "", str(error.strerror)
    except (ValueError, AttributeError):
        # It may be incomplete.
        return "", "it is not a JSON object"
    return text, "" if status == COMPLETED else f"its status is {status!r:.40}"
