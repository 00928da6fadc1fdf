"""Layers in a store are kept while a job needs them and collected afterwards, even in races."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cloudjob.errors import StoreError
from cloudjob.package import CodePackage, SourceCache, cache, claims, contents, pack
from cloudjob.package.cache import with_layers
from cloudjob.package.claims import Claim, LayerMissing
from cloudjob.package.collection import Collected, collect
from cloudjob.store.directory import DirectoryStore
from jobentry.contract import exits
from jobentry.contract.paths import JobPaths
from jobentry.contract.zip_layer import open_layer
from jobentry.staging import code_package

WEEK_S = 7 * 24 * 3600.0


class Store:
    """A directory store that calls a function before each of its operations."""

    def __init__(self, folder: Path) -> None:
        self._inner = DirectoryStore(folder)
        self.before: Callable[[str, str], None] = lambda _verb, _key: None

    def __getattr__(self, verb: str) -> Callable[..., object]:
        method = getattr(self._inner, verb)

        def call(*args: object, **options: object) -> object:
            # The key is the last argument of put and put_bytes, and the only argument otherwise.
            self.before(verb, str(args[-1]) if args else "")
            return method(*args, **options)

        return call


class Laptop:
    """A user who submits one source repeatedly."""

    def __init__(self, folder: Path, store: object) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.source.mkdir(parents=True)
        (self.source / "train.py").write_text("print()\n")
        (self.source / "large.bin").write_bytes(random.Random(1).randbytes(100_000))
        self.store = store
        self.source_cache = SourceCache()
        self.count = 0

    def pack(self, source_cache: SourceCache | None = None) -> CodePackage:
        """Pack the source with the saved cache."""
        return pack(
            self.source, self.folder / "layer", script="train.py", limit_bytes=1 << 30,
            source_cache=self.source_cache if source_cache is None else source_cache,
        )  # fmt: skip

    def submit(self) -> str:
        """Submit the source as the pipeline does, and return the id of the job."""
        self.count += 1
        job = f"{self.folder.name}-{self.count}"
        package = self.pack()
        with Claim(self.store, job) as claim:  # type: ignore[arg-type]
            try:
                kept = claim.keep(package)
            except LayerMissing:
                package = self.pack(SourceCache())
                kept = claim.keep(package)
            self.source_cache = with_layers(package.source_cache, kept.layers)
            self.store.put_bytes(claims.descriptor(package, kept.layers), f"{job}/code.json")
        return job

    def end(self, job: str, ago_s: float) -> None:
        """Store the record of a job that ended ``ago_s`` seconds ago."""
        ended = datetime.now(timezone.utc) - timedelta(seconds=ago_s)
        record = exits.ExitRecord(job=job, outcome=exits.Outcome(0), ended_at=ended.isoformat())
        self.store.put_bytes(exits.dump(record), JobPaths(job).record)

    def check(self, job: str, target: Path) -> None:
        """Check that a node can fetch the code of this job."""
        uri = self.store.uri(f"{job}/code.json")
        digest = json.loads(self.store.get_bytes(f"{job}/code.json"))["digest"]
        code_package.fetch_code(uri, digest, str(target))


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip ``fsync``: the tests store thousands of objects that need not survive a crash."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Make an empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def laptop(tmp_path: Path, store: Store) -> Laptop:
    """Make a user."""
    return Laptop(tmp_path / "me", store)


def keys(store: Store, prefix: str = "") -> list[str]:
    """Return the keys in a store."""
    return list(store.list(prefix))


def gc(store: Store, *, keep_s: float = WEEK_S, dry_run: bool = False) -> Collected:
    """Collect unused layers; only the store provides information about jobs."""
    return collect(store, keep_s=keep_s, ended_at=lambda _: None, dry_run=dry_run)  # type: ignore[arg-type]


def test_a_second_submit_sends_nothing(laptop: Laptop, store: Store):
    laptop.submit()
    before = keys(store, "layers/")
    job = laptop.submit()

    assert keys(store, "layers/") == before
    assert keys(store, "claims/") == []
    laptop.check(job, laptop.folder / "code")


def test_two_users_with_one_source_share_its_layer(laptop: Laptop, store: Store, tmp_path: Path):
    """The same tree gives the same layer for every user."""
    laptop.submit()
    Laptop(tmp_path / "you", store).submit()

    assert len(keys(store, "layers/")) == 1


def test_a_missing_layer_is_sent_again(laptop: Laptop, store: Store):
    laptop.submit()
    (laptop.source / "train.py").write_text("print(2)\n")
    laptop.submit()
    store.delete(keys(store, "layers/")[0])

    job = laptop.submit()

    laptop.check(job, laptop.folder / "code")


def test_every_user_sends_a_damaged_lower_layer_again(laptop: Laptop, store: Store):
    """The damage mark stays for other users of the layer, and is deleted with the layer."""
    laptop.submit()
    (damaged,) = keys(store, "layers/")
    (laptop.source / "train.py").write_text("print(2)\n")
    other = laptop.source_cache
    laptop.submit()
    claims.mark_damaged(store, [damaged, "layers/no-key-of-ours"])  # type: ignore[arg-type]
    store.put_bytes(b"other", damaged)

    laptop.check(laptop.submit(), laptop.folder / "code")
    laptop.source_cache = other
    laptop.check(laptop.submit(), laptop.folder / "code")

    assert keys(store, "damaged/") == [damaged.replace("layers/", "damaged/")]
    for number in (1, 2):
        store.delete(f"me-{number}/code.json")
    gc(store)
    assert keys(store, "damaged/") == []
    assert damaged not in keys(store, "layers/")


def test_only_layers_that_no_job_needs_are_collected(laptop: Laptop, store: Store):
    """Running jobs, and jobs that ended recently, keep their packages."""
    ended = laptop.submit()
    (laptop.source / "large.bin").write_bytes(b"other" * 30_000)
    recent = laptop.submit()
    (laptop.source / "large.bin").write_bytes(b"third" * 30_000)
    running = laptop.submit()
    laptop.end(ended, 2 * WEEK_S)
    laptop.end(recent, WEEK_S / 2)
    needed = {
        layer["key"]
        for job in (recent, running)
        for layer in json.loads(store.get_bytes(f"{job}/code.json"))["layers"]
    }
    all_layers = set(keys(store, "layers/"))

    planned = gc(store, dry_run=True)
    assert set(keys(store, "layers/")) == all_layers
    collected = gc(store)

    assert planned == collected
    assert set(collected.keys) == all_layers - needed
    assert set(keys(store, "layers/")) == needed
    assert keys(store, "sweeps/") == []
    laptop.check(running, laptop.folder / "code")
    laptop.end(running, 10)
    assert set(gc(store, keep_s=0).keys) == needed


def test_a_collection_removes_only_marks_of_missing_layers(laptop: Laptop, store: Store):
    laptop.submit()
    (layer,) = keys(store, "layers/")
    claims.mark_damaged(store, [layer, f"layers/{'0' * 64}"])

    assert gc(store).keys == ()
    assert keys(store, "damaged/") == [layer.replace("layers/", "damaged/")]


def test_a_name_that_no_store_accepts_hides_no_other_layer(tmp_path: Path):
    """A bucket may hold any name; it is reported after the others are deleted."""

    class Bucket(DirectoryStore):
        def list(self, prefix: str = "", *, with_unfinished: bool = False) -> Iterator[str]:
            yield from ["layers/../x", "layers//y"] if prefix == "layers/" else []
            yield from super().list(prefix)

    bucket = Bucket(tmp_path)
    bucket.put_bytes(b"old", "layers/0")

    named = r"deleting 'layers/\.\./x': not a valid key, deleting 'layers//y': not a valid key"
    with pytest.raises(StoreError, match=named):
        collect(bucket, keep_s=0, ended_at=lambda _: None)
    assert list(DirectoryStore(tmp_path).list()) == []


def test_an_unreadable_descriptor_stops_the_collection(laptop: Laptop, store: Store):
    """Nothing is deleted unless it is known which layers are needed."""
    job = laptop.submit()
    store.put_bytes(b'{"format": 1}', f"{job}/code.json")

    with pytest.raises(StoreError, match="cannot be read"):
        gc(store)
    assert len(keys(store, "layers/")) == 1


def test_notes_of_killed_processes_are_ignored_after_a_day(
    laptop: Laptop, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """A collection then deletes the notes and the layers named in them."""
    laptop.submit()
    (layer,) = keys(store, "layers/")
    for job in {key.split("/")[0] for key in keys(store)} - {"layers"}:
        store.delete(f"{job}/code.json")
    store.put_bytes(claims.note([layer]), "claims/killed.json")
    store.put_bytes(claims.note([layer]), "sweeps/killed.json")

    assert gc(store).keys == ()
    now = time.time()
    monkeypatch.setattr(claims.time, "time", lambda: now + 25 * 3600)

    assert gc(store).keys == (layer, "claims/killed.json", "sweeps/killed.json")
    assert keys(store) == []


def test_a_layer_that_is_about_to_be_deleted_is_put_under_another_key(laptop: Laptop, store: Store):
    """A submit does not wait for a collector, which may have been killed."""
    laptop.submit()
    (layer,) = keys(store, "layers/")
    store.put_bytes(claims.note([layer]), "sweeps/at-work.json")

    job = laptop.submit()
    store.delete(layer)

    assert [key for key in keys(store, "layers/") if key.startswith(layer + ".")]
    laptop.check(job, laptop.folder / "code")
    laptop.submit()
    assert len(keys(store, "layers/")) == 1


def steps(store: Store, run: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the store operations that ``run`` performs."""
    seen: list[tuple[str, str]] = []
    store.before = lambda verb, key: seen.append((verb, key))
    run()
    store.before = lambda _verb, _key: None
    return seen


