"""Reading and parsing the files of scripts."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloudjob.submission import scripts


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let another thread run each time that the garbage collector starts, and start it often."""
    threshold = gc.get_threshold()

    def switch(*_: object) -> None:
        time.sleep(0.001)

    gc.callbacks.append(switch)
    gc.set_threshold(200)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(switch)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_parse_scripts_at_the_same_time():
    source = b"x = (1, [2, {3: f(4)}])\n" * 300

    with ThreadPoolExecutor(4) as threads:
        trees = list(threads.map(scripts.parse, [source] * 8))

    assert [len(tree.body) for tree in trees] == [300] * 8
