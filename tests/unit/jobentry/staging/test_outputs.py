"""Outputs are stored while the ranks run and at the end, even after errors and kills."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry import objects
from jobentry.contract import env, manifest
from jobentry.contract.env import NodeEnv
from jobentry.contract.manifest import Manifest, StoredFile
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.node.local_ranks import RankFailure
from jobentry.staging import output_folder, output_store, outputs
from jobentry.staging.outputs import Outputs

Files = "dict[str, bytes]"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "SETTLE_S", 0.01)


class Node:
    """A node with one output, and the files that a reader of the output sees."""

    def __init__(self, folder: Path, node: int = 0, uri: str = "", **facts: Any) -> None:
        home = folder / f"home-{node}-{os.urandom(3).hex()}"
        self.paths = NodePaths(*(str(home / name) for name in ("", "job", "mount", "log", "node")))
        self.store = folder / "store"
        self.uri = uri or self.store.as_uri()
        hosts = tuple(f"h{i}" for i in range(facts.pop("nodes", 2)))
        self.env = NodeEnv(job="j", node=node, hosts=hosts, outputs=(("OUT", self.uri),), **facts)
        self.outputs = Outputs(self.env, self.paths)
        self.folder = Path(self.paths.output("OUT"))

    def prepare(self) -> Node:
        """Prepare the outputs before the ranks start."""
        self.outputs.prepare()
        return self

    def write(self, **files: bytes) -> None:
        """Write files as a script does; two underscores stand for a slash."""
        for name, data in files.items():
            path = self.folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def upload_settled(self) -> None:
        """Run one round of the thread that saves outputs."""
        (output,) = self.outputs._all
        output.upload_settled(threading.Event())

    def finish(self) -> str:
        """Run the thread's final upload."""
        self.outputs.start()
        return self.outputs.finish(60)

    def seen(self) -> dict[str, bytes]:
        """Return the files that the manifest of this node lists as complete."""
        return seen(self.store, self.env.node)

    def local(self) -> dict[str, bytes]:
        """Return the contents of the node's output folder."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }


def seen(store: Path, node: int = 0) -> dict[str, bytes]:
    """Return the files in the manifest; fail if an object does not match it."""
    loaded = manifest.load((store / manifest.key(node)).read_bytes())
    files = {}
    for stored_file in loaded.files:
        data = (store / stored_file.key).read_bytes()
        assert hashlib.sha256(data).hexdigest() == stored_file.sha256, stored_file
        assert len(data) == stored_file.size_bytes
        files[stored_file.name] = data
    return files


def plain(store: Path) -> dict[str, bytes]:
    """Return the files that a reader sees without manifests."""
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and manifest.FOLDER not in path.parts
    }


# -- manifests ----------------------------------------------------------------------------------

names = (
    st.text(min_size=1, max_size=20)
    .map(lambda text: os.fsdecode(text.encode("utf-8", "replace")))
    .filter(manifest.is_name)
)
stored_file = st.builds(
    StoredFile,
    name=names,
    key=names,
    size_bytes=st.integers(0, 2**60),
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    modified_ns=st.integers(0, 2**62),
    is_incomplete=st.booleans(),
)


@given(
    st.builds(
        Manifest,
        job=st.text(),
        node=st.integers(0, 10**6),
        files=st.tuples(stored_file, stored_file),
    )
)
def test_a_manifest_is_read_as_it_was_written(value: Manifest):
    """Names may contain any characters."""
    assert manifest.load(manifest.dump(value)) == value


GOOD = {"name": "a", "key": "a", "size_bytes": 1, "sha256": "0" * 64, "modified_ns": 0}


@pytest.mark.parametrize(
    "invalid",
    [
        {"name": "../a"},
        {"name": "/a"},
        {"key": "a/../../b"},
        {"name": "a\0"},
        {"sha256": "x"},
        {"size_bytes": -1},
        {"size_bytes": "many"},
        {"name": "\ud800"},
        {"key": "a\udfff"},
        {"modified_ns": 10**30},
        {"size_bytes": 10**30},
    ],
    ids=str,
)
def test_a_manifest_with_invalid_names_is_refused(invalid: dict[str, Any]):
    """A node wrote it, so it may be hostile and must not lead outside the folder."""
    value = {"format": 1, "job": "j", "node": 0, "files": [{**GOOD, **invalid}]}

    with pytest.raises(manifest.ManifestError):
        manifest.load(json.dumps(value).encode())


INFINITE = b'{"format": 1, "job": "j", "node": Infinity, "files": []}'


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"format": 2}', b"\xff", b"[" * 10**5, INFINITE]
)
def test_an_invalid_manifest_is_refused(data: bytes):
    with pytest.raises(manifest.ManifestError):
        manifest.load(data)


# -- at the end ---------------------------------------------------------------------------------


def test_every_file_is_uploaded_at_the_end(tmp_path: Path):
    node = Node(tmp_path).prepare()
    odd = os.fsdecode(b"50% \xff#?")
    (node.folder / "deep" / "empty").mkdir(parents=True)
    (node.folder / "deep" / odd).write_bytes(b"1")
    node.write(model=b"2")
    (node.folder / "latest").symlink_to("model")
    (node.folder / "loop").symlink_to(".")
    (node.folder / "gone").symlink_to("nowhere")
    os.mkfifo(node.folder / "pipe")

    assert node.finish() == ""
    assert node.seen() == {f"deep/{odd}": b"1", "latest": b"2", "model": b"2"}
    assert plain(node.store) == node.seen()


def test_files_that_cannot_be_stored_do_not_stop_the_others(tmp_path: Path):
    """The message lists each of them; the other files are stored."""
    node = Node(tmp_path).prepare()
    node.write(a__model=b"", b=b"")
    (node.store / "a").write_bytes(b"")

    problem = node.finish()

    assert problem.startswith("uploading the output OUT: writing ")
    assert "a/model: not a directory" in problem
    assert node.seen() == {"b": b""}


def test_a_missing_output_folder_is_an_error(tmp_path: Path):
    """An empty folder means no outputs; a missing folder is an error."""
    node = Node(tmp_path).prepare()
    node.write(model=b"1")
    node.upload_settled()
    for path in (node.folder / "model", node.folder):
        path.unlink() if path.is_file() else path.rmdir()

    assert node.finish() == (
        f"uploading the output OUT: reading the folder {node.folder}: no such file or directory"
        " (a script may empty the folder of an output, but not remove it)"
    )
    assert node.seen() == {"model": b"1"}


def test_a_file_in_the_place_of_an_output_folder_is_named_in_a_sentence(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.folder.rmdir()
    node.folder.write_bytes(b"1")

    assert node.finish() == (
        f"uploading the output OUT: reading the folder {node.folder}: not a directory"
        " (a script may empty the folder of an output, but not remove it)"
    )


def test_another_error_of_the_system_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/1/fd")

    node = Node(tmp_path).prepare()
    monkeypatch.setattr(output_store.OutputStore, "settle", fail)

    assert node.finish() == "uploading the output OUT: /proc/1/fd: too many open files"


def test_the_final_upload_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = Node(tmp_path).prepare()
    node.write(a=b"1")
    node.upload_settled()
    hangs = threading.Event()
    monkeypatch.setattr(objects, "write", lambda data, uri, **_: hangs.wait(60))
    node.write(a=b"22")
    node.outputs.start()

    problem = node.outputs.finish(0.2)
    hangs.set()

    assert problem == (
        "uploading the output OUT: not done after 0.2 s; the files uploaded before are complete"
    )
    assert node.seen() == {"a": b"1"}


def test_an_unusable_output_is_reported_before_the_start(tmp_path: Path):
    (tmp_path / "file").touch()
    uris = {
        f"file://{tmp_path}/file/below": "not a directory",
        "https://host/x": "cannot be stored on a web server",
        "s3://b/x": "not a URI of the form s3://bucket/key",
        "gs://bucket/x": "there is no store for gs://",
    }
    for uri, text in uris.items():
        with pytest.raises(EntryError, match="preparing the output OUT: ") as caught:
            Node(tmp_path, uri=uri).prepare()
        assert text in str(caught.value)


# -- while the ranks run ------------------------------------------------------------------------


def test_trees_of_any_depth_are_uploaded_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A thousand of these calls take a minute on a busy disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    node = Node(tmp_path).prepare()
    name = "d/" * 1100 + "model"
    objects.write(b"1", objects.uri_below(node.folder.as_uri(), name))
    try:
        assert node.finish() == ""
        assert node.seen() == {name: b"1"}
        again = Node(tmp_path, restore_outputs=env.RESTORE_OWN).prepare()
        assert (again.folder / name).read_bytes() == b"1"
        listed = [entry.name for entry in objects.list(node.folder.as_uri() + "/")]
        assert listed == [name]
    finally:
        # Python's shutil.rmtree may also fail at a thousand levels.
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def test_a_path_that_is_too_long_is_an_error(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(model=b"1")
    name = "n" * 200
    top = os.open(node.folder, os.O_RDONLY)
    for _ in range(21):
        os.mkdir(name, dir_fd=top)
        below = os.open(name, os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(os.open("model", os.O_WRONLY | os.O_CREAT, dir_fd=top))
    os.close(top)

    assert "file name too long" in node.finish()
    assert node.seen() == {"model": b"1"}


@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), MemoryError(), RuntimeError("can't start new thread")]
)
def test_any_failure_of_the_upload_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    node = Node(tmp_path).prepare()
    node.write(model=b"1")

    def fail(data: bytes, uri: str, **_: object) -> None:
        raise error

    monkeypatch.setattr(objects, "write", fail)

    expected = f"uploading the output OUT: {type(error).__name__}: {error}"
    assert node.finish() == expected
    node.upload_settled()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_upload_thread_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = Node(tmp_path).prepare()
    node.write(model=b"1")

    def leave(data: bytes, uri: str, **_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(objects, "write", leave)

    assert node.finish() == "uploading the output OUT: its thread ended before it was done"


def test_outputs_need_a_thread_before_the_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Node(tmp_path).prepare()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(EntryError, match="thread that stores outputs: can't start new thread"):
        node.outputs.start()


# -- incomplete files ---------------------------------------------------------------------------


def incomplete(node: Node) -> set[str]:
    """Return the files that the manifest lists as incomplete."""
    loaded = manifest.load((node.store / manifest.key(node.env.node)).read_bytes())
    return {stored_file.name for stored_file in loaded.files if stored_file.is_incomplete}


def age(path: Path, seconds: float) -> None:
    """Set the modification time of a file to this many seconds ago."""
    at = time.time() - seconds
    os.utime(path, (at, at))


def fail(node: Node, *, is_kill: bool = False) -> None:
    """Run the final upload of a node whose ranks fail now."""
    (output,) = node.outputs._all
    assert output.upload_all(RankFailure(time.time(), is_kill)) == []


def test_files_written_just_before_a_failure_are_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output_folder, "SETTLE_S", 60.0)
    node = Node(tmp_path).prepare()
    node.write(old=b"1", half=b"1", ckpt__half=b"1", new=b"1")
    age(node.folder / "old", 3600)
    # A script renames a file only when it is complete.
    (node.folder / "new").rename(node.folder / "whole")
    os.utime(node.folder / "whole")
    time.sleep(0.05)
    (node.folder / "whole").rename(node.folder / "renamed")

    fail(node)

    assert node.seen() == node.local()
    assert incomplete(node) == {"half", "ckpt/half"}


def test_nothing_is_incomplete_when_all_ranks_succeeded(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(model=b"1")

    assert node.finish() == ""
    assert incomplete(node) == set()


def test_files_open_for_writing_are_incomplete(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(read=b"1")
    with (node.folder / "written").open("wb", buffering=0) as file, (node.folder / "read").open():
        file.write(b"1")
        node.upload_settled()
        meanwhile = incomplete(node)
    node.upload_settled()

    assert meanwhile == {"written"}
    assert node.seen() == {"read": b"1", "written": b"1"}
    assert incomplete(node) == set()


def test_files_that_a_killed_rank_had_open_are_incomplete(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(model=b"1")
    with (node.folder / "open").open("wb", buffering=0) as file:
        file.write(b"1")
        age(node.folder / "open", 3600)
        age(node.folder / "model", 3600)
        node.outputs.note_open_files()

    fail(node)

    assert incomplete(node) == {"open"}


def test_a_file_that_was_open_and_is_removed_does_not_stop_the_others(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(model=b"1", lock=b"1")
    node.upload_settled()
    with (node.folder / "lock").open("ab"):
        node.outputs.note_open_files()
    (node.folder / "lock").unlink()
    node.write(new=b"2")

    fail(node)

    assert node.seen() == node.local()


def test_files_written_since_the_last_check_of_a_killed_rank_are_incomplete(tmp_path: Path):
    nodes = [Node(tmp_path / name).prepare() for name in ("killed", "ended")]
    for node in nodes:
        node.write(before=b"1")
        node.upload_settled()
        node.write(since=b"1", whole=b"1")
    time.sleep(0.1)
    for node in nodes:
        (node.folder / "whole").rename(node.folder / "renamed")
        fail(node, is_kill=node is nodes[0])

    assert [incomplete(node) for node in nodes] == [{"since"}, set()]


def test_a_complete_version_is_not_replaced_by_an_incomplete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Node(tmp_path).prepare()
    node.write(last=b"whole", log=b"one\n")
    node.upload_settled()
    monkeypatch.setattr(output_folder, "SETTLE_S", 60.0)
    node.write(last=b"ha", log=b"one\ntwo\n")

    fail(node)

    assert node.seen() == plain(node.store)
    assert node.seen() == {"last": b"whole", "last.incomplete": b"ha", "log": b"one\ntwo\n"}
    assert incomplete(node) == {"last.incomplete", "log"}
    assert node.local() == {"last": b"ha", "log": b"one\ntwo\n"}


def test_incomplete_files_are_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_folder, "SETTLE_S", 60.0)
    node = Node(tmp_path).prepare()
    node.write(whole=b"1", half=b"1")
    age(node.folder / "whole", 3600)
    fail(node)

    again = Node(tmp_path, restore_outputs=env.RESTORE_OWN).prepare()

    assert again.local() == {"whole": b"1"}
    assert again.finish() == ""
    assert again.seen() == {"whole": b"1", "half": b"1"}
    assert incomplete(again) == {"half"}


def test_stored_files_are_listed_before_a_large_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (outputs, output_store):
        monkeypatch.setattr(module, "SMALL_BYTES", 10)
    node = Node(tmp_path).prepare()
    node.write(small=b"1", large=b"1" * 11)
    before: list[dict[str, bytes]] = []
    put = objects.put
    monkeypatch.setattr(
        objects, "put", lambda *args, **more: (before.append(node.seen()), put(*args, **more))
    )

    assert node.finish() == ""
    assert before == [{"small": b"1"}]
    assert node.seen() == node.local()


def test_changed_files_are_uploaded_while_the_job_runs(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(a=b"1", ckpt__b=b"2")
    node.upload_settled()
    first = node.seen()
    times = {path: path.stat().st_mtime_ns for path in node.store.rglob("*") if path.is_file()}
    node.upload_settled()

    assert first == {"a": b"1", "ckpt/b": b"2"}
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_folder_waits_while_one_of_its_files_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Node(tmp_path).prepare()
    node.write(ckpt__model=b"old", ckpt__state=b"old", log__text=b"1")
    node.upload_settled()
    node.write(ckpt__model=b"new!", log__text=b"12")
    (output,) = node.outputs._all

    class Busy(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            node.write(ckpt__state=os.urandom(20))
            return False

    output.upload_settled(Busy())
    meanwhile = node.seen()
    node.write(ckpt__state=b"new!")
    node.upload_settled()

    assert meanwhile == {"ckpt/model": b"old", "ckpt/state": b"old", "log/text": b"12"}
    assert node.seen() == {"ckpt/model": b"new!", "ckpt/state": b"new!", "log/text": b"12"}


def test_a_waiting_folder_keeps_the_objects_of_its_last_manifest(tmp_path: Path):
    """A file that was only touched, and then changed, is still listed with its old content."""
    node = Node(tmp_path).prepare()
    node.write(run__model=b"old", run__log=b"")
    node.upload_settled()
    (output,) = node.outputs._all
    os.utime(node.folder / "run" / "model")
    output.upload_settled(Writes(node.folder / "run" / "log"))
    node.write(run__model=b"new")
    output.upload_settled(Writes(node.folder / "run" / "log"))

    assert node.seen() == {"run/model": b"old", "run/log": b""}
    assert node.finish() == ""
    assert node.seen() == node.local() == plain(node.store)


class Writes(threading.Event):
    """Appends to a file between the two scans of the folder."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def wait(self, timeout: float | None = None) -> bool:
        with self._path.open("ab") as file:
            file.write(b"line\n")
        return False


