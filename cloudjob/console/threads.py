"""Runs calls that may block in threads that do not delay the end of the console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from cloudjob.store.parallel import start_call

_P = ParamSpec("_P")
_R = TypeVar("_R")


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return the result of a call in a thread of its own.

    ``asyncio.to_thread`` has only one or two threads per CPU, which jobs of a platform that does
    not answer would occupy, and it waits for all of them at the end.
    """
    return await asyncio.wrap_future(start_call(partial(function, *args, **kwargs)))
