"""Processor and memory usage of nodes, in percent."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from cloudjob.backends.docker import engine
from cloudjob.backends.process.keeper import descendants_of
from cloudjob.errors import BackendError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def of_process(
    keeper: int, name: str, known: dict[str, tuple[float, float]]
) -> tuple[float, float]:
    """Return processor and memory usage of all processes below ``keeper``.

    Args:
        name: The name of the node in ``known``.
        known: The time and processor time at the last call for each node; it is updated.
    """
    if not keeper or not Path(f"/proc/{keeper}").exists():
        return -1.0, -1.0
    used_s, memory = 0.0, 0
    for process in descendants_of(keeper):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # A program's name may contain spaces and brackets; the last bracket ends the name.
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            used_s += sum(int(fields[index]) for index in (11, 12, 13, 14)) / _TICKS_PER_S
            memory += int(fields[21]) * _PAGE_BYTES
    now = time.monotonic()
    before, at = known.get(name, (0.0, 0.0))
    known[name] = (used_s, now)
    cores = os.cpu_count() or 1
    cpu = max(0.0, used_s - before) / (now - at) / cores * 100 if at else 0.0
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    return round(min(cpu, 100.0), 2), round(memory / total * 100, 2)


def of_container(client: Any, container: str) -> tuple[float, float]:
    """Return processor and memory usage of a container, as the engine measures it."""
    try:
        with engine.translate_errors("asking what a node uses"):
            found = client.stats(container, stream=False)
    except BackendError:
        return -1.0, -1.0
    cpu, before = found["cpu_stats"], found["precpu_stats"]
    span = cpu.get("system_cpu_usage", 0) - before.get("system_cpu_usage", 0)
    used = cpu["cpu_usage"]["total_usage"] - before["cpu_usage"]["total_usage"]
    memory = found.get("memory_stats") or {}
    share = memory.get("usage", 0) / memory["limit"] * 100 if memory.get("limit") else -1.0
    return round(used / span * 100 if span > 0 else 0.0, 2), round(share, 2)
