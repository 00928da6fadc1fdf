"""Whole jobs through the real command line and a real mpirun, each with its own state folder.

``CLOUDJOB_TEST_MPIRUNS`` names the mpiruns (colon separated); by default the one beside the
interpreter and Debian's. With ``CLOUDJOB_REQUIRE_ALL=1`` both a 4.1 and a 5.0 must be among them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jobentry.system import linux
from tests.support import command_line, surroundings
from tests.support.combinations import mark_combinations, values_of
from tests.support.homes import make_used_home
from tests.support.servers import Server, client_environ

BIN = Path(sys.executable).parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Only a test that fails waits so long; a busy machine needs a minute for what takes a second.
LIMIT_S = 180.0
_QUERIES = (
    *("cancel", "config", "diff", "events", "list", "logs", "metrics", "outputs", "profile"),
    *("report", "rm", "stacks", "status", "wait"),
)
# Prepended to every test script.
PRELUDE = """\
import os, sys, time, signal
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
node = int(os.environ["VC_TASK_INDEX"])
results = os.environ["RESULTS"]
def write_result(name, text=""):
    path = f"{results}/{name}"
    with open(path + ".new", "wb") as file:
        file.write(text if isinstance(text, bytes) else str(text).encode())
    os.rename(path + ".new", path)
def await_file(name, limit_s=180):
    end = time.monotonic() + limit_s
    while not os.path.exists(f"{results}/{name}"):
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Mpi:
    """One Open MPI to test with."""

    mpirun: Path
    version: str

    @property
    def path(self) -> str:
        return f"{self.mpirun.parent}:{SYSTEM_PATH}"

    @property
    def is_5(self) -> bool:
        return self.version.startswith("5.")


@dataclass(frozen=True)
class Done:
    """A command that has exited."""

    code: int
    out: bytes
    err: bytes
    ended_at: float

    def __str__(self) -> str:
        return f"exit {self.code}\n--- out\n{_tail(self.out)}\n--- err\n{_tail(self.err)}"

    @property
    def job(self) -> str:
        return _job_in(self.err) or _job_in(self.out)

    @property
    def lines(self) -> list[bytes]:
        return self.out.split(b"\n")[:-1]


@dataclass
class Running:
    """A command in the background; its output goes to files, so that it never blocks."""

    process: subprocess.Popen[bytes]
    out_path: Path
    err_path: Path

    def __str__(self) -> str:
        """Return its output so far."""
        command = repr(self.process.args)[:1000]
        return f"{_tail(self.err)}\n--- out\n{_tail(self.out)}\n--- command\n{command}"

    @property
    def out(self) -> bytes:
        return self.out_path.read_bytes()

    @property
    def err(self) -> bytes:
        return self.err_path.read_bytes()

    @property
    def job(self) -> str:
        poll(lambda: _job_in(self.err) or self.process.poll() is not None, "a job id")
        return _job_in(self.err)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, limit_s: float = LIMIT_S) -> Done:
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            # With PYTHONFAULTHANDLER=1, Python then prints the traceback of each thread.
            self.send(signal.SIGABRT)
            self.process.wait(LIMIT_S)
            pytest.fail(f"after {limit_s:g} s it had not ended: {self}")
        ended_at = time.time()
        return Done(code if code >= 0 else 128 - code, self.out, self.err, ended_at)


