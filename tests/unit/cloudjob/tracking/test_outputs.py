"""Outputs are fetched and verified by their manifests."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cloudjob.errors import StoreError
from cloudjob.store.base import GET_LIMIT_BYTES, OnBytes, ignore_bytes
from cloudjob.store.directory import DirectoryStore
from cloudjob.tracking import outputs
from cloudjob.tracking.outputs import OutputLocation, Outputs
from jobentry import objects
from jobentry.contract import manifest
from jobentry.contract.manifest import Manifest, StoredFile

DEADLINE_S = 180.0


class ConcurrentStore(DirectoryStore):
    """A store whose requests wait until four of them run at the same time."""

    barrier = threading.Barrier(4)

    def get_bytes(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """Get an object; wait for the other requests unless it is a manifest."""
        if manifest.FOLDER not in key:
            self.barrier.wait(DEADLINE_S)
        return super().get_bytes(key, limit_bytes=limit_bytes)

    def fetch(self, key: str, path: Path, *, on_progress: OnBytes = ignore_bytes) -> None:
        """Wait for the other requests, and fetch an object."""
        self.barrier.wait(DEADLINE_S)
        super().fetch(key, path, on_progress=on_progress)


def store_output(store: DirectoryStore, files: Mapping[str, bytes]) -> OutputLocation:
    """Store files and their manifest as a node does."""
    for name, data in files.items():
        store.put_bytes(data, f"out/{name}")
    listed = tuple(
        StoredFile(name, name, len(data), hashlib.sha256(data).hexdigest(), 10**18)
        for name, data in files.items()
    )
    put_manifest(store, *listed)
    return OutputLocation("model", store, "out/")


def put_manifest(store: DirectoryStore, *files: StoredFile, node: int = 0) -> None:
    """Write the manifest of a node."""
    store.put_bytes(manifest.dump(Manifest("job", node, files)), f"out/{manifest.key(node)}")


@pytest.mark.parametrize("size_bytes", [0, 1, 32 * 1024, 32 * 1024 + 1])
def test_small_files_are_fetched_many_at_a_time(tmp_path: Path, size_bytes: int):
    """Fetched one by one, a thousand files would need a thousand network round trips."""
    files = {f"folder-{number % 2}/{number}": b"%d" % number * size_bytes for number in range(8)}
    location = store_output(ConcurrentStore(tmp_path / "store"), files)

    fetched = outputs.fetch(location, tmp_path / "to")

    assert {file.name for file in fetched} == {f"model/{name}" for name in files}
    for name, data in files.items():
        path = tmp_path / "to" / "model" / name
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (data, 10**18)
    (tmp_path / "like any other").mkdir()
    new_folders = [
        tmp_path / "like any other",
        *(tmp_path / "to").rglob("folder-*"),
        tmp_path / "to",
    ]
    assert len({folder.stat().st_mode for folder in new_folders}) == 1


def test_a_file_that_does_not_match_its_manifest_is_an_error(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    location = store_output(store, {"good": b"good", "bad": b"bad"})
    store.put_bytes(b"other", "out/bad")

    with pytest.raises(StoreError, match=r"fetching model/bad: .*does not match its manifest"):
        outputs.fetch(location, tmp_path / "to")

    assert not (tmp_path / "to" / "model" / "bad").exists()
    assert {path.name for path in (tmp_path / "to").rglob("*") if path.is_file()} <= {"good"}


@pytest.mark.parametrize("size_bytes", [1, 32 * 1024 + 1, 9_000_000])
def test_all_other_files_are_fetched_when_the_store_has_lost_some(tmp_path: Path, size_bytes: int):
    store = DirectoryStore(tmp_path / "store")
    files = {f"{number}": bytes([number]) * size_bytes for number in range(4)}
    location = store_output(store, files)
    store.put_bytes(b"x", "other/file")
    put_manifest(store, StoredFile("file", "file", 1, hashlib.sha256(b"x").hexdigest(), 0), node=1)
    for name in ("0", "2"):
        store.delete(f"out/{name}")
    store.delete("out/file")
    second = tmp_path / "second"
    second.mkdir()
    last = store_output(DirectoryStore(second), {"kept": b"kept"})._replace(name="last")

    with pytest.raises(StoreError) as caught:
        Outputs([location, last]).download(tmp_path / "to")

    assert caught.value.message.startswith(
        "fetching outputs: 3 files are lost: model/0, model/2, model/file; first: "
    )
    fetched = {
        path.name: path.read_bytes() for path in (tmp_path / "to").rglob("*") if path.is_file()
    }
    assert fetched == {"1": files["1"], "3": files["3"], "kept": b"kept"}


@pytest.mark.parametrize("size_bytes", [0, 1, 3, 4, 8, 11])
def test_a_file_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
):
    monkeypatch.setattr(outputs, "_PIECE_BYTES", 4)
    data = bytes(range(size_bytes))
    stored = Outputs([store_output(DirectoryStore(tmp_path), {"a": b"", "b": data})])

    empty, file = stored
    assert b"".join(stored.read(file)) == data
    assert b"".join(stored.read(empty)) == b""


def test_a_file_that_does_not_match_its_manifest_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outputs, "_PIECE_BYTES", 4)
    store = DirectoryStore(tmp_path)
    stored = Outputs([store_output(store, {"weights": b"12345678"})])
    store.put_bytes(b"12345679", "out/weights")
    pieces = stored.read(next(iter(stored)))

    assert next(pieces) == b"1234"
    with pytest.raises(StoreError, match="does not match its manifest"):
        next(pieces)


def test_files_of_any_depth_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A thousand calls of ``fsync`` take a minute on a busy disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    name = "d/" * 1100 + "model"
    try:
        store = DirectoryStore(tmp_path / "store")
        objects.write(b"1", (tmp_path / "store" / "out" / name).as_uri())
        put_manifest(store, StoredFile(name, name, 1, hashlib.sha256(b"1").hexdigest(), 1))

        outputs.fetch(OutputLocation("model", store, "out/"), tmp_path / "to")

        assert (tmp_path / "to" / "model" / name).read_bytes() == b"1"
        assert f"out/{name}" in list(store.list("out/"))
        assert store.remove_unfinished(0) == 0
    finally:
        # ``shutil.rmtree`` can fail on more than a thousand nested folders.
        subprocess.run(["rm", "-rf", tmp_path / "store", tmp_path / "to"], check=True)


def test_a_file_that_one_node_reports_as_incomplete_is_incomplete(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    file = StoredFile("half", "half", 1, "0" * 64, 1, is_incomplete=True)
    put_manifest(store, file, StoredFile("whole", "whole", 1, "0" * 64, 1))
    put_manifest(store, file._replace(is_incomplete=False), node=1)

    files = list(Outputs([OutputLocation("model", store, "out/")]))

    assert [(file.name, file.is_incomplete) for file in files] == [
        ("model/half", True),
        ("model/whole", False),
    ]


class WithOddKeys(DirectoryStore):
    """An object store, whose keys can be any text."""

    def list(self, prefix: str = "", *, with_unfinished: bool = False) -> Iterator[str]:
        """Yield five keys, only one of which is a path of a file below the output."""
        yield from (f"{prefix}{name}" for name in ("", "../../stolen", "/etc/x", "a/", "a/b"))


def test_a_key_that_is_not_a_path_below_the_output_is_ignored(tmp_path: Path):
    location = OutputLocation("model", WithOddKeys(tmp_path), "out/", is_listed=True)

    assert [file.name for file in Outputs([location])] == ["model/a/b"]
