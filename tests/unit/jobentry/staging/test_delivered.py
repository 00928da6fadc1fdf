"""Delivered files are read and kept for the next attempt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobentry.contract import names, paths, variables
from jobentry.staging import delivered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every file that can be delivered."""
    folder = tmp_path / "job dir"
    (folder / "code").mkdir(parents=True)
    (folder / paths.DELIVERED_CODE).write_text("{}")
    (folder / paths.DELIVERED_SSH_KEY).write_text("key")
    (folder / paths.DELIVERED_ENV).write_bytes(variables.dump({"TOKEN": "a\nb", "ODD": "\udcff"}))
    return folder


def test_delivered_files_are_found_by_name(folder: Path):
    environ = {
        names.CLOUDJOB_DELIVERY: str(folder),
        names.CLOUDJOB_RECORD_DIR: "/home/ma-user/modelarts/outputs/x",
    }
    delivered.take(environ)

    assert environ == {
        "TOKEN": "a\nb",
        "ODD": "\udcff",
        names.CLOUDJOB_CODE_URI: "file://" + str(folder).replace(" ", "%20") + "/code/code.json",
        names.CLOUDJOB_SSH_KEY: "file://" + str(folder).replace(" ", "%20") + "/ssh-key",
        names.CLOUDJOB_RECORD_URI: "file:///home/ma-user/modelarts/outputs/x/exit.json",
    }


def test_variables_that_are_set_stay(folder: Path):
    environ = {
        names.CLOUDJOB_DELIVERY: str(folder),
        names.CLOUDJOB_CODE_URI: "obs://b/code.json",
        names.CLOUDJOB_RECORD_URI: "obs://b/exit.json",
        names.CLOUDJOB_RECORD_DIR: "/x",
    }
    delivered.take(environ)

    assert environ[names.CLOUDJOB_CODE_URI] == "obs://b/code.json"
    assert environ[names.CLOUDJOB_RECORD_URI] == "obs://b/exit.json"


def test_the_files_stay_for_the_next_attempt(folder: Path):
    """The platform may start the command again in the same container."""
    before = sorted(path.name for path in folder.rglob("*"))
    for _ in range(2):
        environ = {names.CLOUDJOB_DELIVERY: str(folder)}
        delivered.take(environ)
        assert environ["TOKEN"] == "a\nb"

    assert sorted(path.name for path in folder.rglob("*")) == before


def test_an_empty_delivery_changes_nothing(tmp_path: Path):
    environ = {names.CLOUDJOB_DELIVERY: str(tmp_path)}
    delivered.take(environ)

    assert environ == {}


def test_a_missing_delivery_folder_is_logged(tmp_path: Path):
    entry = Path(__file__).parents[4] / "entrypoints"
    done = subprocess.run(
        [sys.executable, str(entry), "--dry-run", "train.py"],
        env={"PATH": os.defpath, names.CLOUDJOB_DELIVERY: str(tmp_path / "gone")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert f"reading the delivered files: {tmp_path / 'gone'}: No such file" in done.stderr
    assert "Traceback" not in done.stderr
