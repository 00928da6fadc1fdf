"""One suite for every store: the numbered promises of ``ObjectStore``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.errors import ObjectMissing, StoreError
from cloudjob.package import CodePackage, SourceCache, cache, claims, pack
from cloudjob.package.claims import Claim, LayerMissing, StoredLayers
from cloudjob.store import open_store, with_store_options
from cloudjob.store.base import ObjectStore
from cloudjob.store.directory import DirectoryStore
from jobentry import objects
from jobentry.errors import EntryError
from jobentry.staging import code_package

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryStore:
    """Open an empty directory store."""
    return DirectoryStore(tmp_path / "store")


segments = (
    st.binary(min_size=1, max_size=40)
    .filter(lambda name: not set(name) & {0, 0x2F} and name not in (b".", b".."))
    .map(os.fsdecode)
)
keys = st.lists(segments, min_size=1, max_size=3).map("/".join)


# ---- promises 1 and 3: objects are complete, and read as they were written


def test_written_objects_are_read_back(store: ObjectStore, tmp_path: Path, entry_environ: None):
    data = bytes(range(256)) * 20_000
    (tmp_path / "in").write_bytes(data)

    uri = store.put(tmp_path / "in", "job/code.tar")
    store.put_bytes(b"", "job/empty")
    store.fetch("job/code.tar", tmp_path / "new" / "out")

    assert store.get_bytes("job/code.tar") == (tmp_path / "new" / "out").read_bytes() == data
    assert objects.read(uri) == data
    assert store.get_bytes("job/empty") == b""
    assert store.get_range("job/code.tar", 5, 300) == data[5:305]
    assert store.get_range("job/code.tar", len(data) - 5, 300) == data[-5:]
    assert store.get_range("job/code.tar", len(data), 1) == b""
    assert store.get_range("job/empty", 0, 10) == b""


def test_a_sparse_file_takes_no_more_space_when_it_is_stored_and_fetched(
    store: ObjectStore, tmp_path: Path, entry_environ: None
):
    """A table of 24 MiB for which a script has written two numbers."""
    size_bytes = 24 * 1024 * 1024
    for name, last in (("ends-in-data", b"8"), ("ends-in-a-hole", b"")):
        with (tmp_path / name).open("wb") as file:
            file.seek(9_000_001)
            file.write(b"7")
            file.truncate(size_bytes - len(last))
            file.seek(0, os.SEEK_END)
            file.write(last)

        uri = store.put(tmp_path / name, f"job/{name}")
        store.fetch(f"job/{name}", tmp_path / "here" / name)
        objects.fetch(uri, str(tmp_path / "node" / name))
        store.copy(f"job/{name}", f"job/copy-of-{name}")
        copies = [tmp_path / "here" / name, tmp_path / "node" / name]
        if isinstance(store, DirectoryStore):
            objects.put(str(tmp_path / name), store.uri(f"job/node-{name}"))
            keys = (f"job/{name}", f"job/copy-of-{name}", f"job/node-{name}")
            copies += [store.root / key for key in keys]

        for path in copies:
            assert path.read_bytes() == (tmp_path / name).read_bytes()
            assert path.stat().st_blocks * 512 < size_bytes // 16, path


def test_many_small_objects_arrive_in_any_order(store: ObjectStore):
    """Each arrives once with its key, whatever its size and name."""
    contents = {f"a b/ü+%/{n}": bytes(range(n)) * n * n for n in range(50)}
    contents["page"] = b"<Error><Code>SlowDown</Code></Error>"
    for key, data in contents.items():
        store.put_bytes(data, key)

    content_of = list(store.get_each(list(contents)))

    assert dict(content_of) == contents
    assert len(content_of) == len(contents)
    assert list(store.get_each([])) == []


def test_one_missing_object_among_many_is_an_error(store: ObjectStore):
    store.put_bytes(b"x", "here")

    with pytest.raises(StoreError, match=r"reading gone in .*: no such object"):
        list(store.get_each(["here", "gone"]))
    with pytest.raises(StoreError, match=r"reading '\.\./out': not a valid key"):
        list(store.get_each(["here", "../out"]))


def test_a_second_put_replaces_the_object(store: ObjectStore):
    """The last writer wins, with all of its bytes."""
    store.put_bytes(b"a long first one", "key")
    store.put_bytes(b"second", "key")

    assert store.get_bytes("key") == b"second"
    assert list(store.list()) == ["key"]


@pytest.mark.parametrize("name", ["key", "a b/ü+%/c"])
def test_a_copy_is_the_same_object_under_another_key(store: ObjectStore, name: str):
    store.put_bytes(b"\0data\xff", name)
    store.put_bytes(b"old", "job/node/copy")
    store.copy(name, "job/node/copy")

    assert store.get_bytes("job/node/copy") == b"\0data\xff"
    assert store.get_bytes(name) == b"\0data\xff"


def test_copying_a_missing_object_is_refused(store: ObjectStore):
    with pytest.raises(StoreError):
        store.copy("gone", "copy")

    assert not store.exists("copy")


def test_a_failed_fetch_leaves_the_old_file(store: ObjectStore, tmp_path: Path):
    store.put_bytes(b"x" * 100_000, "key")
    (tmp_path / "out").write_bytes(b"old")

    with (
        file_size_limit(1000),
        pytest.raises(StoreError, match=r"fetching key from .*: file too large"),
    ):
        store.fetch("key", tmp_path / "out")

    assert (tmp_path / "out").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "store"}


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """Limit the size of the files that this process writes, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- promise 4: the node half finds the same object