def test_a_file_that_grows_does_not_hold_up_its_neighbours(tmp_path: Path):
    node = Node(tmp_path).prepare()
    (output,) = node.outputs._all
    node.write(model=b"1", log=b"", ckpt__a=b"1")

    output.upload_settled(Writes(node.folder / "log"))

    assert node.seen() == {"model": b"1", "ckpt/a": b"1"}
    assert node.finish() == ""
    assert node.seen() == node.local()


def test_a_constantly_written_log_delays_its_folder_only_for_a_while(tmp_path: Path):
    node = Node(tmp_path).prepare()
    (output,) = node.outputs._all
    node.write(run__model=b"1", run__log=b"")
    for _ in range(outputs._PATIENCE):
        output.upload_settled(Writes(node.folder / "run" / "log"))
    before = node.seen()

    output.upload_settled(Writes(node.folder / "run" / "log"))

    assert before == {}
    assert node.seen() == {"run/model": b"1"}
    assert node.finish() == ""
    assert node.seen() == node.local()


def test_a_file_that_changes_while_it_is_read_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    node = Node(tmp_path).prepare()
    node.write(a=b"old")
    node.upload_settled()
    write = objects.write

    def slow(data: bytes, uri: str, **_: object) -> None:
        write(data, uri)
        if manifest.key(0) not in uri:
            node.write(a=b"newest")

    monkeypatch.setattr(objects, "write", slow)
    node.write(a=b"newer")
    node.upload_settled()
    meanwhile = node.seen()
    monkeypatch.setattr(objects, "write", write)
    node.upload_settled()

    assert meanwhile == {"a": b"old"}
    assert node.seen() == {"a": b"newest"}


