"""What a job has kept is fetched as its manifests say."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from cloudjob import outputs
from cloudjob.errors import StoreError
from cloudjob.outputs import Place
from cloudjob.store.base import Tell, quiet
from cloudjob.store.directory import DirectoryStore
from jobentry.contract import manifest
from jobentry.contract.manifest import Kept, Manifest

DEADLINE_S = 60.0


class Together(DirectoryStore):
    """A store where one waits for others: so many must be under way at a time."""

    barrier = threading.Barrier(4)

    def get_bytes(self, key: str) -> bytes:
        """Get a file of the output as the others do."""
        if manifest.FOLDER not in key:
            self.barrier.wait(DEADLINE_S)
        return super().get_bytes(key)

    def fetch(self, key: str, path: Path, *, tell: Tell = quiet) -> None:
        """Fetch as the others do."""
        self.barrier.wait(DEADLINE_S)
        super().fetch(key, path, tell=tell)


def kept(store: DirectoryStore, files: Mapping[str, bytes]) -> Place:
    """Keep files as a node does."""
    for name, data in files.items():
        store.put_bytes(data, f"out/{name}")
    listed = tuple(
        Kept(name, name, len(data), hashlib.sha256(data).hexdigest(), 10**18)
        for name, data in files.items()
    )
    store.put_bytes(manifest.dump(Manifest("job", 0, listed)), f"out/{manifest.key(0)}")
    return Place("model", store, "out/")


@pytest.mark.parametrize("size_bytes", [0, 1, 32 * 1024, 32 * 1024 + 1])
def test_small_files_are_fetched_many_at_a_time(tmp_path: Path, size_bytes: int):
    """One after another they would wait for the network a thousand times."""
    files = {f"folder-{number % 2}/{number}": b"%d" % number * size_bytes for number in range(8)}
    place = kept(Together(tmp_path / "store"), files)

    paths = outputs.fetch(place, tmp_path / "to")

    assert set(paths) == {tmp_path / "to" / "model" / name for name in files}
    for name, data in files.items():
        path = tmp_path / "to" / "model" / name
        assert (path.read_bytes(), path.stat().st_mtime_ns) == (data, 10**18)
    (tmp_path / "like any other").mkdir()
    made = [tmp_path / "like any other", *(tmp_path / "to").rglob("folder-*"), tmp_path / "to"]
    assert len({folder.stat().st_mode for folder in made}) == 1


def test_a_file_that_is_not_what_its_manifest_says_is_an_error(tmp_path: Path):
    """And nothing of it has its name."""
    store = DirectoryStore(tmp_path / "store")
    place = kept(store, {"good": b"good", "bad": b"bad"})
    store.put_bytes(b"other", "out/bad")

    with pytest.raises(StoreError, match=r"fetching model/bad: .*not what its manifest says"):
        outputs.fetch(place, tmp_path / "to")

    assert not (tmp_path / "to" / "model" / "bad").exists()
    assert {path.name for path in (tmp_path / "to").rglob("*") if path.is_file()} <= {"good"}
