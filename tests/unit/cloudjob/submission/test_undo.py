"""What a submit that fails leaves in its store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudjob.home.records import Records
from cloudjob.store.directory import DirectoryStore
from cloudjob.submission import pipeline


def test_a_failed_submit_leaves_no_object_and_no_unfinished_write(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    store.put_bytes(b"", "job-1/code.json")
    (tmp_path / "store" / "job-1" / ".cloudjob-tmp-1").touch()
    store.put_bytes(b"", "job-2/record/other")
    with (
        Records(tmp_path / "records.db") as db,
        pytest.raises(KeyboardInterrupt),
        pipeline.undo_on_failure(store, db, "job-1"),
    ):
        raise KeyboardInterrupt

    assert list(store.list(with_unfinished=True)) == ["job-2/record/other"]