@given(key=keys, data=st.binary(max_size=100), root=segments)
def test_both_halves_read_each_others_objects(key: str, data: bytes, root: str):
    """For every valid name, both halves find the same object by its key and its URI."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(DirectoryStore(Path(folder, root)).uri("x")[: -len("/x")])
        uri = store.put_bytes(data, key)

        assert uri == store.uri(key)
        assert uri.isascii()
        assert not set(uri) & set(' #?"<>\\')
        assert objects.read(uri) == data
        objects.write(data + b"!", uri)
        assert store.get_bytes(key) == data + b"!"
        assert list(store.list()) == [key]


def test_uris_are_percent_encoded():
    store = DirectoryStore(Path("/a b"))

    assert store.uri("50%/é#?") == "file:///a%20b/50%25/%C3%A9%23%3F"


# ---- list, exists, delete


def test_list_yields_keys_with_a_prefix_sorted_by_bytes(store: ObjectStore):
    """A prefix is a string, not a folder."""
    for key in ("b", "a/c", "a.txt", "a/b/c", "ab", "é"):
        store.put_bytes(b"", key)

    assert list(store.list()) == ["a.txt", "a/b/c", "a/c", "ab", "b", "é"]
    assert list(store.list("a")) == ["a.txt", "a/b/c", "a/c", "ab"]
    assert list(store.list("a/")) == ["a/b/c", "a/c"]
    assert list(store.list("a/b")) == ["a/b/c"]
    assert list(store.list("a/c/d")) == list(store.list("x/y")) == list(store.list("..")) == []


def test_deleting_twice_is_not_an_error(store: ObjectStore):
    store.put_bytes(b"", "a/b")

    for key in ("a/b", "a/b", "never", "a", "a/b/c"):
        store.delete(key)

    assert not store.exists("a/b")
    assert list(store.list()) == []


def test_a_store_without_a_root_is_empty(store: ObjectStore):
    assert list(store.list()) == []
    assert not store.exists("a")


# ---- layers of packages that are damaged in the store


def flipped(data: bytes, position: int) -> bytes:
    """Return the bytes with one bit flipped."""
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a content": lambda data: flipped(data, 1000),
    "the manifest": lambda data: flipped(data, data.index(b'"sha256"') + 20),
    "the directory": lambda data: flipped(data, data.index(b"PK\1\2")),
    "the end": lambda data: flipped(data, -1),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "too long": lambda data: data + b"\0",
}


def submit_source(
    store: ObjectStore, source: Path, source_cache: SourceCache, job: str
) -> tuple[StoredLayers, SourceCache]:
    """Pack a source and store what is new, as a submit does."""

    def pack_source(last_cache: SourceCache) -> CodePackage:
        destination = source.parent / "layer"
        return pack(
            source, destination, script="train.py", limit_bytes=1 << 30, source_cache=last_cache
        )

    package = pack_source(source_cache)
    with Claim(store, job) as claim:
        try:
            kept = claim.keep(package)
        except LayerMissing:
            package = pack_source(SourceCache())
            kept = claim.keep(package)
    store.put_bytes(claims.descriptor(package, kept.layers), f"{job}/code.json")
    return kept, cache.with_layers(package.source_cache, kept.layers)


def test_a_damaged_layer_is_sent_again(store: ObjectStore, tmp_path: Path, entry_environ: None):
    """The submit finds a damaged manifest; a node finds other damage, and marks the layer."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print()\n" * 50)
    (source / "large.bin").write_bytes(os.urandom(200_000))
    source_cache = SourceCache()
    for number, (name, damage) in enumerate(DAMAGES.items()):
        kept, source_cache = submit_source(store, source, source_cache, "before")
        (layer,) = kept.layers
        store.put_bytes(damage(store.get_bytes(layer.key)), layer.key)
        if name == "a content":
            with pytest.raises(EntryError, match="is damaged") as caught:
                code_package.fetch_code(
                    store.uri("before/code.json"), source_cache.digest, str(tmp_path / "x")
                )
            assert caught.value.damaged_layers == (layer.key,)

        kept, source_cache = submit_source(store, source, source_cache, f"job-{number}")

        assert kept.sent_layers == 1, name
        target = tmp_path / f"code-{number}"
        code_package.fetch_code(
            store.uri(f"job-{number}/code.json"), source_cache.digest, str(target)
        )
        assert (target / "large.bin").read_bytes() == (source / "large.bin").read_bytes()
        assert submit_source(store, source, source_cache, "after")[0].sent_layers == 0
        assert list(store.list("damaged/")) == []


