"""What several folders share: S3 servers, and a proxy that breaks what passes by."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import FaultProxy, Moto, SeaweedFS, Server, boto3_client

_NUMBERS = itertools.count()

# Hypothesis judges what it finds, and not how fast this machine is: on two cores that others use,
# too, drawing a value may take seconds. In CI the values are the same each time: whether a change
# lands must not hang on the dice. Who runs the tests by hand throws them.
settings.register_profile(
    "cloudjob",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1",
)
settings.load_profile("cloudjob")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note for CI, which runs a test twice where need be, the tests whose first run failed."""
    path = os.environ.get("CLOUDJOB_CI_FAILED_ONCE")
    # A worker of xdist reports to the main process, which comes here, too.
    if path and report.outcome == "rerun" and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = " ".join(crash.message.split())[:300] if crash else report.when
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}: {why}\n")


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a real S3 server that keeps its objects on disk."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run moto's server."""
    server = Moto(tmp_path_factory.mktemp("moto"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def new_bucket() -> Callable[[Server], str]:
    """Return what makes an empty bucket and gives its name."""

    def make(server: Server) -> str:
        name = f"bucket-{next(_NUMBERS)}"
        boto3_client(server.endpoint).create_bucket(
            Bucket=name,
            CreateBucketConfiguration={"LocationConstraint": "cn-north-4"},
        )
        return name

    return make


@pytest.fixture
def fault_proxy() -> Iterator[Callable[[Server], FaultProxy]]:
    """Return what puts a proxy with faults in front of a server."""
    proxies: list[FaultProxy] = []

    def make(server: Server) -> FaultProxy:
        proxies.append(FaultProxy(server.port))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()