@pytest.mark.parametrize("size", [0, output_store.SMALL_BYTES + 1])
@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_takes_the_place_of_a_file_is_neither_read_nor_waited_for(
    tmp_path: Path, kind: str, size: int
):
    path = tmp_path / "file"
    if kind == "device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    store = output_store.OutputStore("job", 0, f"file://{tmp_path}/store")

    with pytest.raises(objects.ObjectError, match="not a regular file"):
        store.store("file", str(path), output_folder.Stamp(size, 0, 0), print)
    with pytest.raises(objects.ObjectError, match="not a regular file"):
        objects.put(str(path), f"file://{tmp_path}/store/file")

    assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


def test_a_removed_file_leaves_the_manifest(tmp_path: Path):
    """The output mirrors its folder: a job that keeps its last three checkpoints has three."""
    node = Node(tmp_path).prepare()
    node.write(a=b"1", b=b"2")
    node.upload_settled()
    (node.folder / "a").unlink()
    node.upload_settled()

    assert node.seen() == plain(node.store) == {"b": b"2"}


def test_an_upload_error_is_reported_once_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    node = Node(tmp_path).prepare()
    write = objects.write

    def refuse(data: bytes, uri: str, **_: object) -> None:
        raise objects.ObjectError("writing x: 503 SlowDown")

    monkeypatch.setattr(objects, "write", refuse)
    node.write(a=b"1")
    node.upload_settled()
    node.upload_settled()
    monkeypatch.setattr(objects, "write", write)
    node.upload_settled()

    logged = capfd.readouterr().err
    assert logged.count("uploading the output OUT while the job runs: writing x: 503 SlowDown") == 1
    assert node.seen() == {"a": b"1"}


