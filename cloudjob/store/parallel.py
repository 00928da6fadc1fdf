"""Calls in threads: one function on many items in parallel, and a single call with a time limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

# The import takes milliseconds, and most commands call nothing in a thread.
if TYPE_CHECKING:
    from concurrent.futures import Future

_T = TypeVar("_T")
_R = TypeVar("_R")
# Results held in memory at a time, and items handed to a thread at a time.
_SLICE = 256
_BATCH = 64


def _in_thread(
    function: Callable[[], _R],
    on_result: Callable[[_R], None],
    on_error: Callable[[BaseException], None],
) -> threading.Thread:
    """Call ``function`` in a daemon thread, which does not delay the end of the process."""

    def call() -> None:
        try:
            on_result(function())
        except BaseException as error:  # noqa: BLE001 (raised where the result is read)
            on_error(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def start_call(function: Callable[[], _R]) -> Future[_R]:
    """Call ``function`` in a daemon thread and return a future for its result."""
    from concurrent.futures import Future

    result: Future[_R] = Future()
    # From here on the future cannot be cancelled, so its result can always be set.
    result.set_running_or_notify_cancel()
    _in_thread(function, result.set_result, result.set_exception)
    return result


def call_with_timeout(limit_s: float, function: Callable[[], _R]) -> _R:
    """Call ``function`` in a thread and return its result, waiting at most ``limit_s``.

    After a timeout, the call keeps running in its thread.

    Raises:
        TimeoutError: The function has not returned in time.
    """
    values: list[_R] = []
    errors: list[BaseException] = []
    _in_thread(function, values.append, errors.append).join(limit_s)
    if errors:
        raise errors.pop()
    if not values:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return values.pop()


def call_each_in_time(
    function: Callable[[_T], _R], items: Sequence[_T], *, limit_s: float, at_once: int
) -> list[Future[_R]]:
    """Call ``function`` in daemon threads for each item, and wait at most ``limit_s`` for all.

    Returns:
        A future for each item, in the order of the items; those that are not done were too slow.
        No further calls start, and those that are running do not delay the end of the process.
    """
    from concurrent.futures import Future, wait

    results: list[Future[_R]] = [Future() for _ in items]
    waiting = deque(zip(items, results, strict=True))

    def work() -> None:
        with suppress(IndexError):
            while True:
                item, result = waiting.popleft()
                try:
                    result.set_result(function(item))
                except Exception as error:  # noqa: BLE001 (raised where the result is read)
                    result.set_exception(error)

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True).start()
    wait(results, limit_s)
    waiting.clear()
    return results


def in_parallel(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    at_once: int = 16,
    abort: Callable[[], None] = lambda: None,
) -> list[_R]:
    """Return the result of ``function`` for each item, in the order of the items.

    After a failure, no further calls start; the error is raised when the running calls have ended.

    Args:
        abort: Called on Ctrl-C to end the running calls at once.
    """
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    with ThreadPoolExecutor(at_once) as pool:
        calls = [pool.submit(function, item) for item in items]
        try:
            for future in wait(calls, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in calls]
        except BaseException as error:
            for future in calls:
                future.cancel()
            if not isinstance(error, Exception):
                abort()
            raise


def iterate_in_parallel(
    function: Callable[[_T], _R], items: Sequence[_T], *, abort: Callable[[], None] = lambda: None
) -> Iterator[tuple[_T, _R]]:
    """Yield each item with the result of ``function`` for it, keeping few results in memory.

    Args:
        abort: Called on Ctrl-C to end the running calls at once.
    """
    for begin in range(0, len(items), _SLICE):
        batch = items[begin : begin + _SLICE]
        yield from zip(batch, in_parallel(function, batch, abort=abort), strict=True)


def consume_in_parallel(
    function: Callable[[_T], object], items: Iterator[_T], *, at_once: int = 16
) -> None:
    """Call ``function`` in threads for each item as the iterator yields it.

    Threads take items in batches, as passing a single item can cost more than the call. The first
    failure is raised, at the latest when all started calls have ended.
    """

    def call_each(batch: list[_T]) -> None:
        for item in batch:
            function(item)

    from concurrent.futures import ThreadPoolExecutor

    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        while batch := list(islice(items, _BATCH)):
            if len(pending) == at_once:
                pending.popleft().result()
            pending.append(pool.submit(call_each, batch))
        for future in pending:
            future.result()
