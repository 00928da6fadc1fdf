"""A rank that the kernel killed for lack of memory, by the counters of made-up and real groups."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobentry.contract.paths import NodePaths
from jobentry.node.local_ranks import End, LocalRanks
from jobentry.node.memory_kills import PERIOD_S, Lately, MemoryKills, describe

GIB = 1024**3
# A process in a control group of version 2, of version 1, and in none that counts.
V2 = {
    "proc/7/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/cgroup.controllers": "memory\n",
    "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/job/memory.current": "1\n",
    "sys/fs/cgroup/job/memory.events": "oom_kill 5\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.events": "oom {0}\noom_kill {0}\noom_group_kill 0\n",
}
V1 = {
    "proc/7/cgroup": "4:memory:/job/step\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill 5\n",
    "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": f"{1 << 63}\n",
    "sys/fs/cgroup/memory/job/step/memory.oom_control": "under_oom 0\noom_kill {0}\n",
}
MACHINE = {
    "proc/7/cgroup": "0::/\n",
    "proc/vmstat": "oom_kill {0}\n",
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 1 kB\n",
}
SYSTEMS = pytest.mark.parametrize(
    ("files", "kill", "limit"),
    [
        (V2, Lately.KILLED, "limit 8.0 GiB"),
        (V1, Lately.KILLED, "limit 8.0 GiB"),
        (MACHINE, Lately.KILLED_ON_MACHINE, "the machine has 8.0 GiB"),
    ],
    ids=["v2", "v1", "machine"],
)


def write(folder: Path, files: dict[str, str], kills: int) -> None:
    """Write files like those of /proc and /sys."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(kills))


def watching(folder: Path) -> MemoryKills:
    """Return the counters of the process 7."""
    kills = MemoryKills(f"{folder}/proc", f"{folder}/sys")
    kills.watch(7)
    return kills


@SYSTEMS
def test_the_kernels_counter_decides(
    tmp_path: Path, files: dict[str, str], kill: Lately, limit: str
):
    write(tmp_path, files, 1)
    kills = watching(tmp_path)
    before = kills.lately(7)
    write(tmp_path, files, 2)

    assert (before, kills.lately(7)) == (Lately.NOTHING, kill)
    assert kills.limit_text(7) == limit


@SYSTEMS
def test_an_old_kill_does_not_count(
    tmp_path: Path,
    files: dict[str, str],
    kill: Lately,
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
):
    write(tmp_path, files, 1)
    kills = watching(tmp_path)
    write(tmp_path, files, 2)
    now_s = time.monotonic()
    verdicts = []
    for periods in range(1, 4):
        monkeypatch.setattr(time, "monotonic", lambda: now_s + periods * (PERIOD_S + 1))  # noqa: B023
        kills.note()
        verdicts.append(kills.lately(7))

    assert verdicts == [kill, Lately.NOTHING, Lately.NOTHING]


def test_without_a_counter_nothing_is_known(tmp_path: Path):
    kills = watching(tmp_path)

    assert kills.lately(7) is Lately.UNKNOWN
    assert kills.lately(8) is Lately.UNKNOWN
    assert kills.limit_text(7) == ""


def test_the_largest_ranks_are_named():
    used_mib = {0: 100.0, 1: 7270.4, 2: 410.0, 3: 400.0}

    assert describe("limit 8.0 GiB", used_mib) == (
        " (limit 8.0 GiB; rank 1: 7.1 GiB, rank 2: 410 MiB, rank 3: 400 MiB)"
    )
    assert describe("", {}) == ""


# -- a real group with a limit ------------------------------------------------------------------


def memory_group() -> Path | None:
    """Return a folder for control groups with limits on memory; None if this user has none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup/memory" if controllers == "memory" else ""
        if root and os.access(root + path, os.W_OK):
            return Path(root + path)
    return None


# PyPy alone needs more memory than the limit.
PYTHON = sys.executable
if sys.implementation.name != "cpython":
    PYTHON = str(max((Path.home() / ".pyenv" / "versions").glob("3.1?.*/bin/python")))
GROUP = memory_group()
LIMIT_MIB = 100
# A rank that uses too much memory itself, or starts a process that does.
GROW = "x = bytearray(300 << 20)"
FORK = (
    "import os, sys\nchild = os.fork()\nif not child:\n    x = bytearray(300 << 20)\n"
    "os.waitpid(child, 0)\nsys.exit(3)"
)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with a limit on memory."""
    assert GROUP is not None
    folder = GROUP / f"test-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(LIMIT_MIB << 20))
    yield folder
    deadline = time.monotonic() + 180
    while members := (folder / "tasks").read_text().split():
        # Only of a test that has failed.
        assert time.monotonic() < deadline
        for member in members:
            with contextlib.suppress(OSError):
                os.kill(int(member), signal.SIGKILL)
        time.sleep(0.05)
    folder.rmdir()


@pytest.mark.skipif(GROUP is None, reason="needs a control group of version 1 to write to")
@pytest.mark.parametrize(
    ("text", "start"),
    [
        (GROW, "killed by SIGKILL: out of memory (limit 100 MiB; rank 0: "),
        (
            FORK,
            "exit 3; just before, the kernel killed a process in the control group of this rank",
        ),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL (not by the kernel for "),
    ],
)
def test_a_rank_that_uses_more_than_the_limit_is_reported(
    limited: Path, tmp_path: Path, text: str, start: str
):
    enter = f"open({str(limited / 'tasks')!r}, 'w').write('0')\ninput()\n"
    code = "import subprocess, sys, resource\n" + enter
    code += "done = subprocess.run([sys.executable, '-c', sys.argv[1]])\n"
    code += "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    wrapper = subprocess.Popen(
        [PYTHON, "-c", code, text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while str(wrapper.pid) not in (limited / "tasks").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    folder = str(tmp_path)
    ranks = LocalRanks(NodePaths(folder, folder, folder, folder, folder))
    ranks.handle_event("start 0 %d %d" % (wrapper.pid, wrapper.pid))
    out, _ = wrapper.communicate("\n", timeout=60)
    status, peak_kib = map(int, out.split())
    ranks.handle_event(f"peak 0 {peak_kib}")
    end = (
        End(0, 128 - status, -status, False, 0.0, "")
        if status < 0
        else (End(0, status, 0, False, 0.0, f"exit {status}"))
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (90_000, hard))
    try:
        message = ranks.failure(end, 0, "a").message
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

    assert message.startswith(start)
    # The limit of CPU time may be the reason only if memory certainly was not.
    assert ("ulimit -t" in message) == ("not by the kernel" in start)
    if text == GROW:
        used_mib = float(message.rpartition("rank 0: ")[2].split()[0])
        assert LIMIT_MIB / 2 < used_mib < LIMIT_MIB * 1.5
