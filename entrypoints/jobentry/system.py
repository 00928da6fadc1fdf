"""Of the operating system what every rank needs, by ways that cost a start next to nothing.

``signal`` names its numbers for people, which takes five milliseconds, and ``ctypes`` takes four.
Both stand on modules of C that CPython and PyPy have had for years; without those, they are used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from typing import Any, Callable

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER


def _signals() -> Any:
    try:
        import _signal  # type: ignore[import-not-found]
    except ImportError:
        import signal as _signal
    return _signal


def prctl() -> Callable[[int, int], None]:
    """Return what sets an attribute of this process (prctl(2)); elsewhere it does nothing.

    Looked up by who will fork, as between fork and exec nothing should be imported.
    """
    return _light() or _ordinary() or (lambda option, value: None)


def _light() -> Callable[[int, int], None] | None:
    try:
        from _ctypes import call_function, dlopen, dlsym

        found = dlsym(dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    except (ImportError, OSError):
        return None
    return lambda option, value: call_function(found, (option, value, 0, 0, 0))


def _ordinary() -> Callable[[int, int], None] | None:
    try:
        import ctypes

        found = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    return lambda option, value: found(option, value, 0, 0, 0)


signal = _signals()