@dataclass
class Cloud:
    """The command line with its own source folder, state folder and mpirun."""

    folder: Path
    mpi: Mpi
    python: str = sys.executable
    prefix: tuple[str, ...] = ()
    environ: dict[str, str | bytes] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    started: list[Running] = field(default_factory=list)
    queries: Iterator[int] = field(default_factory=itertools.count)
    # Whether each command is a new process, as some surroundings have no effect on a fork.
    has_own_processes: bool = False

    def __post_init__(self) -> None:
        for path in (self.folder, self.source, self.results, self.folder / "user"):
            path.mkdir(parents=True, exist_ok=True)
        make_used_home(self.home)
        self.environ = {
            "PATH": self.mpi.path,
            "CLOUDJOB_HOME": str(self.home),
            "HOME": str(self.folder / "user"),
            "LANG": "C.UTF-8",
            "PYTHONFAULTHANDLER": "1",
            **self.environ,
        }

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def remove_home(self) -> None:
        """Remove the state folder, as before the first submit."""
        shutil.rmtree(self.home)

    def chown_to(self, user: int) -> None:
        """Make everything belong to another user, who has submitted no job yet."""
        # Its files of the entry are hard links to files that other tests use, too.
        self.remove_home()
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, user, user)

    def write(self, name: str, text: str | bytes) -> Path:
        """Write a file to the source folder; a ``str`` is dedented."""
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return path

    def script(self, text: str, name: str = "job.py") -> str:
        """Write a Python script after the prelude to the source folder, and return its name."""
        self.write(name, PRELUDE.encode() + textwrap.dedent(text).encode())
        return name

    # -- commands -------------------------------------------------------------------------

    def start(
        self, *arguments: str | bytes, env: Mapping[str, str | bytes] | None = None, **popen: Any
    ) -> Running:
        number = len(self.started)
        out, err = (self.folder / f"{number}.{name}" for name in ("out", "err"))
        command = [*surroundings.words(self), *arguments]
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                command,
                env={**self.environ, **(env or {})},
                cwd=self.source,
                **{"stdin": subprocess.DEVNULL, "stdout": out_file, "stderr": err_file, **popen},
            )
        running = Running(process, out, err)
        self.started.append(running)
        return running

    def cli(
        self,
        *arguments: str | bytes,
        limit_s: float = LIMIT_S,
        env: Mapping[str, str | bytes] | None = None,
    ) -> Done:
        """Run a command and wait for its exit, if possible with ``query``."""
        is_plain = env is None and not self.has_own_processes
        is_plain = is_plain and not self.prefix and self.python == sys.executable
        if arguments[:1] and arguments[0] in _QUERIES and is_plain:
            return self.query(*arguments, limit_s=limit_s)
        return self.start(*arguments, env=env).end(limit_s)

    def query(self, *arguments: str | bytes, limit_s: float = LIMIT_S) -> Done:
        """Run a command that starts no job, in a fork of a process that has imported cloudjob.

        Variables that Python reads only when it starts have no effect.
        """
        number = next(self.queries)
        out, err = (self.folder / f"query-{number}.{name}" for name in ("out", "err"))
        code = command_line.run(arguments, self.environ, self.source, (out, err), limit_s)
        if code is None:
            pytest.fail(
                f"after {limit_s:g} s {arguments!r} had not ended: {_tail(err.read_bytes())}"
                f"\n--- out\n{_tail(out.read_bytes())}"
            )
        code = code if code >= 0 else 128 - code
        return Done(code, out.read_bytes(), err.read_bytes(), time.time())

    def submit_arguments(self, arguments: tuple[str | bytes, ...]) -> list[str | bytes]:
        return ["submit", "-e", f"RESULTS={self.results}", *arguments]

    def submit(
        self,
        *arguments: str | bytes,
        limit_s: float = LIMIT_S,
        env: Mapping[str, str | bytes] | None = None,
    ) -> Done:
        """Submit and stay attached; the ranks get the variable ``RESULTS``."""
        return self.cli(*self.submit_arguments(arguments), limit_s=limit_s, env=env)

    def start_submit(self, *arguments: str | bytes, **popen: Any) -> Running:
        return self.start(*self.submit_arguments(arguments), **popen)

    def detach(self, *arguments: str | bytes, env: Mapping[str, str | bytes] | None = None) -> str:
        """Submit detached and return the job's id."""
        done = self.submit("--detach", *arguments, env=env)
        assert done.code == 0, done
        return done.out.decode().strip().rpartition("/")[2]

    def status(self, job: str) -> dict[str, Any]:
        done = self.cli("status", "--json", job)
        assert done.code == 0, done
        assert b"Traceback" not in done.err, done
        value: dict[str, Any] = json.loads(done.out)
        return value

    def raw(self, job: str, rank: int) -> bytes:
        done = self.cli("logs", "--raw", "--rank", str(rank), job)
        assert done.code == 0, done
        return done.out

    # -- results and processes ------------------------------------------------------------

    def results_written(self, pattern: str = "*") -> dict[str, bytes]:
        """Return the files that ranks wrote to the results folder, with their content."""
        return {
            path.name: path.read_bytes()
            for path in sorted(self.results.glob(pattern))
            if not path.name.endswith(".new")
        }

    def await_results(self, *names: str, limit_s: float = LIMIT_S) -> None:
        poll(
            lambda: all((self.results / name).exists() for name in names),
            lambda: (
                f"{names} in the results; there is {sorted(self.results_written())}; "
                + "; ".join(_tail(run.err) + _tail(run.out) for run in self.started)
                + "".join(
                    f"\n{path}: {_tail(path.read_bytes())}"
                    for path in sorted(self.home.glob("process/*/*.log"))
                )
                + "".join(f"\n{pid}: {argv}" for pid, argv in self.processes().items())
            ),
            limit_s,
        )

    def state(self, job: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(
            (self.home / "process" / job / "state.json").read_bytes()
        )
        return value

    def jobs(self) -> list[str]:
        runs = {path.name for path in self.home.glob("process/*")}
        stored = {path.name for path in self.home.glob("store/*") if path.is_dir()}
        # Layers do not belong to one job: a failed submit may leave them for the next one. The
        # folder ``jobs`` has a description of each job.
        return sorted(runs | (stored - {"layers", "claims", "sweeps", "jobs"}))

    def processes(self) -> dict[int, tuple[str, ...]]:
        """Return this test's job processes, found by environment, arguments or working folder."""
        marks = [os.fsencode(self.home) + b"/process", os.fsencode(self.results)]
        marks += [b"cloudjob-" + os.fsencode(job) for job in self.jobs()]
        argv_of = {}
        for pid in pids():
            if pid == os.getpid():
                continue
            cmdline = read_proc(pid, "cmdline")
            texts = [cmdline, read_proc(pid, "environ")]
            with contextlib.suppress(OSError):
                texts.append(os.fsencode(Path(f"/proc/{pid}/cwd").readlink()) + b"/")
            is_own = any(run.process.pid == pid for run in self.started)
            if not is_own and any(mark in text for text in texts for mark in marks):
                argv_of[pid] = tuple(cmdline.decode("utf-8", "replace").split("\0")[:-1])
        return argv_of

    def find(self, matches: Callable[[int, tuple[str, ...]], bool]) -> list[int]:
        return sorted(pid for pid, argv in self.processes().items() if matches(pid, argv))

    def wrappers(self) -> dict[int, int]:
        """Return the process id of each rank wrapper, by rank."""
        pid_of = {}
        for pid in self.find(lambda _, argv: "--rank" in argv):
            text = read_proc(pid, "environ")
            match = re.search(rb"(?:\A|\0)OMPI_COMM_WORLD_RANK=(\d+)\0", text)
            # mpirun and its daemons have --rank in their arguments, too, but not this variable.
            if match:
                pid_of[int(match[1])] = pid
        return pid_of

    def entry(self, job: str, node: int) -> int:
        """Return the process id of a node's entry: its keeper's other children are younger."""
        children = linux.children(self.state(job)["nodes"][node]["process"])
        return min(children, key=lambda child: float(linux.start_ticks(child) or "inf"))

    def mpiruns(self) -> list[int]:
        names = {"mpirun", "prterun", "orterun"}
        return self.find(lambda _, argv: bool(argv) and Path(argv[0]).name in names)

    def await_cleanup(self) -> None:
        """Wait until the jobs' folders are removed, which starts after their states are final."""
        poll(lambda: not any(self.home.glob("running/*")), "removal of the jobs' folders")

    def leftovers(self) -> list[str]:
        """Return what is left after a minute at most: a job ends before its last process."""
        end = time.monotonic() + 60
        while (remaining := self._remaining_now()) and time.monotonic() < end:
            time.sleep(0.05)
        return remaining

    def _remaining_now(self) -> list[str]:
        remaining = [
            f"process {pid}: {' '.join(argv)[:300]}" for pid, argv in self.processes().items()
        ]
        for job in self.jobs():
            run_dir = run_dir_of(job)
            if run_dir.exists():
                remaining.append(f"folder {run_dir}")
        return remaining

    def kill_remaining(self) -> list[str]:
        """Kill all remaining processes and return them, including commands of the test itself."""
        killed = [
            f"command {run.process.args!r}" for run in self.started if run.process.poll() is None
        ]
        for run in self.started:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
        remaining = self._remaining_now() if killed else self.leftovers()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for job in self.jobs():
            shutil.rmtree(run_dir_of(job), ignore_errors=True)
        return killed + remaining


# -- helpers ----------------------------------------------------------------------------------


def poll(
    condition: Callable[[], Any], what: str | Callable[[], str], limit_s: float = LIMIT_S
) -> Any:
    """Wait until a condition holds and return it; fail at the deadline."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(
                f"after {limit_s} s there is no {what if isinstance(what, str) else what()}"
            )
        time.sleep(0.02)
    return value


def run_dir_of(job: str) -> Path:
    """Return the folder of a job's sockets and temporary files."""
    return Path("/tmp", f"cloudjob-{job.rpartition('-')[2]}")


def pids() -> list[int]:
    """Return the ids of all processes on this host."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def read_proc(pid: int, name: str) -> bytes:
    """Return the content of a process's file in /proc, or nothing if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    text = read_proc(pid, "stat")
    return bool(text) and text.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _job_in(text: bytes) -> str:
    match = re.search(rb"(?:process://local/|^job )([a-z0-9][a-z0-9-]*)", text, re.MULTILINE)
    return match[1].decode() if match else ""


def _tail(text: bytes, size: int = 4000) -> str:
    return ("…" if len(text) > size else "") + text[-size:].decode("utf-8", "backslashreplace")


@functools.cache
def _mpis() -> tuple[Mpi, ...]:
    listed = os.environ.get("CLOUDJOB_TEST_MPIRUNS")
    if listed:
        paths = [Path(text) for text in listed.split(":") if text]
    else:
        paths = [path for path in (BIN / "mpirun", Path("/usr/bin/mpirun")) if path.exists()]
    return tuple(Mpi(path, _version(path)) for path in paths)


def _version(path: Path) -> str:
    text = subprocess.run([path, "--version"], capture_output=True, check=True).stdout.decode()
    match = re.search(r"\(Open MPI\) (\S+)", text)
    assert match, text
    return match[1]


# -- fixtures ---------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked every_mpi with each mpirun, and all others with the first one."""
    if "mpi" not in metafunc.fixturenames:
        return
    mpis = _mpis()
    if os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        lines = {mpi.version[:3] for mpi in mpis}
        if not {"4.1", "5.0"} <= lines:
            raise pytest.UsageError(f"an Open MPI 4.1 and a 5.0 are required; there is {lines}")
    if not metafunc.definition.get_closest_marker("every_mpi"):
        mpis = mpis[:1]
    metafunc.parametrize("mpi", mpis, ids=[mpi.version for mpi in mpis], scope="session")


def pytest_configure(config: pytest.Config) -> None:
    """Register this folder's marker."""
    config.addinivalue_line(
        "markers", "every_mpi: runs once with each Open MPI, as they differ here"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as e2e, and cases that only combine tested values as lengthy.

    ``scripts/test`` runs only the cases of a parametrised test that are needed to use each
    parameter value once, and one case per file with each other mpirun. CI runs all cases.
    """
    here = Path(__file__).parent
    cases: dict[str, list[tuple[pytest.Item, set[str]]]] = {}
    for item in items:
        if item.path.parent != here:
            continue
        item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("lengthy"):
            continue
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        mpi = params.pop("mpi", None)
        group, values = item.nodeid.partition("[")[0], values_of(params)
        if mpi and mpi.mpirun != _mpis()[0].mpirun:
            group, values = str(item.path), {mpi.version}
        if values:
            cases.setdefault(group, []).append((item, values))
    for group in cases.values():
        mark_combinations(group)


@pytest.fixture
def cloud(
    laptop_folder: Path,
    mpi: Mpi,
    surrounding: surroundings.Surrounding | None,
    surround: Callable[[Cloud], None],
) -> Iterator[Cloud]:
    """The command line; fails if processes of its jobs are left after the test."""
    value = Cloud(laptop_folder, mpi, has_own_processes=surrounding is not None)
    surround(value)
    yield value
    remaining = value.kill_remaining()
    assert not remaining, "left behind:\n" + "\n".join(remaining)


@pytest.fixture
def tls_store(
    tmp_path: Path, seaweedfs: Server, new_bucket: Callable[[Server], str]
) -> Iterator[dict[str, str]]:
    """The variables of a store whose certificate only an authority of its own has signed."""
    # The tests of the node half also run on a Python without what this needs.
    from tests.support.tls import Authority, front

    authority = Authority(tmp_path)
    surroundings.write_config(tmp_path, f"store: s3://{new_bucket(seaweedfs)}/jobs\n")
    with front(authority, seaweedfs.port) as https:
        yield {**client_environ(https.endpoint), "AWS_CA_BUNDLE": str(authority.bundle)}


@pytest.fixture(name="poll")
def _poll() -> Callable[..., Any]:
    return poll
