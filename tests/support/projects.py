"""A folder with a script, as a user of the command line or the Python API has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.homes import make_used_home


def enter_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Make a folder with ``train.py``, enter it, and set a CLOUDJOB_HOME beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    return folder
