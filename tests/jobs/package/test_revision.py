"""The git commit in the record of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudjob.package.revision import of_source
from tests.support.homes import make_used_home


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", *names, "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a commit, and with a source in one of its folders."""
    source = tmp_path / "repository" / "source"
    source.mkdir(parents=True)
    (source / "train.py").write_text("print()\n")
    git(source.parent, "init")
    git(source.parent, "add", ".")
    git(source.parent, "commit", "-m", "first")
    return source.parent


def test_a_source_has_the_commit_of_its_repository(repository: Path):
    commit = git(repository, "rev-parse", "HEAD").strip()

    assert of_source(repository / "source") == (commit, False)
    (repository / "beside").write_text("")
    assert of_source(repository / "source") == (commit, False)
    (repository / "source" / "new.py").write_text("")
    assert str(of_source(repository / "source")) == f"{commit} with uncommitted changes"


def test_a_source_without_a_commit_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert of_source(tmp_path) is None
    git(tmp_path, "init")
    assert of_source(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert of_source(tmp_path) is None


def test_a_repository_runs_no_program_of_its_choice(repository: Path, tmp_path: Path):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))

    assert of_source(repository / "source") is not None
    assert not (tmp_path / "ran").exists()


def test_status_shows_the_commit(repository: Path, tmp_path: Path):
    make_used_home(tmp_path / "home")

    def cloudjob(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "cloudjob.cli", *arguments],
            cwd=repository / "source",
            env={**os.environ, "CLOUDJOB_HOME": str(tmp_path / "home")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    cloudjob("submit", "--launcher", "python", "--name", "one", "train.py")
    (repository / "source" / "train.py").write_text("print(2)\n")
    cloudjob("submit", "--launcher", "python", "--name", "two", "train.py")

    commit = git(repository, "rev-parse", "HEAD").strip()
    assert f"{commit}\n" in cloudjob("status", "one")
    assert f"{commit} with uncommitted changes\n" in cloudjob("status", "two")
    values = json.loads(cloudjob("status", "--json", "two"))
    assert values["git_commit"] == f"{commit} with uncommitted changes"
    record = next((tmp_path / "home" / "store").glob("two-*/submission.json"))
    assert json.loads(record.read_text())["git"] == {"commit": commit, "is_changed": True}
