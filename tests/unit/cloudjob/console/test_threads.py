"""Tests of calls in threads that do not delay the exit of the console."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cloudjob.console.threads import in_thread


def test_a_call_returns_its_result_or_raises_its_error():
    async def calls() -> None:
        assert await in_thread(int, "7", base=8) == 7
        with pytest.raises(ValueError, match="invalid literal"):
            await in_thread(int, "x")

    asyncio.run(calls())


def test_a_hanging_call_delays_neither_other_calls_nor_the_exit():
    go = threading.Event()

    async def calls() -> int:
        hanging = [asyncio.create_task(in_thread(go.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        hanging[0].cancel()
        return await in_thread(lambda: 7)

    assert asyncio.run(calls()) == 7
    go.set()
