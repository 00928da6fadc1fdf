"""Linux system calls that Python does not provide."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from typing import Callable

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def prctl() -> Callable[[int, int], None]:
    """Return the function ``prctl(2)``, or one that does nothing on other systems.

    Call this before a fork, as nothing should be imported between fork and exec.
    """
    try:
        import ctypes

        found = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return lambda option, value: found(option, value, 0, 0, 0)
