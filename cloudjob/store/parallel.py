"""Calls in other threads: the same for many things at a time, and one call with a time limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
# What each of so many gives is in memory at a time.
_SLICE = 256
_HANDED_OVER = 64


def within(limit_s: float, function: Callable[[], _R]) -> _R:
    """Return what ``function`` returns, and do not wait longer than ``limit_s`` for it.

    It goes on in a thread that does not delay the end of the process.

    Raises:
        TimeoutError: It has not returned in time.
    """
    found: Future[_R] = Future()

    def call() -> None:
        try:
            found.set_result(function())
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return found.result(limit_s)
    except FutureTimeout as error:
        if found.done():
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


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


def each_in_parallel(
    function: Callable[[_T], _R], items: Sequence[_T], *, abort: Callable[[], None] = lambda: None
) -> Iterator[tuple[_T, _R]]:
    """Yield each item with what ``function`` gives for it; not all of that at a time.

    Args:
        abort: Called on Ctrl-C, so that what is under way ends at once.
    """
    for begin in range(0, len(items), _SLICE):
        some = items[begin : begin + _SLICE]
        yield from zip(some, in_parallel(function, some, abort=abort), strict=True)


def as_they_come(
    function: Callable[[_T], object], items: Iterator[_T], *, at_once: int = 16
) -> None:
    """Call ``function`` for each item, in other threads, so that slow calls do not hold up items.

    Many items at a time go to a thread: one by one that would cost more than a quick call. The
    first failure is raised, at the latest when all that were handed over have ended.
    """

    def each(some: list[_T]) -> None:
        for item in some:
            function(item)

    pending = deque[Future[None]]()
    with ThreadPoolExecutor(at_once) as pool:
        while some := list(islice(items, _HANDED_OVER)):
            if len(pending) == at_once:
                pending.popleft().result()
            pending.append(pool.submit(each, some))
        for future in pending:
            future.result()
