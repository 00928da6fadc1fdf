"""Runs one command and measures it: wall time, CPU of every process it started, memory."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
_MEMORY_POLL_S = 0.2


class Failed(Exception):
    """A run failed."""


@dataclass(frozen=True)
class Command:
    """The command to run, its folder and its environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    limit_s: float = 120.0


@dataclass(frozen=True)
class Sample:
    """The figures of one run of a command.

    ``rss_mib`` is the high-water mark of the process started, ``other_rss_mib`` that of the largest
    of all others; ``left_behind`` counts processes that had to be killed after it had ended.
    """

    exit_code: int
    wall_s: float
    cpu_s: float
    rss_mib: float
    other_rss_mib: float
    left_behind: int
    stdout: Path
    stderr: Path


def adopt_orphans(*, is_enabled: bool = True) -> None:
    """Make this process the parent of orphaned descendants, so that their CPU time counts too.

    Remote daemons and submitit's controller leave their parents; without this their CPU is lost.
    """
    option = int(is_enabled)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, option, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run(command: Command, folder: Path, *, watches_memory: bool = False) -> Sample:
    """Run ``command`` to its end, with its output in files in ``folder``."""
    stdout, stderr = folder / "stdout", folder / "stderr"
    peaks: dict[int, float] = {}
    with stdout.open("wb") as out, stderr.open("wb") as err:
        started = time.perf_counter()
        process = subprocess.Popen(
            command.argv,
            env=dict(command.env),
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        limit = threading.Timer(command.limit_s, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        watch = _MemoryWatch(peaks) if watches_memory else None
        status, cpu_s = _wait(process.pid)
        wall_s = time.perf_counter() - started
    limit.cancel()
    if watch:
        watch.end()
    process.returncode = os.waitstatus_to_exitcode(status)
    orphans_cpu_s, left_behind = _reap_orphans()
    return Sample(
        exit_code=process.returncode,
        wall_s=wall_s,
        cpu_s=cpu_s + orphans_cpu_s,
        rss_mib=peaks.get(process.pid, 0.0),
        other_rss_mib=max((peaks[pid] for pid in peaks if pid != process.pid), default=0.0),
        left_behind=left_behind,
        stdout=stdout,
        stderr=stderr,
    )


def _wait(pid: int) -> tuple[int, float]:
    """Wait for ``pid``; return its status and the CPU seconds of all processes ended until then.

    Orphans are reaped as they end: as zombies they would look alive to processes that wait for
    them.
    """
    cpu_s = 0.0
    while True:
        ended, status, usage = os.wait4(-1, 0)
        cpu_s += usage.ru_utime + usage.ru_stime
        if ended == pid:
            return status, cpu_s


def _reap_orphans() -> tuple[float, int]:
    """Wait for processes that outlive the command, then kill them; return CPU seconds and count."""
    cpu_s, killed = 0.0, 0
    deadline = time.monotonic() + _GRACE_S
    while True:
        try:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return cpu_s, killed
        if pid:
            cpu_s += usage.ru_utime + usage.ru_stime
        elif time.monotonic() < deadline:
            time.sleep(0.01)
        else:
            killed += _kill(_descendants(os.getpid()))
            time.sleep(0.1)


def _kill(pids: list[int]) -> int:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


class _MemoryWatch:
    """Records the peak memory of each descendant of this process, in MiB.

    The peak that wait4 reports is of no use: it starts from the size of the process that forked.
    """

    def __init__(self, peaks: dict[int, float]) -> None:
        self._peaks = peaks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_MEMORY_POLL_S):
            for pid in _descendants(os.getpid()):
                self._peaks[pid] = max(self._peaks.get(pid, 0.0), _high_water_mib(pid))


def _high_water_mib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0.0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _descendants(root: int) -> list[int]:
    """Return the running descendants of ``root``."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), []).append(int(folder.name))
    descendants: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        descendants += below
        waiting += below
    return descendants
