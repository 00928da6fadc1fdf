"""What cloudjob needs from the file system of ``$CLOUDJOB_HOME``, and whether a folder has it.

Network and FUSE file systems may be mounted without locks (NFS without a lock daemon, Lustre
without ``flock``), and lack hard links or renames (object stores, FAT).
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from cloudjob.home import locks
from cloudjob.retries import WaitNotices

# With these errors, a system call is not supported; EPERM is what Linux returns for hard links.
UNSUPPORTED = frozenset(
    (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EINVAL)
)
_POLL_S = 0.5
_ELSEWHERE = "set CLOUDJOB_HOME to a folder on a local disk"
UNANSWERED = "is the server of this folder up? `df` on it shows whether it answers"
_HINT = f"{_ELSEWHERE}, or mount this one with locks"


def missing_feature(folder: Path) -> tuple[str, str] | None:
    """Return what the file system of an existing folder lacks, and a hint; None for nothing.

    A folder in which no file can be created lacks nothing: the error of its use says more.
    """
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as scratch:
        what, hint = "", _ELSEWHERE
        try:
            path, other = Path(scratch, "file"), Path(scratch, "other")
            path.write_bytes(b"x")
            other.write_bytes(b"x")
            what, hint = "locks", _HINT
            with path.open("r+b") as file:
                # Both kinds: SQLite's belong to a process, ours to an open file.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_UN)
                locks.is_held(path)
                what, hint = "way to make files durable (fsync)", _ELSEWHERE
                os.fsync(file.fileno())
            what = "hard links"
            os.link(path, f"{path}-linked")
            what = "renames that replace a file"
            # Not by a hard link to it, which Linux would leave as it is.
            other.replace(path)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if what and not is_full:
                return f"its file system has no {what} ({error.strerror})", hint
    return None


def watch(folder: Path) -> None:
    """Look at a folder in a thread, and log as long as its file system does not answer.

    NFS without its server keeps the caller in the kernel, where Ctrl-C does nothing.
    """
    since_s = time.monotonic()
    has_answered = threading.Event()

    def look() -> None:
        with suppress(OSError):
            os.lstat(folder)
        has_answered.set()

    def report() -> None:
        notices = WaitNotices()
        while not has_answered.wait(_POLL_S):
            notices.report(
                since_s, f"the file system of {folder} does not answer", "waiting for it"
            )

    for work in (look, report):
        threading.Thread(target=work, daemon=True).start()