# ---- promises 5 and 6: refusals


INVALID_KEYS = [
    "",
    "/etc/passwd",
    "..",
    "a/../../b",
    "a//b",
    "a/",
    "./a",
    "a\0b",
]
UNFINISHED = "job/record/.cloudjob-tmp-1"


def test_every_method_refuses_an_invalid_key(store: ObjectStore, tmp_path: Path):
    (tmp_path / "in").touch()
    verbs: list[Callable[[str], object]] = [
        lambda key: store.put(tmp_path / "in", key),
        lambda key: store.put_bytes(b"", key),
        store.get_bytes,
        lambda key: store.get_range(key, 0, 1),
        lambda key: store.fetch(key, tmp_path / "out"),
        store.exists,
        store.uri,
    ]
    for key in [*INVALID_KEYS, UNFINISHED]:
        for verb in verbs:
            with pytest.raises(StoreError):
                verb(key)
    for key in INVALID_KEYS:
        if key == "a/" and not isinstance(store, DirectoryStore):
            # In a bucket, other tools make empty objects with the name of a folder and a slash.
            store.delete(key)
            continue
        with pytest.raises(StoreError):
            store.delete(key)

    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_missing_objects_and_files_are_errors(store: ObjectStore, tmp_path: Path):
    with pytest.raises(ObjectMissing, match=r"reading job/a in .*: no such object"):
        store.get_bytes("job/a")
    with pytest.raises(ObjectMissing, match=r"reading job/a in .*: no such object"):
        store.get_range("job/a", 0, 1)
    with pytest.raises(ObjectMissing, match=r"fetching job/a in .*: no such object"):
        store.fetch("job/a", tmp_path / "out")
    with pytest.raises(StoreError, match=r"writing job/a in .*: reading .*/in: no such file"):
        store.put(tmp_path / "in", "job/a")


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("/tmp/store", "for a folder write file:///its/path"),
        ("fil:///tmp", "did you mean file://?"),
        ("gopher://x", "allowed: file, s3, obs"),
        ("file://relative", "file:///its/path"),
        ("file:///a%00b", ""),
    ],
)
def test_an_invalid_store_uri_is_refused(uri: str, hint: str):
    with pytest.raises(StoreError) as caught:
        open_store(uri)

    assert caught.value.message.startswith(f"opening the store '{uri}': ")
    assert caught.value.hint == hint
    assert caught.value.exit_code == 4


# ---- only the directory store


def test_a_killed_writer_changes_no_object(directory: DirectoryStore, tmp_path: Path):
    store, store_uri = directory, f"file://{directory.root}"
    store.put_bytes(b"old", "job/replaced")
    pipe = tmp_path / "pipe"
    for key in ("job/new", "job/replaced"):
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        code = "import sys, pathlib; from cloudjob.store import open_store\n"
        code += "open_store(sys.argv[1]).put(pathlib.Path(sys.argv[2]), sys.argv[3])"
        writer = subprocess.Popen(
            [sys.executable, "-c", code, store_uri, pipe, key], env={"PYTHONPATH": str(ROOT)}
        )
        with pipe.open("wb") as feed:
            feed.write(b"x" * (3 << 20))
            feed.flush()
            until(lambda: any(path.stat().st_size for path in half_written(tmp_path)))
            writer.kill()
            writer.wait()
        for path in half_written(tmp_path):
            path.unlink()

    assert list(store.list()) == ["job/replaced"]
    assert not store.exists("job/new")
    assert store.get_bytes("job/replaced") == b"old"


