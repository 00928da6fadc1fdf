"""Names the files that a script has written to its working folder, which is removed at the end."""

from __future__ import annotations

import os
import stat
import time

from jobentry.log import log_message, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

# Python's own, which a script does not know about.
_NOT_NAMED = "__pycache__"
# What else is in a larger folder is not searched.
_MOST_FILES = 50_000


class WorkingFolder:
    """The folder of the unpacked package, as it is before the script starts."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._since = time.time()

    def name_lost_files(self) -> None:
        """Log the largest file that was written since, and how to keep it."""
        written = sorted(
            (status.st_size, path)
            for path, status in _files(self._folder)
            if status.st_ctime > self._since and status.st_size
        )
        if written:
            size_bytes, path = written[-1]
            which = "" if len(written) == 1 else ", the largest of %d files" % len(written)
            log_message(
                "warning: written to the working folder and not kept: %s (%s%s)"
                % (ascii(os.path.relpath(path, self._folder)), size_text(size_bytes), which)
            )
            log_message(
                "hint: --output MODEL= keeps what the script writes to the folder in $MODEL"
            )


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    count = 0
    for inner, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != _NOT_NAMED]
        for name in names:
            count += 1
            if count > _MOST_FILES:
                return
            path = os.path.join(inner, name)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status
