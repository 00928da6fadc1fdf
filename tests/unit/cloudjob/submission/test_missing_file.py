"""A failed job that did not find a file says that the package leaves it out, and by which rule."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudjob.model.status import Failure
from cloudjob.package import PackOptions, pack
from cloudjob.submission import failure_hint, preparation


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source whose data and models are ignored."""
    folder = tmp_path / "source"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.csv").write_text("1\n")
    (folder / "model.bin").write_text("2\n")
    (folder / "train.py").write_text("")
    (folder / ".gitignore").write_text("data/\n*.bin\n")
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.csv'",
        "FileNotFoundError: [Errno 2] No such file or directory: './data/train.csv'",
        "… No such file or directory: '/n-0/modelarts/user-job-dir/code/data/train.csv'",
        "… No such file or directory: '{source}/data/train.csv'",
        "cat: data/train.csv: No such file or directory",
        "train.sh: 3: cannot open data/train.csv: No such file",
    ],
)
@pytest.mark.parametrize("is_message", [True, False])
def test_a_file_that_an_ignore_rule_leaves_out_is_named(source: Path, text: str, is_message: bool):
    text = text.format(source=source)
    failure = Failure(message=text) if is_message else Failure(message="exit 1", last_lines=(text,))

    assert failure_hint.hint({"source": str(source)}, failure) == (
        "data/train.csv is not in the package: left out by .gitignore:1: data/; a line !data/ in"
        " .cloudjobignore keeps it, and --input passes large data"
    )


@pytest.mark.parametrize("path", ["other.csv", "/etc/data", "../data/train.csv", "train.py"])
def test_other_files_have_no_hint(source: Path, path: str):
    failure = Failure(message=f"No such file or directory: '{path}'")

    assert failure_hint.hint({"source": str(source)}, failure) == ""


def test_a_job_of_another_machine_has_no_hint(source: Path):
    failure = Failure(message="No such file or directory: 'data/train.csv'")

    assert failure_hint.hint({}, failure) == ""
    assert failure_hint.hint({"source": "/no/such/folder"}, failure) == ""


def test_a_submit_names_what_rules_leave_out_and_links_without_a_target(
    source: Path, tmp_path: Path
):
    (source / "latest").symlink_to("data/train.csv")
    (source / "script").symlink_to("train.py")
    (source / "dangling").symlink_to("nowhere")
    for number in range(9):
        (source / f"{number}.bin").touch()
    home = tmp_path / "home"
    package = pack(
        source,
        tmp_path / "layer",
        script="train.py",
        limit_bytes=1000,
        options=PackOptions(home=home),
    )

    assert [report.message for report in preparation.left_out(package)] == [
        "left out of the package by ignore rules: 0.bin, 1.bin, 2.bin and 8 more;"
        " `cloudjob package ls` shows all",
        "links whose target is left out of the package: latest -> data/train.csv",
    ]


def test_a_submit_names_only_once_what_an_ignore_rule_about_secrets_leaves_out(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("train.py", "secret-1.txt", "id_rsa"):
        (source / name).touch()
    (source / ".gitignore").write_text("secret-*\n")
    options = PackOptions(home=tmp_path / "home")
    package = pack(source, tmp_path / "l", script="train.py", limit_bytes=99, options=options)

    assert [report.message for report in preparation.left_out(package)] == [
        "left out of the package by ignore rules: secret-1.txt; `cloudjob package ls` shows all",
        "left out of the package: id_rsa: may hold secrets: its name",
    ]


def test_a_submit_without_ignored_files_reports_nothing(tmp_path: Path):
    source = tmp_path / "source"
    (source / "__pycache__").mkdir(parents=True)
    (source / "train.py").write_text("")
    options = PackOptions(home=tmp_path / "home")
    package = pack(source, tmp_path / "l", script="train.py", limit_bytes=9, options=options)

    assert not list(preparation.left_out(package))
    assert os.path.lexists(source / "__pycache__")
