"""Calls that may block, in threads that do not keep the console from ending."""

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

    ``asyncio.to_thread`` has a thread or two for each CPU, which the jobs of one platform that does
    not answer would occupy, and waits for all of them at the end.
    """
    return await asyncio.wrap_future(start_call(partial(function, *args, **kwargs)))
