"""Measure what looking for hangs costs a node: CPU time, and how often it looks.

``python -m benchmarks.standing [RANKS [SECONDS]]`` looks at RANKS idle Python processes for
SECONDS, as a node does, and prints one JSON object. It exits with 1 if it takes too much CPU time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from jobentry.contract.hangs import Standing
from jobentry.contract.paths import NodePaths
from jobentry.node.local_ranks import LocalRanks
from jobentry.node.standing import Reports, StandingRanks

CPU_LIMIT_PERCENT = 0.6
_PROGRAM = "import time\ndef wait(n): return wait(n - 1) if n else time.sleep(3600)\nwait(20)"


def main(ranks: int = 64, seconds: float = 120.0) -> int:
    """Measure, print, and return the exit code."""
    reports: list[list[Standing]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = NodePaths(*[folder] * 5)
        local = LocalRanks(paths)
        # The shell stands in for the wrapper of a rank, and its child for the program.
        argv = ["sh", "-c", '"$@" & echo $!; wait', "sh", sys.executable, "-c", _PROGRAM]
        idle = [
            subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
            for _ in range(ranks)
        ]
        for rank, process in enumerate(idle):
            assert process.stdout is not None
            local.handle_event(f"start {rank} {process.pid} {int(process.stdout.readline())}")
        standing = StandingRanks(local, paths, 0, Reports(reports.append, lambda shares: None))
        costs_s = _look(standing, seconds)
        for process in idle:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    figures = {
        "ranks": ranks,
        "looks": len(costs_s),
        "reported_ranks": len(reports[-1]) if reports else 0,
        "median_look_ms": round(1000 * sorted(costs_s)[len(costs_s) // 2], 3),
        "longest_look_ms": round(1000 * max(costs_s), 3),
        "cpu_percent": round(100 * sum(costs_s) / seconds, 3),
    }
    print(json.dumps(figures))
    return 0 if figures["cpu_percent"] <= CPU_LIMIT_PERCENT else 1


def _look(standing: StandingRanks, seconds: float) -> list[float]:
    """Look for so long, and return the CPU time of each look, in seconds."""
    costs_s = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(standing.pause_s)
        begun_s = time.thread_time()
        standing.look()
        costs_s.append(time.thread_time() - begun_s)
    return costs_s


if __name__ == "__main__":
    args = sys.argv[1:]
    sys.exit(main(int(args[0]) if args else 64, float(args[1]) if args[1:] else 120.0))
