"""The platform's rank table: found, and waited for until it is completed."""

from __future__ import annotations

import json
import os
import time
from typing import Mapping

from jobentry.launchers.rank_table import COMPLETED
from jobentry.log import say

_FOLDER = "/user/config"
_NAMES = ("jobstart_hccl.json", "hccl.json")
_POLL_S = 0.2


class TableError(Exception):
    """The platform gives no rank table."""

    hint = "list the devices in the job file (mindspore.devices), or start it with msrun"


def read(environ: Mapping[str, str], patience_s: float) -> str:
    """Return the platform's rank table, as soon as it is completed.

    Raises:
        TableError: It is not there, or not completed, after ``patience_s``.
    """
    place = environ.get("RANK_TABLE_FILE") or _FOLDER
    deadline = time.monotonic() + patience_s
    is_told = False
    while True:
        text, trouble = _look(place)
        if not trouble:
            return text
        if time.monotonic() > deadline:
            raise TableError(f"waiting for the rank table: {place}: {trouble} in {patience_s:g} s")
        if not is_told:
            say(f"waiting for the rank table: {place}: {trouble}")
            is_told = True
        time.sleep(_POLL_S)


def _look(place: str) -> tuple[str, str]:
    """Return the text of the table, and what is in the way of using it."""
    paths = [os.path.join(place, name) for name in _NAMES] if os.path.isdir(place) else [place]
    path = next((path for path in paths if os.path.exists(path)), "")
    if not path:
        return "", "not there"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        status = json.loads(text).get("status")
    except OSError as error:
        return "", str(error.strerror)
    except (ValueError, AttributeError):
        # Perhaps half written.
        return "", "no JSON object"
    return text, "" if status == COMPLETED else f"its status is {status!r:.40}"