def at(step: int, act: Callable[[], object]) -> Callable[[str, str], None]:
    """Return a hook that calls ``act`` once, before the operation with this number."""
    count = iter(range(1 << 30))

    def before(_verb: str, _key: str) -> None:
        if next(count) == step:
            act()

    return before


def orphaned(folder: Path, store: Store) -> Laptop:
    """Return a user whose layers are in the store although no job needs them any more."""
    laptop = Laptop(folder, store)
    laptop.submit()
    (laptop.source / "train.py").write_text("print(2)\n")
    job = laptop.submit()
    for name in (job, f"{folder.name}-1"):
        store.delete(f"{name}/code.json")
    return laptop


def test_a_collection_at_any_moment_of_a_submit_does_no_harm(tmp_path: Path):
    """Run a collection between any two steps of a submit that reuses the layers it would delete."""
    store = Store(tmp_path / "0")
    laptop = orphaned(tmp_path / "count", store)
    count = len(steps(store, laptop.submit))
    assert count >= 6
    for step in range(count + 1):
        store = Store(tmp_path / f"store-{step}")
        laptop = orphaned(tmp_path / f"me-{step}", store)
        store.before = at(step, lambda store=store: collect(  # type: ignore[misc]
            DirectoryStore(store._inner.root), keep_s=0, ended_at=lambda _: None
        ))  # fmt: skip
        job = laptop.submit()
        store.before = lambda _verb, _key: None
        laptop.check(job, laptop.folder / "code")


