"""A simulated job with very many nodes: the real entry on the head, and simulated workers.

Each worker has its own loopback address, where a simulation answers like a worker's entry. So
everything that the head does is real, from its start to its record.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Command, Failed
from benchmarks.simulated import address
from benchmarks.subject import Bench
from benchmarks.venv import ROOT, NotRun

FIGURES = ("bring_up_s", "wall_s", "head_cpu_s", "head_ms")
_PLAYERS = ROOT / "benchmarks" / "simulated"


def bring_up(bench: Bench, count: int) -> dict[str, float]:
    """Run a job with ``count`` workers; return the start-up time and the resources of the head.

    Raises:
        NotRun: This machine allows too few open files.
        Failed: The job failed.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most < 4 * count:
        raise NotRun(f"{count} workers need {4 * count} open files, and {most} are allowed")
    if bench.zipapp is None:
        raise NotRun("no zipapp: scripts/build_zipapp.py did not make one; give --zipapp")
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        key = folder / "key"
        key.write_text("the key of the job")
        args = (str(count), str(port), str(key), str(folder / "node" / "entry"))
        argv = (sys.executable, str(_PLAYERS / "workers.py"), *args)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'entrypoints'}"}
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=env) as workers:
            assert workers.stdin is not None
            assert workers.stdout is not None
            workers.stdout.readline()
            try:
                return _head(bench, folder, count, port)
            finally:
                workers.stdin.close()


def _head(bench: Bench, folder: Path, count: int, port: int) -> dict[str, float]:
    stat, record = folder / "stat", folder / "exit.json"
    env = {
        "PATH": os.pathsep.join([str(_PLAYERS), str(bench.bin), os.environ["PATH"]]),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "VC_TASK_INDEX": "0",
        "VC_WORKER_HOSTS": ",".join(address(index) for index in range(count + 1)),
        "OPENMPI_NP": "1",
        "SSHD_PORT": str(port),
        "CLOUDJOB_SSH_KEY": str(folder / "key"),
        "CLOUDJOB_RECORD_URI": record.as_uri(),
        "CLOUDJOB_START_TIMEOUT_S": "120",
        "CLOUDJOB_NODE_DIR": str(folder / "node"),
        "SIMULATED_STAT": str(stat),
    }
    argv = (bench.python, "-I", "-S", str(bench.zipapp), "noop.py")
    sample = measure.run(Command(argv, env, bench.source("noop.py"), limit_s=300), folder)
    if sample.exit_code or not stat.exists():
        raise Failed(f"exit {sample.exit_code}: {sample.stderr.read_text()[-300:]}")
    marks = {name: times for _, name, *times in json.loads(record.read_text())["phases"]}
    begun, ended = (
        datetime.fromisoformat(text.replace("Z", "+00:00")) for text in marks["bring-up"]
    )
    # See proc(5): user and system time of the process without its children.
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return {
        "bring_up_s": (ended - begun).total_seconds(),
        "wall_s": sample.wall_s,
        "head_cpu_s": cpu_s,
        "head_ms": 1000 * cpu_s / count,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
