"""Others may write to a folder store: a link there leads nobody out of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudjob.errors import StoreError
from cloudjob.store.directory import DirectoryStore
from cloudjob.tracking import descriptions
from jobentry import objects


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a folder of the user outside the store."""
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    for name in ("thesis", "deep/notes", "x.json", "0" * 64):
        (folder / name).write_text("precious")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    folder_store = DirectoryStore(tmp_path / "store")
    folder_store.put_bytes(b"{}", "job/code.json")
    folder_store.put_bytes(b"{}", "jobs/job.json")
    return folder_store


def contents(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def link(store: DirectoryStore, key: str, target: Path) -> None:
    (store.root / key).parent.mkdir(parents=True, exist_ok=True)
    (store.root / key).symlink_to(target)


@pytest.mark.parametrize("key", ["job/extra", "job/record", "job/outputs/M/deep", "job/a"])
@pytest.mark.parametrize("inside", ["", "thesis"])
def test_removing_a_job_removes_links_and_not_what_they_lead_to(store, victim, key, inside):
    before = contents(victim)
    link(store, key, victim / inside)

    descriptions.delete_objects(store, "job")

    assert contents(victim) == before
    assert [path.name for path in store.root.rglob("*")] == []


def test_removing_a_job_whose_folder_is_a_link_removes_nothing_behind_it(store, victim):
    before = contents(victim)
    link(store, "other", victim)

    descriptions.delete_objects(store, "other")

    assert contents(victim) == before


ACTIONS: dict[str, Callable[[DirectoryStore], object]] = {
    "write": lambda store: store.put_bytes(b"new", "job/record/thesis"),
    "write over": lambda store: store.put_bytes(b"new", "job/lone"),
    "read": lambda store: store.get_bytes("job/record/thesis"),
    "read link": lambda store: store.get_bytes("job/lone"),
    "read part": lambda store: store.get_range("job/lone", 0, 1),
    "copy": lambda store: store.copy("job/code.json", "job/record/new"),
    "copy link": lambda store: store.copy("job/lone", "job/new"),
    "delete": lambda store: store.delete("job/record/thesis"),
    "list": lambda store: list(store.list()),
    "list inside": lambda store: list(store.list("job/record/")),
    "remove_unfinished": lambda store: store.remove_unfinished(0),
    "exists": lambda store: store.exists("job/record/thesis"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_no_operation_of_a_store_follows_a_link(store, victim, action, tmp_path):
    (victim / ".cloudjob-tmp-1").write_text("precious")
    before = contents(victim)
    link(store, "job/record", victim)
    link(store, "job/lone", victim / "thesis")
    (tmp_path / "to").mkdir()

    result: object = None
    try:
        result = ACTIONS[action](store)
    except StoreError as error:
        result = error

    assert contents(victim) == before
    assert result in (None, False, []) or isinstance(result, (StoreError, str, list, int))
    assert "precious" not in str(result)
    if action.startswith("list"):
        assert set(result) <= {"job/code.json", "jobs/job.json"}


def test_the_collection_of_layers_follows_no_link(tmp_path, victim):
    """``layers`` itself may be the link."""
    before = contents(victim)
    store = DirectoryStore(tmp_path / "store")
    for key in ("layers", "jobs", "claims", "damaged", "other"):
        link(store, key, victim)
    link(store, "job2/record", victim)

    assert list(store.list()) == []
    store.remove_unfinished(0)
    for key in list(store.list("", with_unfinished=True)):
        store.delete(key)

    assert contents(victim) == before


def test_files_that_are_no_objects_are_neither_opened_nor_listed(store):
    """Opening a FIFO would wait for ever."""
    os.mkfifo(store.root / "jobs/x.json")

    assert list(store.list()) == ["job/code.json", "jobs/job.json"]
    with pytest.raises(StoreError, match=r"reading jobs/x\.json in .*: it is not a regular file"):
        store.get_bytes("jobs/x.json")
    assert not store.exists("jobs/x.json")
    os.mkfifo(store.root / "job/pipe")
    descriptions.delete_objects(store, "job")
    assert not (store.root / "job").exists()


def test_a_folder_that_becomes_a_link_during_the_removal_is_not_followed(store, victim):
    """Another process exchanges a folder of the job and a link as fast as it can."""
    before = contents(victim)
    folder, away = store.root / "job" / "deep", store.root / "away"
    end = time.monotonic() + 2.0

    def exchange() -> None:
        while time.monotonic() < end:
            try:
                folder.rename(away)
                folder.symlink_to(victim)
                folder.unlink()
                away.rename(folder)
            except OSError:
                continue

    thread = threading.Thread(target=exchange)
    thread.start()
    while time.monotonic() < end:
        for name in ("thesis", "notes"):
            try:
                store.put_bytes(b"", f"job/deep/{name}")
                descriptions.delete_objects(store, "job")
            except StoreError:
                continue
    thread.join()

    assert contents(victim) == before


def test_a_node_writes_and_deletes_outputs_below_no_link(tmp_path, victim):
    before = contents(victim)
    root = tmp_path / "out"
    root.mkdir()
    (root / "checkpoint").symlink_to(victim)
    below = root.as_uri()

    with pytest.raises(objects.ObjectError, match="not a directory"):
        objects.write(b"new", f"{below}/checkpoint/thesis", below=below)
    objects.delete(f"{below}/checkpoint/thesis", below=below)
    objects.write(b"new", f"{below}/a/b/c", below=below)
    objects.delete(f"{below}/a/b/c", below=below)

    assert contents(victim) == before
    assert [path.name for path in root.iterdir()] == ["checkpoint", "a"]


def test_objects_with_refused_names_are_reported_after_the_others_are_deleted(store):
    class Listing(DirectoryStore):
        def list(self, prefix="", *, with_unfinished=False):
            yield from ["job/../jobs/job.json", *super().list(prefix)]

    hostile = Listing(store.root)

    with pytest.raises(StoreError, match=r"deleting 'job/\.\./jobs/job\.json': not a valid key"):
        descriptions.delete_objects(hostile, "job")
    assert not (store.root / "job").exists()