def test_a_submit_at_any_moment_of_another_of_the_same_source_is_safe(tmp_path: Path):
    """Run a submit between any two steps of another one with the same source."""
    store = Store(tmp_path / "0")
    count = len(steps(store, Laptop(tmp_path / "count", store).submit))
    assert count >= 6
    for step in range(count):
        store = Store(tmp_path / f"store-{step}")
        laptop = Laptop(tmp_path / f"me-{step}", store)
        other = Laptop(tmp_path / f"other-{step}", DirectoryStore(store._inner.root))
        store.before = at(step, other.submit)
        job = laptop.submit()
        store.before = lambda _verb, _key: None
        laptop.check(job, laptop.folder / "code")


def test_a_submit_at_any_moment_of_a_collection_is_safe(tmp_path: Path):
    """Run a submit between any two steps of a collection that would delete the layers it reuses."""
    store = Store(tmp_path / "0")
    orphaned(tmp_path / "count", store)
    count = len(steps(store, lambda: gc(store, keep_s=0)))
    assert count >= 8
    for step in range(count):
        store = Store(tmp_path / f"store-{step}")
        laptop = orphaned(tmp_path / f"me-{step}", store)
        laptop.store = DirectoryStore(store._inner.root)
        jobs: list[str] = []
        store.before = at(step, lambda laptop=laptop, jobs=jobs: jobs.append(laptop.submit()))  # type: ignore[misc]
        gc(store, keep_s=0)
        store.before = lambda _verb, _key: None
        laptop.check(jobs[0], laptop.folder / "code")


