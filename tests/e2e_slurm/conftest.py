"""Whole jobs on a real Slurm with two nodes; each test has its own state folder.

With ``CLOUDJOB_REQUIRE_ALL=1``, these tests fail on a host that cannot run Slurm instead of
skipping.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import slurm, surroundings
from tests.support.slurm import Slurm

LIMIT_S = 120.0
_NUMBERS = itertools.count()
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Done:
    """The result of a finished command."""

    code: int
    out: bytes
    err: str

    def __str__(self) -> str:
        out = self.out[-3000:].decode("utf-8", "replace")
        return f"exit {self.code}\n--- out\n{out}\n--- err\n{self.err[-3000:]}"

    @property
    def job(self) -> str:
        match = re.search(
            r"(?:slurm|process)://\S*/([a-z0-9-]+)\b",
            self.err + self.out.decode("utf-8", "replace"),
        )
        assert match, self
        return match[1]


@dataclass
class Cloud:
    """The command line on the login node, with folders that all nodes share."""

    folder: Path
    slurm: Slurm
    environ: dict[str, str | bytes] = field(default_factory=dict)
    python: str = ""
    prefix: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in (self.source, self.results):
            path.mkdir(parents=True)

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def chown_to(self, user: int) -> None:
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, user, user)

    def write(self, name: str, text: str) -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        env: dict[str, str | bytes] = {
            "PATH": SYSTEM_PATH,
            "HOME": str(self.folder),
            "SLURM_CONF": str(self.slurm.conf),
            "CLOUDJOB_HOME": str(self.home),
            **self.environ,
        }
        process = subprocess.Popen(
            self.slurm.argv(*surroundings.words(self), *arguments),
            cwd=self.source,
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, limit_s: float = LIMIT_S) -> Done:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += b"\n(killed by the test: it took too long)"
        return Done(process.returncode, out, err.decode("utf-8", "replace"))

    def submit(self, *arguments: str, limit_s: float = LIMIT_S) -> Done:
        results = f"RESULTS={self.results}"
        return self.run("submit", "--backend", "slurm", "-e", results, *arguments, limit_s=limit_s)

    def detach(self, *arguments: str) -> str:
        done = self.submit("--detach", *arguments)
        assert done.code == 0, done
        return done.job

    def status(self, job: str) -> dict[str, Any]:
        done = self.run("status", job, "--json")
        assert done.code == 0, done
        status: dict[str, Any] = json.loads(done.out)
        return status

    def job_folder(self, job: str) -> Path:
        return self.home / "slurm" / job

    def number(self, job: str) -> str:
        """Return Slurm's number of a job."""
        return (self.job_folder(job) / "id").read_text().strip()

    def await_results(self, *names: str, limit_s: float = LIMIT_S) -> None:
        poll(
            lambda: all((self.results / name).exists() for name in names),
            lambda: f"{names}: {sorted(p.name for p in self.results.iterdir())}; {self.logs()}",
            limit_s,
        )

    def logs(self) -> str:
        """Return the output of Slurm and of the jobs, for an error message."""
        paths = [p for p in self.home.glob("slurm/*/*") if p.suffix == ".log" or p.name == "state"]
        texts = [f"{path.name}: {path.read_text()[-800:]}" for path in paths]
        return "\n".join([self.slurm.run("squeue", "-t", "all"), *texts])

    def cancel_all(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self.slurm.run("scancel", "--user=root")
        self.slurm.run("scancel", "--user=root", "--state=RUNNING", "--full", "--signal=KILL")


def poll(
    condition: Callable[[], Any], what: Callable[[], str] | str, limit_s: float = LIMIT_S
) -> Any:
    """Wait until a condition holds and return its value; fail at the deadline."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"after {limit_s} s not: {what if isinstance(what, str) else what()}")
        time.sleep(0.1)
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder with ``slurm``."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    """A controller and two nodes."""
    why = slurm.missing()
    if why and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail(why)
    if why:
        pytest.skip(why)
    with Slurm(nodes=2) as value:
        yield value


@pytest.fixture
def cloud(
    cluster: Slurm, request: pytest.FixtureRequest, surround: Callable[[Cloud], None]
) -> Iterator[Cloud]:
    """The command line; after the test, nodes must be idle and have none of our files in /tmp."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[:30]
    value = Cloud(cluster.folder / "tests" / f"{next(_NUMBERS)}-{name}", cluster)
    surround(value)
    yield value
    value.cancel_all()
    cluster.await_idle()
    leftovers = left_on_nodes(cluster)
    assert not leftovers, f"left behind: {leftovers}"


# Name prefixes of the folders of jobs and of mpirun's daemons.
_JOB_PREFIXES = ("cloudjob-", "prted.", "ompi.")


def left_on_nodes(cluster: Slurm) -> dict[str, list[str]]:
    """Return what jobs left in /tmp of the nodes, after up to 5 s to clean up."""
    left_on: dict[str, list[str]] = {}
    end = time.monotonic() + 5
    while True:
        for node in cluster.nodes:
            listed = cluster.run("ls", "/tmp", node=node).split()
            left_on[node] = [name for name in listed if name.startswith(_JOB_PREFIXES)]
        if not any(left_on.values()) or time.monotonic() > end:
            return {node: names for node, names in left_on.items() if names}
        time.sleep(0.1)
