"""Inputs fetched to a node, and the cache that the jobs of one machine share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jobentry import objects
from jobentry.contract import env
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.staging import cache, inputs


def fetch_input(folder: Path, uri: str, cache_folder: Path | None = None, **facts: Any) -> Path:
    """Fetch one input to a node below ``folder`` and return its path."""
    paths = NodePaths(*(str(folder / name) for name in ("", "job", "mount", "log", "node")))
    node = NodeEnv(hosts=("a", "b"), inputs=(("DATA", uri),), **facts)
    inputs.stage(node, paths, {"CLOUDJOB_CACHE_DIR": str(cache_folder)} if cache_folder else {})
    return Path(paths.input("DATA"))


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with nested files, an odd name and links."""
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"a" * 100)
    (folder / "deep" / os.fsdecode(b"50% \xff#?")).write_bytes(b"odd")
    (folder / "link").symlink_to("a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far").write_bytes(b"far")
    (folder / "door").symlink_to(tmp_path / "elsewhere")
    (folder / "gone").symlink_to("nowhere")
    return folder


EXPECTED = {
    "a": b"a" * 100,
    "link": b"a" * 100,
    "door/far": b"far",
    "deep/" + os.fsdecode(b"50% \xff#?"): b"odd",
}


@pytest.mark.parametrize("has_cache", [False, True], ids=["alone", "cached"])
@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_is_copied_without_links_to_the_source(
    tmp_path: Path, data: Path, end: str, has_cache: bool
):
    folder = fetch_input(
        tmp_path / "node", data.as_uri() + end, tmp_path / "cache" if has_cache else None
    )

    assert tree(folder) == EXPECTED
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    inodes = {path.stat().st_ino for path in data.rglob("*") if path.is_file()}
    assert not inodes & {path.stat().st_ino for path in folder.rglob("*")}


def test_entries_of_a_folder_that_are_no_files_are_named(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
):
    os.mkfifo(data / "pipe")
    (data / "round").symlink_to("round")

    target = fetch_input(tmp_path, data.as_uri())

    assert tree(target) == EXPECTED
    assert "left out, as there is no file on this node: gone, pipe, round" in capfd.readouterr().err


def test_a_single_file_is_an_input(tmp_path: Path, data: Path):
    assert fetch_input(tmp_path / "node", (data / "a").as_uri()).read_bytes() == b"a" * 100


def test_an_empty_folder_is_an_empty_folder(tmp_path: Path):
    """An empty input that exists is not an error."""
    (tmp_path / "empty").mkdir()

    assert list(fetch_input(tmp_path / "node", (tmp_path / "empty").as_uri()).iterdir()) == []


def test_a_missing_input_is_reported(tmp_path: Path):
    with pytest.raises(EntryError) as caught:
        fetch_input(tmp_path / "node", f"file://{tmp_path}/none")

    assert str(caught.value) == (
        f"fetching the input DATA: looking for file://{tmp_path}/none: no such file or directory"
    )
    assert tree(tmp_path / "node") == {}


def test_a_failed_input_leaves_nothing(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    fetch = objects.fetch

    def break_off(uri: str, path: str, **more: Any) -> None:
        if uri.endswith("/far"):
            raise objects.ObjectError("fetching far: 500", "try again")
        fetch(uri, path, **more)

    monkeypatch.setattr(objects, "fetch", break_off)
    with pytest.raises(EntryError) as caught:
        fetch_input(tmp_path / "node", data.as_uri())

    assert caught.value.hint == "try again"
    assert list((tmp_path / "node" / "mount" / "inputs").iterdir()) == []


def test_a_failed_input_waits_for_running_transfers(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
):
    fetch = objects.fetch
    folder = tmp_path / "node" / "mount" / "inputs"
    has_failed = threading.Event()
    coming: list[str] = []

    def break_off(uri: str, path: str, **more: Any) -> None:
        if uri.endswith("/far"):
            has_failed.set()
            raise objects.ObjectError("fetching far: 500", "try again")
        coming.append(uri)
        has_failed.wait(20)
        # Without a wait for this transfer, the folder would be removed in this time.
        end = time.monotonic() + 0.3
        while list(folder.iterdir()) and time.monotonic() < end:
            time.sleep(0.001)
        try:
            fetch(uri, path, **more)
        finally:
            coming.remove(uri)

    monkeypatch.setattr(objects, "fetch", break_off)
    with pytest.raises(EntryError) as caught:
        fetch_input(tmp_path / "node", data.as_uri())

    assert caught.value.hint == "try again"
    end = time.monotonic() + 180
    while coming:
        assert time.monotonic() < end, coming
        time.sleep(0.01)
    assert list(folder.iterdir()) == []


def test_an_existing_input_stays(tmp_path: Path, data: Path):
    (fetch_input(tmp_path / "node", data.as_uri()) / "a").write_bytes(b"mine")

    assert (fetch_input(tmp_path / "node", data.as_uri()) / "a").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["../a", "a//b", "a/../../b", "./a", "/a", "a/..", "a\0"])
