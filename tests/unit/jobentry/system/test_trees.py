"""Removing a folder with its contents."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from jobentry.system.trees import remove_below, remove_tree


def test_a_tree_of_1500_levels_is_removed(tmp_path: Path):
    top = tmp_path / "top"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("nested", dir_fd=descriptor)
        inner = os.open("nested", os.O_RDONLY, dir_fd=descriptor)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)

    remove_tree(top)

    assert not top.exists()


def test_a_link_is_removed_but_not_its_target(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "top" / "deep").mkdir(parents=True)
    (tmp_path / "top" / "deep" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "top" / "dangling").symlink_to("nowhere")

    remove_tree(tmp_path / "top")

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_a_link_to_a_folder_is_not_entered(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")

    with pytest.raises(NotADirectoryError):
        remove_tree(tmp_path / "link")
    assert (tmp_path / "kept" / "file").exists()


def test_a_link_that_replaces_a_folder_during_removal_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "file").touch()
    nested = tmp_path / "top" / "nested"
    nested.mkdir(parents=True)
    chmod = os.chmod

    def exchange_then_change(path: str, mode: int) -> None:
        if os.path.realpath(path) == str(nested):
            nested.rename(tmp_path / "away")
            nested.symlink_to(shared)
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", exchange_then_change)
    with contextlib.suppress(OSError):
        remove_tree(tmp_path / "top")

    assert shared.stat().st_mode & 0o777 == 0o755
    assert (shared / "file").exists()


def test_folders_without_permissions_are_removed(tmp_path: Path):
    """Tested as an ordinary user, as root ignores permissions."""
    top = tmp_path / "top"
    (top / "a" / "b" / "c").mkdir(parents=True)
    (top / "a" / "b" / "c" / "file").touch()
    for path in (tmp_path, top, top / "a", top / "a" / "b", top / "a" / "b" / "c"):
        os.chown(path, 65534, 65534) if os.geteuid() == 0 else None
    for path in (top / "a" / "b" / "c", top / "a" / "b", top / "a"):
        path.chmod(0o500)
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.chdir(tmp_path)
                os.setuid(65534)
            remove_tree("top")
            code = 0
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not top.exists()


def test_removing_a_missing_folder_does_nothing(tmp_path: Path):
    remove_tree(tmp_path / "missing")


def test_errors_are_reported_after_everything_else_is_removed(tmp_path: Path):
    (tmp_path / "file").touch()

    with pytest.raises(NotADirectoryError):
        remove_tree(tmp_path / "file")


def test_a_file_or_folder_is_removed_below_a_folder_but_not_behind_a_link(tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").touch()
    outside.mkdir()
    (outside / "file").touch()
    (root / "link").symlink_to(outside)
    (tmp_path / "root-link").symlink_to(root)

    with pytest.raises(NotADirectoryError):
        remove_below(str(root), "link/file")
    with pytest.raises(ValueError, match="not the name of a file"):
        remove_below(str(root), "a/../link/file")
    remove_below(str(root), "missing/file")
    remove_below(str(tmp_path / "root-link"), "a/b")
    remove_below(str(root), "link")

    assert [path.name for path in root.rglob("*")] == ["a"]
    assert (outside / "file").exists()
