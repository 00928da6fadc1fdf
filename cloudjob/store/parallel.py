"""Does the same to many things at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_parallel(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    at_once: int = 16,
    abort: Callable[[], None] = lambda: None,
) -> list[_R]:
    """Return what ``function`` gives for each item, in the order of the items.

    The first failure is raised when what is under way has ended; the rest is not begun.

    Args:
        abort: Called on Ctrl-C, so that what is under way ends at once.
    """
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        except BaseException as error:
            for future in futures:
                future.cancel()
            if not isinstance(error, Exception):
                abort()
            raise