def test_a_key_that_would_leave_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """A bucket may contain keys with any characters."""
    entry = objects.Entry(name, "s3://bucket/x", 1)
    monkeypatch.setattr(objects, "list", lambda prefix: iter([entry]))

    with pytest.raises(EntryError, match="cannot be the name of a file"):
        fetch_input(tmp_path / "node", "s3://bucket/x/")

    assert not (tmp_path / "node" / "mount" / "a").exists()


def test_an_unfinished_write_in_a_bucket_is_not_an_input(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
):
    """A platform uploads the folder of a node with the temporary files of writes in progress."""
    uri = (data / "a").as_uri()
    keys = ("a", ".cloudjob-tmp-0", "deep/.cloudjob-tmp-1")
    monkeypatch.setattr(objects, "list", lambda prefix: (objects.Entry(k, uri, 100) for k in keys))

    assert tree(fetch_input(tmp_path / "node", "s3://bucket/x/")) == {"a": b"a" * 100}


def test_a_folder_with_only_unfinished_writes_is_a_missing_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = objects.Entry(".cloudjob-tmp-0", "s3://bucket/x/.cloudjob-tmp-0", 1)
    monkeypatch.setattr(objects, "list", lambda prefix: iter([entry]))

    with pytest.raises(EntryError, match="there are none"):
        fetch_input(tmp_path / "node", "s3://bucket/x/")


def test_an_input_goes_to_the_nodes_that_need_it(tmp_path: Path, data: Path):
    """The other nodes get neither the files nor the variable."""
    facts = {"input_nodes": (("DATA", "1"),)}

    assert not fetch_input(tmp_path / "0", data.as_uri(), node=0, **facts).exists()
    assert fetch_input(tmp_path / "1", data.as_uri(), node=1, **facts).exists()


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0", {0}), ("0,2-3", {0, 2, 3}), ("4-2", set()), ("1-1,1", {1}), ("0-99", {0, 1, 2, 3, 4})],
)
def test_lists_of_nodes_contain_numbers_and_ranges(text: str, nodes: set[int]):
    assert env.is_list(text)
    assert {node for node in range(5) if env.is_listed(node, text)} == nodes


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1 2", "1\n", "٣", "1-2-3"])
def test_an_invalid_list_of_nodes_is_refused(text: str):
    assert not env.is_list(text)


