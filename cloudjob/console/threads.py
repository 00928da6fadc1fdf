"""Calls that may block, in threads that do not keep the console from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return the result of a call in a thread of its own.

    ``asyncio.to_thread`` has a thread or two for each CPU, which the jobs of one platform that does
    not answer would occupy, and waits for all of them at the end.
    """
    found: Future[_R] = Future()
    # From here on the future cannot be cancelled, so its result can always be set.
    found.set_running_or_notify_cancel()

    def call() -> None:
        try:
            found.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 (raised in the caller's task)
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(found)
