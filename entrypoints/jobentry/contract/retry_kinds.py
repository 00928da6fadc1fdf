"""The kinds of failures of a job, in the words of ``retry.on``: after some it is tried again."""

from __future__ import annotations

from enum import Enum


class Kind(str, Enum):
    """The kind of a failure."""

    # The script ended as Python does after an exception (1), or because of its arguments (2).
    USER = "user"
    # The script ended with another exit code, by which it may ask for another attempt.
    EXIT = "exit"
    # A signal ended the script.
    CRASH = "crash"
    # A node was lost, or its processes were killed.
    PLATFORM = "platform"
    # A store or another node could not be reached.
    NETWORK = "network"
    HANG = "hang"
    # Somebody else stopped the job: the platform needs its nodes.
    PREEMPTED = "preempted"
    # cloudjob's own part failed, as for a program that is not there.
    ENTRY = "entry"
    # The kinds below are never tried again, and are no words of ``retry.on``.
    DISK = "disk"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    # Versions of Python format a mixed-in enum differently; this returns the plain word in all.
    def __str__(self) -> str:
        return self.value


NEVER = (Kind.DISK, Kind.TIMEOUT, Kind.CANCELLED)
WORDS = tuple(kind.value for kind in Kind if kind not in NEVER)
# Those that a platform can notice by itself.
OF_PLATFORM = frozenset((Kind.PLATFORM.value, Kind.HANG.value, Kind.PREEMPTED.value))
# A plain number of retries: an exception of the script would only be raised once more.
DEFAULT = tuple(word for word in WORDS if word != Kind.USER.value)
