"""Fixtures for the node half: the zipapp, and waiting with a deadline."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Callable

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent

# This test creates its packages with the laptop half, which needs Python 3.10.
collect_ignore = ["staging/test_code_package.py"] if sys.version_info < (3, 10) else []


@pytest.fixture(scope="session")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The zipapp, built from the current sources."""
    target = tmp_path_factory.mktemp("zipapp") / "jobentry.pyz"
    subprocess.run([sys.executable, ROOT / "scripts" / "build_zipapp.py", target], check=True)
    return str(target)


@pytest.fixture
def until() -> Callable[..., None]:
    """A function that waits until a condition holds, and fails at its deadline."""

    def wait(condition: Callable[[], object], within_s: float = 180.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in %g s" % within_s
            time.sleep(0.01)

    return wait
