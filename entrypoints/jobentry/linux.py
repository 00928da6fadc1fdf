"""Linux calls for which Python has no function."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from typing import Callable

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def prctl() -> Callable[[int, int], None]:
    """Return what sets an attribute of this process (prctl(2)); elsewhere it does nothing.

    Look it up before a fork: between fork and exec nothing should be imported.
    """
    try:
        import ctypes

        found = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return lambda option, value: found(option, value, 0, 0, 0)
