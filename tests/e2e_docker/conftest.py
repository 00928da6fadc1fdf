"""Whole jobs in real containers; each test has its own state folder and must clean up.

With ``CLOUDJOB_REQUIRE_ALL=1``, these tests fail on a host without an engine instead of skipping.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import docker
import pytest

from tests.support import containers, surroundings
from tests.support.containers import build_on
from tests.support.polling import Followed, poll

_SOCKET = Path("/var/run/docker.sock")
# The longest wait by the rules, which is rare: 60 s for the head to end when a worker is lost, its
# grace period of 10 s, 20 s and then 60 s for its record. The rest is for starting commands on a
# busy machine.
LIMIT_S = 150.0 + 90.0


@dataclass(frozen=True)
class Done:
    """The result of a finished command."""

    code: int
    out: bytes
    err: str

    def __str__(self) -> str:
        return (
            f"exit {self.code}\n--- out\n{self.out[-3000:].decode()}\n--- err\n{self.err[-3000:]}"
        )

    @property
    def job(self) -> str:
        match = re.search(r"docker://local/([a-z0-9-]+)", self.err + self.out.decode("latin-1"))
        assert match, self
        return match[1]


@dataclass
class Cloud:
    """The command line with its own source folder and state folder."""

    folder: Path
    engine: docker.APIClient
    environ: dict[str, str | bytes] = field(default_factory=dict)
    image: str = ""
    python: str = ""
    prefix: tuple[str, ...] = ()
    followed: dict[str, Followed] = field(default_factory=dict)
    began: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.source.mkdir(parents=True)

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
    def groups(self) -> tuple[int, ...]:
        """The groups of a user who may use the engine."""
        return (_SOCKET.stat().st_gid,)

    def chown_to(self, user: int) -> None:
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, user, user)

    def script(self, text: str, name: str = "train.py") -> None:
        (self.source / name).write_text(textwrap.dedent(text))

    def start(
        self, *arguments: str | bytes, out: int | BinaryIO = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        if arguments[0] == "submit" and self.image and "--image" not in arguments:
            arguments = ("submit", "--image", self.image, *arguments[1:])
        return subprocess.Popen(
            [*surroundings.words(self), *arguments],
            cwd=self.source,
            env={**os.environ, "CLOUDJOB_HOME": str(self.home), **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE if out == subprocess.PIPE else subprocess.STDOUT,
        )

    def run(self, *arguments: str | bytes, limit_s: float = LIMIT_S) -> Done:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += b"\n(killed by the test: it took too long)"
        return Done(process.returncode, out, err.decode("utf-8", "replace"))

    def submit(self, *arguments: str | bytes, script: str = "train.py") -> Done:
        return self.run("submit", "--backend", "docker", *arguments, script)

    def detach(self, *arguments: str | bytes) -> str:
        done = self.submit("--detach", *arguments)
        assert done.code == 0, done
        return done.job

    def status(self, job: str) -> dict[str, Any]:
        done = self.run("status", job, "--json")
        assert done.code == 0, done
        status: dict[str, Any] = json.loads(done.out)
        return status

    def containers(self, job: str = "") -> list[dict[str, Any]]:
        """Return the containers of one job, or of all jobs of this state folder, by node."""
        label = f"cloudjob.job={job}" if job else f"cloudjob.owner={self.owner}"
        listed = self.engine.containers(all=True, filters={"label": label})
        return sorted(listed, key=lambda item: int(item["Labels"]["cloudjob.node"]))

    def networks(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.engine.networks(
            filters={"label": f"cloudjob.owner={self.owner}"}
        )
        return listed

    def killed_nodes(self, job: str) -> list[str]:
        """Return the containers that were killed, as they did not end within the rules' limits."""
        filters = {"event": "kill", "label": f"cloudjob.job={job}"}
        until = int(time.time()) + 1
        events = self.engine.events(self.began, until, filters=filters, decode=True)
        killed = [event["Actor"]["Attributes"] for event in events]
        return [item["name"] for item in killed if item["signal"] == str(int(signal.SIGKILL))]

    @property
    def owner(self) -> str:
        path = self.home / "docker" / "owner"
        return path.read_text() if path.exists() else "nobody"

    def await_log(self, job: str, *texts: bytes, limit_s: float = LIMIT_S) -> None:
        """Wait until all of these texts are in the log of a job."""
        if job not in self.followed:
            path = self.folder / f"{job}.log"
            with path.open("wb") as file:
                process = self.start("logs", "--follow", job, out=file)
            self.followed[job] = Followed(process, path)
        self.followed[job].await_all(*texts, limit_s=limit_s)

    def clean(self) -> None:
        for followed in self.followed.values():
            followed.end()
        for item in self.containers():
            with contextlib.suppress(docker.errors.APIError):
                self.engine.remove_container(item["Id"], force=True, v=True)
        for item in self.networks():
            self.engine.remove_network(item["Id"])


@pytest.fixture
def until() -> Callable[..., None]:
    """A function that waits until a condition holds."""
    return poll


@pytest.fixture(scope="session")
def examples_image(build: Callable[..., str]) -> str:
    """The image for examples/."""
    return build("examples")


@pytest.fixture(scope="session")
def derive(engine: docker.APIClient, base_image: str) -> Iterator[Callable[..., str]]:
    """Return a function that adds Dockerfile lines to the base image and returns the new tag."""
    tags: list[str] = []

    def derive(name: str, lines: str, **files: str) -> str:
        tag = f"cloudjob-test/{name}-{os.getpid()}"
        build_on(engine, base_image, tag, lines, {name: files[name].encode() for name in files})
        tags.append(tag)
        return tag

    yield derive
    for tag in tags:
        containers.remove(engine, tag)


@pytest.fixture
def cloud(
    laptop_folder: Path,
    engine: docker.APIClient,
    base_image: str,
    surround: Callable[[Cloud], None],
) -> Iterator[Cloud]:
    """The command line; the test fails if its jobs leave containers or networks in the engine."""
    cloud = Cloud(laptop_folder / "cloud", engine)
    surround(cloud)
    yield cloud
    leftovers = cloud.containers(), cloud.networks()
    cloud.clean()
    assert leftovers == ([], []), "containers and networks are left behind"
