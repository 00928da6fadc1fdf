"""Empty stores of each kind on real servers, with and without a failing network."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloudjob.store import open_store
from cloudjob.store.base import RETRY_S, ObjectStore
from cloudjob.store.s3 import S3Store, bucket_uri, client
from jobentry.objects import client as node_client
from tests.support.combinations import mark_combinations, values_of
from tests.support.servers import (
    INTERNAL,
    LOST_ANSWER,
    OBS_DOMAIN,
    THROTTLED,
    TOO_MANY,
    Fault,
    FaultProxy,
    Request,
    Server,
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases that only combine values which other cases use as lengthy."""
    cases: dict[str, list[tuple[pytest.Item, set[str]]]] = {}
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if is_here and hasattr(item, "callspec") and not item.get_closest_marker("lengthy"):
            group = cases.setdefault(item.nodeid.partition("[")[0], [])
            group.append((item, values_of(item.callspec.params)))
    for group in cases.values():
        mark_combinations(group)


# The smallest part that services accept in a multipart upload.
PART_BYTES = 5 * 1024 * 1024
KINDS = (
    "file",
    "s3 on SeaweedFS",
    "s3 on moto",
    "obs on SeaweedFS",
    "s3 on SeaweedFS, storm",
    "obs on moto, storm",
)

MakeBucket = Callable[[Server], str]
MakeProxy = Callable[[Server], FaultProxy]


@dataclass(frozen=True)
class EmptyStore:
    """A store, and the settings with which another process opens it."""

    uri: str
    environ: dict[str, str]
    proxy: FaultProxy | None = None

    def open(self, retry_s: float = RETRY_S) -> ObjectStore:
        """Open the store, with small parts."""
        if self.uri.startswith("file:"):
            return open_store(self.uri)
        return S3Store(bucket_uri.read(self.uri), retry_s=retry_s, part_bytes=PART_BYTES)


@pytest.fixture
def new_store(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_bucket: MakeBucket,
    fault_proxy: MakeProxy,
) -> Callable[[str], EmptyStore]:
    """Return a function that creates an empty store of a kind and sets its environment."""

    def make(kind: str) -> EmptyStore:
        environ = {"CLOUDJOB_HOME": str(tmp_path / "state"), "HOME": str(tmp_path / "user")}
        if kind == "file":
            empty_store = EmptyStore(f"file://{tmp_path}/store", environ)
        else:
            empty_store = _remote(kind, request, new_bucket, fault_proxy, environ)
        for name in _USER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in empty_store.environ.items():
            monkeypatch.setenv(name, value)
        return empty_store

    return make


@pytest.fixture(params=KINDS)
def empty_store(
    request: pytest.FixtureRequest, new_store: Callable[[str], EmptyStore]
) -> EmptyStore:
    """An empty store of each kind."""
    return new_store(request.param)


@pytest.fixture
def store(empty_store: EmptyStore) -> ObjectStore:
    """The opened empty store."""
    return empty_store.open()


@pytest.fixture(autouse=True)
def short_retry_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between retries short."""
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "_MAX_PAUSE_S", 0.1)


@pytest.fixture(autouse=True)
def reset_down_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the entry's list of servers that did not answer."""
    monkeypatch.setattr(node_client, "_down", {})


@pytest.fixture
def entry_environ(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the entry to the credentials that the store gives it."""
    variables = store.access()
    # After its first request the store has its keys and no longer needs the environment.
    store.exists("any")
    for name in os.environ:
        if name.startswith(("AWS_", "OBS_", "S3_", "HUAWEICLOUD_", "HW_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# Variables that may be set on a developer's machine.
_USER_VARIABLES = (
    "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "OBS_ENDPOINT", "S3_ENDPOINT",
    "HW_REGION_NAME", "OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN",
    "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY",
)  # fmt: skip


def _remote(
    kind: str,
    request: pytest.FixtureRequest,
    new_bucket: MakeBucket,
    fault_proxy: MakeProxy,
    environ: dict[str, str],
) -> EmptyStore:
    server: Server = request.getfixturevalue("moto" if "moto" in kind else "seaweedfs")
    bucket = new_bucket(server)
    proxy = fault_proxy(server)
    if kind.endswith("storm"):
        storm(proxy)
    if kind.startswith("s3"):
        variables = {**server.environ, "AWS_ENDPOINT_URL": proxy.endpoint}
        return EmptyStore(f"s3://{bucket}/pre fix", {**environ, **variables}, proxy)
    keys = {
        "OBS_ACCESS_KEY_ID": server.environ["AWS_ACCESS_KEY_ID"],
        "OBS_SECRET_ACCESS_KEY": server.environ["AWS_SECRET_ACCESS_KEY"],
        "OBS_ENDPOINT": f"http://{OBS_DOMAIN}",
        # Only the proxy can resolve the bucket's own host name.
        "http_proxy": proxy.endpoint,
        "no_proxy": "127.0.0.1,localhost",
    }
    return EmptyStore(f"obs://{bucket}/pre fix", {**environ, **keys}, proxy)


# How often in a row a storm fails the same request: less often than any client retries it.
_MAX_IN_A_ROW = 3


def storm(proxy: FaultProxy) -> None:
    """Make every other request fail in varying ways, but none more often than clients retry it."""
    faults = itertools.cycle(
        [
            THROTTLED,
            Fault(cut_request_at=10),
            INTERNAL,
            LOST_ANSWER,
            Fault(cut_response_at=3),
            Fault(status=500, code="InternalError", is_done=True),
            TOO_MANY,
            Fault(cut_response_at=3, resets=False),
        ]
    )
    turns = itertools.cycle([True, False])
    failures_in_a_row: Counter[tuple[str, str]] = Counter()

    def choose(request: Request) -> Fault | None:
        # With several threads, every attempt of one request may fall on a failing turn.
        key = (request.method, request.target)
        if not next(turns) or failures_in_a_row[key] == _MAX_IN_A_ROW:
            failures_in_a_row[key] = 0
            return None
        failures_in_a_row[key] += 1
        return next(faults)

    proxy.choose = choose