def half_written(folder: Path) -> list[Path]:
    """Return the files that writers have not finished."""
    return list((folder / "store" / "job").glob(".cloudjob-tmp-*"))


def until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_write_leaves_nothing(directory: DirectoryStore, tmp_path: Path):
    (tmp_path / "in").write_bytes(b"x" * 100_000)

    with file_size_limit(1000):
        with pytest.raises(StoreError, match=r"writing job/a in .*: file too large"):
            directory.put(tmp_path / "in", "job/a")
        with pytest.raises(StoreError, match=r"writing job/b in .*: file too large"):
            directory.put_bytes(b"x" * 1001, "job/b")

    assert list(directory.list()) == []
    assert list((tmp_path / "store" / "job").iterdir()) == []


def test_objects_are_private(directory: DirectoryStore):
    """Folders are 0700 and objects 0600, whatever the umask is."""
    before = os.umask(0)
    try:
        directory.put_bytes(b"", "job/a")
    finally:
        os.umask(before)

    modes = [path.stat().st_mode & 0o777 for path in (directory.root, directory.root / "job")]
    assert modes == [0o700, 0o700]
    assert (directory.root / "job" / "a").stat().st_mode & 0o777 == 0o600


def test_a_file_in_place_of_a_folder_is_reported(directory: DirectoryStore):
    directory.put_bytes(b"", "a/b")

    with pytest.raises(StoreError, match=r"writing a/b/c/d in .*: not a directory"):
        directory.put_bytes(b"", "a/b/c/d")
    with pytest.raises(StoreError, match=r"writing a in .*: is a directory"):
        directory.put_bytes(b"", "a")
    with pytest.raises(StoreError, match=r"reading a in .*: is a directory"):
        directory.get_bytes("a")
    with pytest.raises(StoreError, match=r"writing c in .*: not a directory"):
        DirectoryStore(directory.root / "a" / "b").put_bytes(b"", "c")
    with pytest.raises(StoreError, match=r"listing keys in .*: not a directory"):
        list(DirectoryStore(directory.root / "a" / "b").list())


def test_a_store_without_write_permission_is_reported():
    before = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "store")
        root.mkdir(mode=0o500)
        Path(folder).chmod(0o755)
        root.chmod(0o555)
        if before == 0:  # permissions do not apply to root
            os.seteuid(65534)
        try:
            with pytest.raises(StoreError, match=r"writing a in .*: permission denied") as caught:
                DirectoryStore(root).put_bytes(b"", "a")
        finally:
            os.seteuid(before)

    assert caught.value.hint == "may this user read and write there?"


def test_an_unfinished_write_is_not_listed_but_can_be_deleted(
    store: ObjectStore, entry_environ: None
):
    """ModelArts uploads the folder into which the node half writes, with its temporary files."""
    store.put_bytes(b"x", "job/record/a")
    uri = store.uri("job/record/a")
    objects.write(b"half", uri[:-1] + ".cloudjob-tmp-1")

    assert list(store.list("job/")) == ["job/record/a"]
    assert list(store.list("job/", with_unfinished=True)) == [UNFINISHED, "job/record/a"]
    store.delete(UNFINISHED)
    assert list(store.list("job/", with_unfinished=True)) == ["job/record/a"]


def test_a_file_system_without_files_is_reported():
    """``/proc`` accepts no new files, not even from root."""
    with pytest.raises(StoreError, match="writing a in /proc/store: no such"):
        DirectoryStore(Path("/proc/store")).put_bytes(b"", "a")


def test_only_old_unfinished_writes_are_removed(directory: DirectoryStore):
    directory.put_bytes(b"x", "job/a")
    unfinished = directory.root / "job" / ".cloudjob-tmp-0123"
    unfinished.write_bytes(b"half")

    assert directory.remove_unfinished(3600) == 0
    assert unfinished.exists()
    os.utime(unfinished, (0, 0))
    assert directory.remove_unfinished(3600) == 1
    assert not unfinished.exists()
    assert list(directory.list()) == ["job/a"]


def test_an_output_uri_gets_the_options_of_the_jobs_store():
    store = "s3://bucket/jobs?endpoint=https://minio:9000"

    assert (
        with_store_options("s3://other/out", store) == "s3://other/out?endpoint=https://minio:9000"
    )
    assert with_store_options("file:///out", store) == "file:///out"
    assert with_store_options("s3://other/out", "file:///jobs") == "s3://other/out"
