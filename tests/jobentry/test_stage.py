"""Outputs uploaded from the container, against the laptop half's store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudjob.store.directory import DirectoryStore
from jobentry import objects, stage
from jobentry.stage import StageError

# ---- upload


def test_every_file_of_the_outputs_is_stored(tmp_path: Path):
    """Under its own name, whatever bytes that has; what is no file is passed over."""
    outputs = tmp_path / "outputs"
    (outputs / "deep" / "empty").mkdir(parents=True)
    odd = os.fsdecode(b"50% \xff#")
    (outputs / "deep" / odd).write_bytes(b"1")
    (outputs / "model").write_bytes(b"2")
    (outputs / "latest").symlink_to("model")
    (outputs / "loop").symlink_to(".")
    (outputs / "gone").symlink_to("nowhere")
    os.mkfifo(outputs / "pipe")
    store = DirectoryStore(tmp_path / "store")

    uris = stage.upload(str(outputs), store.uri("job/outputs"))

    keys = [f"job/outputs/deep/{odd}", "job/outputs/latest", "job/outputs/model"]
    assert list(store.list()) == keys
    assert list(uris) == [store.uri(key) for key in keys]
    assert [objects.read(uri) for uri in uris] == [b"1", b"2", b"2"]


def test_files_that_cannot_be_stored_do_not_stop_the_others(tmp_path: Path):
    """The error lists each of them; the rest is in the store."""
    (tmp_path / "outputs" / "a").mkdir(parents=True)
    for name in ("a/model", "b"):
        (tmp_path / "outputs" / name).touch()
    store = DirectoryStore(tmp_path / "store")
    store.put_bytes(b"", "outputs/a")

    with pytest.raises(StageError, match=r"upload outputs: .*/a/model: not a directory$"):
        stage.upload(str(tmp_path / "outputs"), store.uri("outputs"))

    assert list(store.list()) == ["outputs/a", "outputs/b"]


def test_a_folder_of_outputs_that_is_missing_is_an_error(tmp_path: Path):
    """No outputs is an empty folder; no folder means that something went wrong."""
    (tmp_path / "empty").mkdir()

    assert stage.upload(str(tmp_path / "empty"), "file:///nowhere") == ()
    with pytest.raises(StageError, match="missing: no such file or directory"):
        stage.upload(str(tmp_path / "missing"), "file:///nowhere")
