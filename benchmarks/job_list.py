"""Measure ``list`` with 10,000 jobs that have ended.

``python -m benchmarks.job_list`` prints one JSON object: the CPU time of the command in a pipe, on
a terminal and with ``--json``, each beyond that of a list of one job, and the load of the
machine. It exits with 1 if a limit does not hold.
"""

from __future__ import annotations

import json
import os
import pty
import resource
import sys
import tempfile
import time
from pathlib import Path

from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model import status as statuses
from cloudjob.model.status import Code, Failure, JobState, JobStatus, Phase
from cloudjob.model.times import rfc3339

JOBS, ROUNDS = 10_000, 3
LIMIT_S = {"pipe": 0.7, "terminal": 0.3, "json": 0.6}
_CLOUDJOB = str(Path(sys.executable).parent / "cloudjob")
_PHASES = ("stage", "package", "bring-up", "run", "outputs")


def main() -> int:
    """Measure, print, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="cloudjob-list-") as name:
        os.environ["CLOUDJOB_HOME"] = name
        _plant(Path(name))
        start_s = _least_s(("list", "--limit", "1"))
        figures = {
            "start": start_s,
            "pipe": _least_s(("list",)) - start_s,
            "terminal": _least_s(("list",), is_terminal=True) - start_s,
            "json": _least_s(("list", "--json")) - start_s,
        }
    figures["load"] = os.getloadavg()[0]
    print(json.dumps({key: round(value, 2) for key, value in figures.items()}))
    return 1 if any(figures[key] > limit_s for key, limit_s in LIMIT_S.items()) else 0


def _plant(home: Path) -> None:
    now_s = time.time()
    with Records(records_path(home)) as db:
        for number in range(JOBS):
            db.add(_record(f"train-{number:08d}", number, now_s - 60 * number))


def _record(job: str, number: int, at_s: float) -> JobRecord:
    at, has_failed = rfc3339(at_s), number % 3 == 0
    failure = Failure(node=1, rank=2, message="ValueError: shapes differ")
    status = JobStatus(
        job=job,
        name="train",
        backend="process",
        state=JobState.FAILED if has_failed else JobState.SUCCEEDED,
        native_state="ended",
        nodes=2,
        procs_per_node=4,
        created_at=at,
        started_at=at,
        ended_at=rfc3339(at_s + 30),
        exit_code=int(has_failed),
        failure=failure if has_failed else None,
        code=Code(uri="file:///code.json", digest="sha256:0", size_bytes=1, files=1),
        phases=tuple(
            Phase(node=node, name=name, started_at=at, ended_at=at)
            for node in range(2)
            for name in _PHASES
        ),
    )
    return JobRecord(
        job=job,
        name="train",
        backend="process",
        handle=f"process://local/{job}",
        state=status.state.value,
        nodes=2,
        procs_per_node=4,
        created_at=at,
        code_uri="file:///code.json",
        code_digest="sha256:0",
        code_size_bytes=1,
        code_files=1,
        store="file:///store",
        final_json=json.dumps(statuses.to_json(status)),
        spec_json="{}",
    )


def _least_s(words: tuple[str, ...], *, is_terminal: bool = False) -> float:
    """Return the least CPU time of a command in several rounds."""
    return min(_cpu_s(words, is_terminal=is_terminal) for _ in range(ROUNDS))


def _cpu_s(words: tuple[str, ...], *, is_terminal: bool) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    read_fd, write_fd = pty.openpty() if is_terminal else os.pipe()
    process = os.posix_spawn(
        _CLOUDJOB,
        (_CLOUDJOB, *words),
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, write_fd, 1), (os.POSIX_SPAWN_CLOSE, read_fd)],
    )
    os.close(write_fd)
    try:
        while os.read(read_fd, 65536):
            pass
    except OSError:
        pass  # the command has closed the terminal
    finally:
        os.close(read_fd)
    os.waitpid(process, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
