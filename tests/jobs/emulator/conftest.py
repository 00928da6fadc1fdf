"""One emulator for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cloudjob.emulator import daemon
from tests.support.emulator import Api, bucket_of, running


@pytest.fixture(scope="session")
def session_api() -> Iterator[Api]:
    """The emulator of the session."""
    with running() as emulator:
        yield emulator


@pytest.fixture
def api(session_api: Api) -> Iterator[Api]:
    """The emulator of the session; injected faults are cleared after each test."""
    yield session_api
    daemon.clear_faults(session_api.home)


@pytest.fixture(scope="session")
def s3(session_api: Api) -> Any:
    """A boto3 client with the account's key, and a bucket named data."""
    return bucket_of(session_api)
