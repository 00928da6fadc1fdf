"""Simulates macOS on Linux: Python without the functions that macOS lacks."""

from __future__ import annotations

from pathlib import Path

import mypy

from tests.support.macos import sitecustomize


def environ() -> dict[str, str]:
    """Return the variables that make Python behave as on macOS in a command and its children."""
    names = sitecustomize.lacking(Path(mypy.__file__).parent / "typeshed" / "stdlib")
    assert {"os.sched_getaffinity", "os.O_PATH", "select.epoll"} <= {*names.split()}
    return {"PYTHONPATH": str(Path(__file__).parent), sitecustomize.LACKING: names}