class Race:
    """Three users and a collector share a store; another action can interrupt any step."""

    def __init__(self, folder: Path) -> None:
        self._rng = random.Random(5)
        self._store = DirectoryStore(folder / "store")
        self._free = [Laptop(folder / f"user-{number}", self._store) for number in range(3)]
        self.live_jobs: list[tuple[Laptop, str]] = []

    def step(self, depth: int) -> None:
        """Run an action that another action can interrupt at any request."""
        bucket = Store(self._store.root)

        def before(_verb: str, _key: str) -> None:
            if depth and self._rng.random() < 0.08:
                self.step(depth - 1)

        bucket.before = before
        if self._rng.random() < 0.4 or not self._free:
            gc(bucket, keep_s=0)
        else:
            self._submit(bucket)

    def _submit(self, bucket: Store) -> None:
        laptop = self._free.pop(self._rng.randrange(len(self._free)))
        laptop.store = bucket
        if self._rng.random() < 0.7:
            name = self._rng.choice(["train.py", "a.txt", "large.bin"])
            data = self._rng.randbytes(self._rng.choice([10, 60_000]))
            (laptop.source / name).write_bytes(data)
        self.live_jobs.append((laptop, laptop.submit()))
        laptop.store = self._store
        self._free.append(laptop)
        while len(self.live_jobs) > 4:
            _, removed = self.live_jobs.pop(self._rng.randrange(len(self.live_jobs)))
            self._store.delete(f"{removed}/code.json")


@pytest.mark.long
def test_racing_submits_and_collections_never_lose_a_layer(tmp_path: Path):
    """Run hundreds of submits and collections, randomly nested in each other."""
    race = Race(tmp_path)
    for _ in range(60):
        race.step(depth=2)
        laptop, job = race.live_jobs[-1] if race.live_jobs else (None, "")
        if laptop is not None:
            laptop.check(job, tmp_path / "code")
    for laptop, job in race.live_jobs:
        laptop.check(job, tmp_path / "code")


# ---- killed processes


SUBMIT = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
sys.argv = ["cloudjob"]
step, count = int(os.environ["KILL_AT"]), 0

def kill_in(name, owner):
    original = getattr(owner, name)
    def call(*args, **options):
        global count
        count += 1
        if count == step:
            os.kill(os.getpid(), 9)
        return original(*args, **options)
    setattr(owner, name, call)

for name in ("rename", "replace", "fsync", "unlink", "mkdir", "write", "open", "read"):
    kill_in(name, os)
