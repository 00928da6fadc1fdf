"""Python's cycle collector, stopped while the entries of a source are made.

They are tens of thousands of values in no cycle. Each time there are some more, the collector looks
at all of them: a quarter of the time of a pack, and in the children that read, a copy of each page
that it marks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped() -> Iterator[None]:
    """Switch the cycle collector off inside the block; it collects afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
