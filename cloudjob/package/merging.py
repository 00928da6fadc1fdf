"""Decides which layers to merge, so that they stay few and an edit sends little. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

# Bytes that an edit may send again besides the edited files.
_CHEAP_BYTES = 48 * 1024
_MAX_LAYERS = 12
# Fewer dead bytes than this are not worth sending everything again.
_DEAD_BYTES = 1024 * 1024


def merged(live_bytes: Sequence[int], dead_bytes: int, new_bytes: int) -> int:
    """Return how many of the newest layers to merge into a new one of ``new_bytes``.

    Small layers are always merged. If too many layers would still remain, more are merged until
    each remaining one is at least as large as everything above it; so the bytes that many edits
    send again grow with the logarithm of the total. If more than a third of the bytes that a node
    fetches are unused, everything is packed again.

    Args:
        live_bytes: The size of the contents of each layer that the tree uses, from the oldest on.
        dead_bytes: The size of the contents that it no longer uses.
    """
    if dead_bytes > max(_DEAD_BYTES, (sum(live_bytes) + new_bytes) // 2):
        return len(live_bytes)
    taken, taken_bytes = 0, 0
    for size_bytes in reversed(live_bytes):
        if taken_bytes + size_bytes > _CHEAP_BYTES:
            break
        taken += 1
        taken_bytes += size_bytes
    if len(live_bytes) - taken < _MAX_LAYERS:
        return taken
    taken_bytes += new_bytes
    for size_bytes in list(reversed(live_bytes))[taken:]:
        if size_bytes >= taken_bytes and len(live_bytes) - taken < _MAX_LAYERS:
            break
        taken += 1
        taken_bytes += size_bytes
    return taken
