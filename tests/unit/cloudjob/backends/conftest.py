"""An in-process ModelArts service for the tests of the ModelArts backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.modelarts import ModelArts, Server


@pytest.fixture(scope="session")
def modelarts_server() -> Iterator[Server]:
    """A server that all tests of the session share."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def service(modelarts_server: Server, tmp_path: Path) -> Iterator[ModelArts]:
    """A separate service for each test."""
    with modelarts_server.service(tmp_path / "jobs") as fake:
        yield fake