def test_a_slow_input_reports_its_progress(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (data / "gone").unlink()
    fetch_input(tmp_path / "quick", data.as_uri())
    quick = capfd.readouterr().err
    monkeypatch.setattr(inputs, "_REPORT_S", 0.0)
    fetch_input(tmp_path / "slow", data.as_uri())
    slow = capfd.readouterr().err

    assert quick == ""
    assert "jobentry: input DATA: " in slow
    assert " of 206 B, " in slow
    assert "s left" in slow
    assert "input DATA: 206 B fetched in 0 s (files: 4)" in slow


# -- the cache ----------------------------------------------------------------------------------


def test_a_second_job_uses_the_cache(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    first = fetch_input(tmp_path / "first", data.as_uri(), tmp_path / "cache")
    fetch, cached = objects.fetch, (tmp_path / "cache").as_uri()

    def fetch_cached(uri: str, path: str, **more: Any) -> None:
        assert uri.startswith(cached), uri
        fetch(uri, path, **more)

    monkeypatch.setattr(objects, "fetch", fetch_cached)
    second = fetch_input(tmp_path / "second", data.as_uri(), tmp_path / "cache")

    assert tree(first) == tree(second) == EXPECTED
    assert (first / "a").stat().st_mtime_ns == (second / "a").stat().st_mtime_ns


def test_a_script_cannot_change_the_inputs_of_others(tmp_path: Path, data: Path):
    """Whoever it runs as: permission bits do not stop root."""
    first = fetch_input(tmp_path / "first", data.as_uri(), tmp_path / "cache")
    second = fetch_input(tmp_path / "second", data.as_uri(), tmp_path / "cache")
    with contextlib.suppress(PermissionError):
        (first / "a").write_bytes(b"x" * 100)

    assert tree(second) == EXPECTED


def test_a_new_version_of_an_object_is_fetched(tmp_path: Path, data: Path):
    first = fetch_input(tmp_path / "first", data.as_uri(), tmp_path / "cache")
    (data / "a").write_bytes(b"b" * 100)
    second = fetch_input(tmp_path / "second", data.as_uri(), tmp_path / "cache")

    assert (first / "a").read_bytes() == b"a" * 100
    assert (second / "a").read_bytes() == b"b" * 100


def test_a_modified_cache_file_is_fetched_again(tmp_path: Path, data: Path):
    fetch_input(tmp_path / "first", data.as_uri(), tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*/*"):
        path.chmod(0o644)
        path.write_bytes(b"x" * path.stat().st_size)
    second = fetch_input(tmp_path / "second", data.as_uri(), tmp_path / "cache")

    assert tree(second) == EXPECTED


def test_the_cache_removes_the_least_recently_used_files(tmp_path: Path):
    for index in range(6):
        (tmp_path / str(index)).write_bytes(b"%d" % index * 1000)
    input_cache = cache.Cache.in_folder(str(tmp_path / "cache"), 3500)
    for index in [0, 1, 2, 0, 3, 4, 0, 5]:
        target = tmp_path / f"got-{index}"
        target.unlink(missing_ok=True)
        input_cache.fetch(
            objects.stat((tmp_path / str(index)).as_uri()), str(target), lambda size: None
        )
        time.sleep(0.01)

    sizes = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    contents = {path.read_bytes()[:1] for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert sum(sizes) <= 3500
    assert contents == {b"0", b"4", b"5"}
    assert (tmp_path / "got-1").read_bytes() == b"1" * 1000


def test_an_object_too_large_for_the_cache_bypasses_it(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"x" * 3000)
    input_cache = cache.Cache.in_folder(str(tmp_path / "cache"), 3500)
    input_cache.fetch(
        objects.stat((tmp_path / "large").as_uri()), str(tmp_path / "got"), lambda _: None
    )

    assert (tmp_path / "got").read_bytes() == b"x" * 3000
    assert list((tmp_path / "cache").rglob("*")) == []


def test_nodes_that_start_together_fetch_an_input_once(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
):
    fetched: list[str] = []
    fetch = objects.fetch

    def slow(uri: str, path: str, **more: Any) -> None:
        if uri.startswith(data.as_uri()):
            fetched.append(uri)
        time.sleep(0.05)
        fetch(uri, path, **more)

    monkeypatch.setattr(objects, "fetch", slow)
    threads = [
        threading.Thread(
            target=fetch_input, args=(tmp_path / str(i), data.as_uri(), tmp_path / "cache")
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [tree(tmp_path / str(i) / "mount" / "inputs" / "DATA_0") for i in range(4)] == [
        EXPECTED
    ] * 4
    assert sorted(fetched) == sorted(set(fetched))


def test_a_job_killed_while_fetching_blocks_no_other(tmp_path: Path, data: Path):
    code = (
        "import os, sys; sys.path[:0] = sys.argv[4:]\n"
        "from jobentry import objects; from jobentry.staging import cache\n"
        "fetch = objects.fetch\n"
        "def half(uri, path, **more):\n"
        "    open(path, 'w').write('half'); os.kill(os.getpid(), 9)\n"
        "objects.fetch = half\n"
        "input_cache = cache.Cache.in_folder(sys.argv[1], 10**6)\n"
        "input_cache.fetch(objects.stat(sys.argv[2]), sys.argv[3], lambda size: None)\n"
    )
    args = [str(tmp_path / "cache"), (data / "a").as_uri(), str(tmp_path / "got"), *sys.path]
    done = subprocess.run([sys.executable, "-c", code, *args], check=False)
    folder = fetch_input(tmp_path / "node", data.as_uri(), tmp_path / "cache")

    assert done.returncode == -9
    assert tree(folder) == EXPECTED


def test_an_unusable_cache_is_skipped(tmp_path: Path, data: Path):
    (tmp_path / "file").touch()

    assert (
        tree(fetch_input(tmp_path / "node", data.as_uri(), tmp_path / "file" / "cache")) == EXPECTED
    )