def test_the_thread_uploads_at_intervals_with_low_priority(
    tmp_path: Path, until: Callable[..., None]
):
    node = Node(tmp_path, output_sync_s=0.05).prepare()
    node.outputs.start()
    node.write(a=b"1")
    until(lambda: node.seen() == {"a": b"1"})
    priority = os.getpriority(os.PRIO_PROCESS, node.outputs._thread.native_id or 0)
    node.write(a=b"two")
    until(lambda: node.seen() == {"a": b"two"})

    assert priority == 19
    assert node.outputs.finish(60) == ""
    assert node.seen() == plain(node.store) == {"a": b"two"}


# -- killed at any moment -----------------------------------------------------------------------

STATES: list[dict[str, bytes]] = [
    {"last": b"1", "ckpt/a": b"1", "ckpt/b": b"1"},
    {"last": b"22", "ckpt/a": b"22", "ckpt/b": b"22"},
    {"last": b"333", "ckpt/a": b"333", "ckpt/b": b"333", "new/x": b"3"},
    {"last": b"4444", "new/x": b"3"},
]


class Killed(BaseException):
    """Simulates a kill of the process; no code catches this."""


@contextlib.contextmanager
def killed_after(count: int, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Allow ``count`` changes to the store, and raise ``Killed`` at the next one."""
    left = [count]

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **more: Any) -> Any:
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return act(*args, **more)

        return do

    with patch.context() as inner:
        for name in ("write", "put", "copy", "delete"):
            inner.setattr(objects, name, counted(getattr(objects, name)))
        inner.setattr(outputs, "_THREADS", 1)
        yield left


def run(node: Node) -> None:
    """Write and upload one set of files after another, and run the final upload."""
    for state in STATES:
        for name in set(node.local()) - set(state):
            (node.folder / name).unlink()
        node.write(**{name.replace("/", "__"): data for name, data in state.items()})
        node.upload_settled()
    (output,) = node.outputs._all
    output.upload_all()


def test_a_reader_always_sees_a_complete_set_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whenever the node is killed, the manifest lists one of the sets, and all its objects exist.

    The next start restores that set.
    """
    kills = 0
    while True:
        node = Node(tmp_path / str(kills)).prepare()
        with killed_after(kills, monkeypatch) as left, contextlib.suppress(Killed):
            run(node)
        assert node.seen() in [{}, *STATES], f"after {kills} changes"
        again = Node(tmp_path / str(kills), restore_outputs=env.RESTORE_OWN).prepare()
        assert again.local() == node.seen()
        if left[0] > 0:
            break
        kills += 1

    assert kills > 15
    assert node.seen() == plain(node.store) == STATES[-1]


@given(data=st.data())
def test_after_any_changes_the_final_upload_matches_the_folder(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    node = Node(tmp_path_factory.mktemp("node")).prepare()
    few = st.sampled_from(["a", "b", "deep/a", "deep/b"])
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(few)
        if data.draw(st.booleans()):
            node.write(**{name.replace("/", "__"): data.draw(st.binary(max_size=3))})
        elif (node.folder / name).exists():
            (node.folder / name).unlink()
        if data.draw(st.booleans()):
            node.upload_settled()
            assert node.seen() == node.local()

    assert node.finish() == ""
    assert node.seen() == node.local() == plain(node.store)
    left = [path.name for path in node.store.rglob("*") if path.is_file()]
    assert sorted(left) == sorted([*map(os.path.basename, node.local()), "node-0.json"])


# -- another attempt ----------------------------------------------------------------------------


def test_outputs_of_an_earlier_attempt_stay(tmp_path: Path):
    """A second attempt removes no files, and replaces those that it writes again."""
    first = Node(tmp_path).prepare()
    first.write(a=b"1", b=b"1")
    first.finish()
    second = Node(tmp_path).prepare()
    second.write(b=b"2")

    assert second.local() == {"b": b"2"}
    assert second.finish() == ""
    assert second.seen() == plain(second.store) == {"a": b"1", "b": b"2"}


def test_an_unchanged_file_is_not_uploaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = Node(tmp_path).prepare()
    first.write(a=b"1")
    first.finish()
    second = Node(tmp_path).prepare()
    second.write(a=b"1")
    sent: list[str] = []
    write = objects.write
    monkeypatch.setattr(
        objects, "write", lambda data, uri, **_: (sent.append(uri), write(data, uri))[1]
    )

    assert second.finish() == ""
    assert [uri for uri in sent if manifest.FOLDER not in uri] == []


@pytest.mark.parametrize("which", [env.RESTORE_OWN, env.RESTORE_ALL])
def test_outputs_are_restored(tmp_path: Path, which: str):
    """A node gets its own files or those of all nodes, with their modification times."""
    for index, data in ((0, b"head"), (1, b"worker")):
        node = Node(tmp_path, index).prepare()
        node.write(**{f"ckpt__{index}": data})
        os.utime(node.folder / "ckpt" / str(index), ns=(0, 1_234_567_891))
        node.finish()

    again = Node(tmp_path, 1, restore_outputs=which).prepare()

    expected = {"ckpt/1": b"worker"}
    if which == env.RESTORE_ALL:
        expected["ckpt/0"] = b"head"
    assert again.local() == expected
    assert (again.folder / "ckpt" / "1").stat().st_mtime_ns == 1_234_567_891
    # Restored files of other nodes do not enter this node's manifest.
    assert again.finish() == ""
    assert again.seen() == {"ckpt/1": b"worker"}
    assert again.outputs.clashes() == ""


def test_damaged_outputs_are_not_restored(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(model=b"good")
    node.finish()
    (node.store / "model").write_bytes(b"evil")

    with pytest.raises(EntryError, match=r"its digest is .*, not "):
        Node(tmp_path, restore_outputs=env.RESTORE_OWN).prepare()


def test_restored_files_that_are_removed_leave_the_manifest(tmp_path: Path):
    node = Node(tmp_path).prepare()
    node.write(a=b"1", b=b"2")
    node.finish()
    again = Node(tmp_path, restore_outputs=env.RESTORE_OWN).prepare()
    (again.folder / "a").unlink()

    assert again.finish() == ""
    assert again.seen() == plain(again.store) == {"b": b"2"}


def test_two_nodes_that_write_different_files_of_a_name_are_reported(tmp_path: Path):
    nodes = [Node(tmp_path, index).prepare() for index in range(2)]
    for index, node in enumerate(nodes):
        node.write(same=b"x", deep__log=b"%d" % index)
        assert node.finish() == ""

    assert nodes[0].outputs.clashes() == (
        "uploading the output OUT: nodes 0, 1 all wrote 'deep/log',"
        " and only one of these files is left"
    )
