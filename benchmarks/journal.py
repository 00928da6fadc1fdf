"""Measure the cost of a node's journal: CPU time, and bytes in the log.

``python -m benchmarks.journal [RANKS [SECONDS]]`` samples RANKS idle processes for SECONDS, as a
node does, and prints one JSON object. It exits with 1 if a limit of ADR 45 does not hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from jobentry.contract.paths import NodePaths
from jobentry.node import journal
from jobentry.node.local_ranks import LocalRanks

CPU_LIMIT_PERCENT = 0.5
HOUR_LIMIT_BYTES = 200_000
_HOUR_S = 3600.0


def main(ranks: int = 8, seconds: float = 60.0) -> int:
    """Measure, print, and return the exit code."""
    lines: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = NodePaths(*[folder] * 5)
        local = LocalRanks(paths)
        # The shell stands in for the wrapper of a rank, and its child for the program.
        argv = ["sh", "-c", "sleep 3600; true"]
        idle = [subprocess.Popen(argv, start_new_session=True) for _ in range(ranks)]
        for rank, process in enumerate(idle):
            local.handle_event(f"start {rank} {process.pid} {process.pid}")
        node_journal = journal.Journal(lines.append)
        node_journal.watch(local, paths)
        begun_s, spent_s = time.monotonic(), time.process_time()
        node_journal.start()
        time.sleep(seconds)
        spent_s, took_s = time.process_time() - spent_s, time.monotonic() - begun_s
        node_journal.finish()
        for process in idle:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    figures = {
        "ranks": ranks,
        "samples": len(lines),
        "cpu_percent": round(100 * spent_s / took_s, 3),
        "line_bytes": max(len(line) for line in lines),
        "hour_bytes": round(_hour_bytes(max(len(line) for line in lines))),
    }
    print(json.dumps(figures))
    is_cheap = figures["cpu_percent"] <= CPU_LIMIT_PERCENT
    return 0 if is_cheap and figures["hour_bytes"] <= HOUR_LIMIT_BYTES else 1


def _hour_bytes(line_bytes: int) -> float:
    """Return what an hour of samples of this size adds to the log."""
    age_s = written = 0.0
    while age_s < _HOUR_S:
        written += line_bytes
        age_s += journal.pause_s(age_s, written, cost_s=0.0)
    return written


if __name__ == "__main__":
    args = sys.argv[1:]
    sys.exit(main(int(args[0]) if args else 8, float(args[1]) if args[1:] else 60.0))
