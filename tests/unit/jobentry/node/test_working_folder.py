"""What a script writes to its working folder is named before it is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jobentry.node.working_folder import WorkingFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, older than the clock of the file system can confuse."""
    (tmp_path / "train.py").write_text("pass\n")
    time.sleep(0.05)
    return tmp_path


def test_the_largest_new_file_is_named(folder: Path, capfd: pytest.CaptureFixture[str]):
    before = WorkingFolder(folder=str(folder))
    time.sleep(0.05)
    (folder / "out").mkdir()
    (folder / "out" / "model.pt").write_bytes(b"x" * 10_000_000)
    (folder / "small.txt").write_text("x")
    (folder / "empty").touch()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.pyc").write_bytes(b"x" * 20_000_000)
    (folder / "link").symlink_to("/etc/passwd")

    before.name_lost_files()

    assert "".join(capfd.readouterr()) == (
        "jobentry: warning: written to the working folder and not kept: 'out/model.pt' (10.0 MB,"
        " the largest of 2 files)\n"
        "jobentry: hint: --output MODEL= keeps what the script writes to the folder in $MODEL\n"
    )


def test_a_script_that_writes_nothing_gets_no_warning(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    WorkingFolder(str(folder)).name_lost_files()

    assert not "".join(capfd.readouterr())