from cloudjob.cli import main
code = main(["submit", "--detach", "train.py"])
print("steps", count)
sys.exit(code)
"""


def submit_killed_at(source: Path, home: Path, step: int) -> subprocess.CompletedProcess[str]:
    """Run a submit that kills itself before system call number ``step``; 0 means never."""
    root = Path(claims.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", SUBMIT.format(path=[str(root), str(root / "entrypoints")])],
        cwd=source,
        env={**os.environ, "CLOUDJOB_HOME": str(home), "KILL_AT": str(step)},
        capture_output=True,
        text=True,
        check=False,
    )


def fetchable_descriptors(store: DirectoryStore, target: Path) -> Iterator[str]:
    """Yield the key of each code descriptor, after checking that a node can fetch the code."""
    for key in store.list():
        if key.endswith("/code.json"):
            digest = json.loads(store.get_bytes(key))["digest"]
            code_package.fetch_code(store.uri(key), digest, str(target))
            yield key


@pytest.mark.long
@pytest.mark.parametrize("points", [10, pytest.param(40, marks=pytest.mark.lengthy)])
def test_a_killed_submit_leaves_no_incomplete_package(tmp_path: Path, points: int):
    """Each object is complete or absent, and the next submit works."""
    source, home = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    (source / "train.py").write_text("print('hello')\n")
    (source / "large.bin").write_bytes(random.Random(1).randbytes(300_000))
    for _ in range(2):  # the second run reuses the unpacked entry and the compiled rules
        done = submit_killed_at(source, tmp_path / "first", 0)
        assert done.returncode == 0, done.stderr
    total = int(done.stdout.split()[-1])
    store = DirectoryStore(home / "store")
    killed = 0
    for number in range(points):
        (source / "train.py").write_text(f"print({number})\n")
        done = submit_killed_at(source, home, 1 + number * total // points)
        killed += done.returncode == -signal.SIGKILL
        if (home / "store").exists():
            list(fetchable_descriptors(store, tmp_path / "code"))
            for key in store.list("layers/"):
                with (home / "store" / key).open("rb") as file:
                    digest = key.removeprefix("layers/").partition(".")[0]
                    with open_layer(file, digest):
                        pass
    last = submit_killed_at(source, home, 0)

    assert killed > points * 5 // 8
    assert last.returncode == 0, last.stderr
    assert list(fetchable_descriptors(store, tmp_path / "code"))


def test_the_cache_survives_a_kill(tmp_path: Path):
    """A partly written file of a killed pack is ignored."""
    path = tmp_path / "packages" / "x.json"
    path.parent.mkdir()
    path.with_name("x.json.0badcafe").write_text('{"format": 1')

    assert cache.load(path) == SourceCache()


def test_the_contents_of_a_package_are_read_without_its_files(laptop: Laptop, store: Store):
    laptop.submit()
    (laptop.source / "train.py").write_text("print('changed')\n")
    (laptop.source / "large.bin").unlink()
    (laptop.source / "link").symlink_to("train.py")
    job = laptop.submit()
    fetched: list[str] = []
    store.before = lambda verb, key: fetched.append(verb)
    listed = contents.read(store, f"{job}/code.json")  # type: ignore[arg-type]

    digest = hashlib.sha256(b"print('changed')\n").hexdigest()
    assert [(each.name, each.kind, each.digest, each.target) for each in listed] == [
        ("link", "link", "", "train.py"),
        ("train.py", "file", digest, ""),
    ]
    assert set(fetched) <= {"get_bytes", "get_range", "uri"}


def test_single_files_of_a_package_are_read_up_to_a_size(laptop: Laptop, store: Store):
    job = laptop.submit()
    (laptop.source / "train.py").write_text("print('changed')\n")
    job = laptop.submit()
    digest = hashlib.sha256(b"print('changed')\n").hexdigest()

    def read(limit_bytes: int) -> dict[str, bytes]:
        return contents.read_files(
            store,  # type: ignore[arg-type]
            f"{job}/code.json",
            {digest, "0" * 64},
            limit_bytes=limit_bytes,
        )

    assert read(100) == {digest: b"print('changed')\n"}
    assert read(5) == {}


def test_the_error_names_a_damaged_package(laptop: Laptop, store: Store):
    job = laptop.submit()
    (layer,) = keys(store, "layers/")
    store.put_bytes(b"other", layer)
    with pytest.raises(
        StoreError, match=f"reading the package .*{job}/code.json: the size of layer"
    ):
        contents.read(store, f"{job}/code.json")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="the size of layer"):
        contents.read_files(store, f"{job}/code.json", {"0" * 64}, limit_bytes=1)  # type: ignore[arg-type]
