"""Only changes are packed again, and the layers together always contain the whole tree."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudjob.package import CodePackage, PackOptions, SourceCache, cache, layer, merging, pack
from cloudjob.package.cache import with_layers
from cloudjob.package.check import ignore_line
from cloudjob.package.reader import pieces
from cloudjob.package.tree import SourceEntry
from jobentry.contract import packages
from jobentry.contract.zip_layer import open_layer

LIMIT_BYTES = 1 << 40
AN_HOUR_AGO = time.time() - 3600


class Source:
    """A source that is packed repeatedly; its layers are kept as in a store."""

    def __init__(self, folder: Path, *, is_compressed: bool = False) -> None:
        self.folder = folder / "source"
        self.folder.mkdir()
        self._layer = folder / "layer"
        self._options = PackOptions(is_compressed=is_compressed)
        self.source_cache = SourceCache()
        self.stored: dict[str, bytes] = {}
        self.write("train.py", b"print()\n")

    def write(self, name: str, data: bytes = b"x") -> None:
        """Write a file of the source."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def pack(self) -> CodePackage:
        """Pack the source and keep the new layer."""
        packed = pack(
            self.folder, self._layer, script="train.py", limit_bytes=LIMIT_BYTES,
            options=self._options, source_cache=self.source_cache,
        )  # fmt: skip
        if packed.new is not None:
            self.stored[packed.layers[-1].key] = packed.new.read_bytes()
            packed.new.unlink()
        self.source_cache = with_layers(packed.source_cache, packed.layers)
        return packed

    def check(self, packed: CodePackage) -> None:
        """Check that the layers give the tree and contain the contents of all its files."""
        manifests = [manifest_of(self.stored[each.key], each.digest) for each in packed.layers]
        tree = packages.merge(manifests)
        assert packages.tree_digest(tree.values()) == packed.digest
        contained = {digest for manifest in manifests for digest in manifest.contents}
        assert {entry.digest for entry in tree.values() if entry.digest} <= contained
        fresh = pack(
            self.folder, self._layer, script="train.py", limit_bytes=LIMIT_BYTES,
            options=self._options,
        )  # fmt: skip
        assert fresh.digest == packed.digest
        self._layer.unlink()
        assert (fresh.files, fresh.size_bytes) == (packed.files, packed.size_bytes)


def manifest_of(data: bytes, digest: str) -> packages.Manifest:
    """Return the manifest of a layer."""
    with open_layer(io.BytesIO(data), digest) as (_, manifest):
        return manifest


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Make a source with a base that is too large to be sent again."""
    source = Source(tmp_path)
    rng = random.Random(1)
    for number in range(100):
        source.write(f"lib/{number}.bin", rng.randbytes(5000))
    source.pack()
    return source


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache trust new files at once, as if the file system's clock had advanced."""
    monkeypatch.setattr(cache, "_TICK_NS", -(10**12))


def test_an_unchanged_source_is_not_read(source: Source, monkeypatch: pytest.MonkeyPatch):
    """No file is opened, no layer made, and the digest is the same."""
    settle(monkeypatch)
    before = source.pack()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was read")

    monkeypatch.setattr(layer, "pieces", refuse)
    after = source.pack()

    assert after.new is None
    assert (after.digest, after.layers) == (before.digest, before.layers)


def test_a_recently_changed_file_is_read_again(source: Source, monkeypatch: pytest.MonkeyPatch):
    """It may have changed after it was read, within the same tick of the clock."""
    # On a busy machine, the test would take longer than a tick.
    monkeypatch.setattr(cache, "_TICK_NS", 3600 * 10**9)
    for path in source.folder.rglob("*"):
        os.utime(path)

    packed = source.pack()

    assert all(
        cached.file_stat is None for cached in packed.source_cache.entries if cached.entry.digest
    )
    assert packed.new is None


def test_an_edit_sends_only_the_edited_file(source: Source):
    source.write("lib/7.bin", b"y" * 3000)

    packed = source.pack()

    assert len(packed.layers) == 2
    assert packed.layers[-1].size_bytes < 3000 + 1000
    source.check(packed)


def test_a_rename_a_mode_and_a_copy_send_no_content(source: Source):
    (source.folder / "lib" / "1.bin").rename(source.folder / "lib" / "moved.bin")
    (source.folder / "lib" / "2.bin").chmod(0o755)
    source.write("copy.bin", (source.folder / "lib" / "3.bin").read_bytes())

    packed = source.pack()

    assert packed.layers[-1].size_bytes < 2000
    source.check(packed)


def test_a_touched_file_makes_no_layer(source: Source):
    """A new modification time with the same content is not a change."""
    before = source.pack()
    os.utime(source.folder / "lib" / "5.bin", (1, 1))

    after = source.pack()

    assert (after.new, after.layers) == (None, before.layers)


def test_removed_files_are_not_in_the_package(source: Source):
    for number in range(50):
        (source.folder / "lib" / f"{number}.bin").unlink()
    source.write("thing", b"1")
    source.check(source.pack())
    (source.folder / "thing").unlink()
    source.write("thing/inner", b"2")
    source.check(source.pack())
    (source.folder / "thing" / "inner").unlink()
    (source.folder / "thing").rmdir()
    (source.folder / "thing").symlink_to("train.py")
    source.check(source.pack())


@pytest.mark.long
@pytest.mark.parametrize("is_compressed", [False, True])
def test_many_edits_send_little_and_make_few_layers(tmp_path: Path, is_compressed: bool):
    """After hundreds of edits there are still few layers, and each edit sends few bytes."""
    source = Source(tmp_path, is_compressed=is_compressed)
    rng = random.Random(2)
    for number in range(300):
        source.write(f"{number}.bin", rng.randbytes(4000))
    base_bytes = source.pack().layers[0].size_bytes
    sent_bytes = []
    for step in range(150):
        for _ in range(rng.choice([1, 1, 1, 3])):
            name = f"{rng.randrange(300)}.bin"
            if rng.random() < 0.1 and (source.folder / name).exists():
                (source.folder / name).unlink()
            else:
                source.write(name, rng.randbytes(rng.randrange(8000)))
        packed = source.pack()
        sent_bytes.append(packed.layers[-1].size_bytes if packed.new else 0)
        assert len(packed.layers) <= 13
        if step % 30 == 0:
            source.check(packed)
    source.check(packed)

    assert sorted(sent_bytes)[len(sent_bytes) // 2] < 64 * 1024
    assert sum(sent_bytes) < 12 * base_bytes
    live = sum(layer.size_bytes for layer in packed.layers)
    assert live < 2.5 * packed.size_bytes + (1 << 21)


@pytest.mark.parametrize(
    ("live_bytes", "dead_bytes", "new_bytes", "expected"),
    [
        ([10**8], 0, 1000, 0),
        ([10**8, 1000], 0, 1000, 1),
        ([10**8, 10**5, 1000, 1000], 0, 1000, 2),
        ([10**4], 0, 1000, 1),
        ([10**8], 6 * 10**7, 1000, 1),
        ([10**8, *[10**5] * 11], 0, 10**5, 11),
        ([2**30 >> n for n in range(11)], 0, 1000, 0),
        ([2**30 >> n for n in range(12)], 0, 1000, 1),
    ],
)
def test_the_smallest_layers_are_merged_into_the_new_one(
    live_bytes: list[int], dead_bytes: int, new_bytes: int, expected: int
):
    """Small layers are always merged, more if there are many, all if most content is unused."""
    assert merging.merged(live_bytes, dead_bytes, new_bytes) == expected


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_layer_is_a_zip_file_that_unzip_lists_and_extracts(tmp_path: Path, is_compressed: bool):
    """Paths and modes are kept; a name that is not UTF-8 is only in the manifest."""
    source = Source(tmp_path, is_compressed=is_compressed)
    source.write("lib/model.py", b"x = 1\n" * 1000)
    (source.folder / "lib" / "model.py").chmod(0o750)
    source.write("lib/numbers.bin", random.Random(4).randbytes(10_000_000))
    source.write(os.fsdecode(b"caf\xe9"), b"coffee")
    packed = source.pack()
    (tmp_path / "layer.zip").write_bytes(source.stored[packed.layers[0].key])

    def unzip(*args: str) -> str:
        argv = ["unzip", *args, str(tmp_path / "layer.zip"), "-d", str(tmp_path / "out")]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    coffee = hashlib.sha256(b"coffee").hexdigest()
    names = [line.split(None, 3)[3] for line in unzip("-l").splitlines()[3:-2]]
    assert sorted(names) == [
        f"contents/{coffee}", "files/lib/model.py", "files/lib/numbers.bin", "files/train.py",
        "manifest.json",
    ]  # fmt: skip
    unzip("-q")
    extracted = tmp_path / "out" / "files" / "lib"
    for name in ("model.py", "numbers.bin"):
        assert (extracted / name).read_bytes() == (source.folder / "lib" / name).read_bytes()
    assert (extracted / "model.py").stat().st_mode & 0o777 == 0o750
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["files"][0] == {
        "path": "caf\udce9", "mode": "0644", "size": 6, "sha256": coffee,
        "entry": f"contents/{coffee}",
    }  # fmt: skip
    assert is_compressed == (packed.layers[0].size_bytes < 10_005_000)


def test_a_large_file_is_sent_once(tmp_path: Path):
    """The content of a copied or moved file is already stored."""
    source = Source(tmp_path)
    data = random.Random(5).randbytes(9_000_000)
    source.write("a.bin", data)
    source.write("b.bin", data)
    assert source.pack().layers[0].size_bytes < 9_010_000
    (source.folder / "b.bin").rename(source.folder / "c.bin")

    packed = source.pack()

    assert packed.layers[1].size_bytes < 2000
    source.check(packed)


def test_a_large_file_that_changes_while_it_is_stored_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """``stat`` does not show a change within one clock tick after the digest was computed."""
    source = Source(tmp_path)
    source.write("a.bin", b"x" * 9_000_000)
    calls = []

    def changing(folder: Path, entry: SourceEntry) -> Iterator[bytes]:
        calls.append(entry.name)
        is_second = entry.name == "a.bin" and calls.count("a.bin") == 2
        for piece in pieces(folder, entry):
            yield piece.replace(b"x", b"y", 1) if is_second else piece

    monkeypatch.setattr(layer, "pieces", changing)

    source.check(source.pack())

    assert calls.count("a.bin") == 6


def test_an_edit_beside_thousands_of_empty_files_sends_little(tmp_path: Path):
    """The size of manifests counts as well when layers are merged."""
    source = Source(tmp_path)
    source.write("large.bin", random.Random(6).randbytes(100_000))
    source.pack()
    for number in range(2000):
        source.write(f"empty/{number}", b"")
    source.pack()
    source.write("train.py", b"print(1)\n")

    packed = source.pack()

    assert packed.layers[-1].size_bytes < 2000
    source.check(packed)


def test_the_cache_is_a_private_file(source: Source, tmp_path: Path):
    """A saved cache is loaded unchanged; an invalid file is loaded as an empty cache."""
    path = cache.path_of(tmp_path / "home", source.folder, "file:///store")

    cache.save(path, source.source_cache)

    assert cache.load(path) == source.source_cache
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    digest, _, data = text.partition("\n")
    other = json.dumps({**json.loads(data), "format": 1})
    deep = "[" * 100_000
    damaged_texts = ["", "[]", "{}", text[:-9], data, f"{digest}\n{other}", f"{digest}\n{deep}"]
    damaged_texts += [
        f"{hashlib.sha256(damaged_text.encode()).hexdigest()}\n{damaged_text}"
        for damaged_text in (other, deep)
    ]
    for damaged_text in (*damaged_texts, "\xe9"):
        path.write_text(damaged_text)
        assert cache.load(path) == SourceCache()
    assert cache.load(tmp_path / "nowhere") == SourceCache()


@pytest.mark.parametrize(
    ("path", "line"),
    [("a b", "/a b"), ("a*?[x]\\", "/a\\*\\?\\[x]\\\\"), ("d/", "/d/"), ("tail ", "/tail\\ ")],
)
def test_ignore_line_matches_exactly_one_path(path: str, line: str):
    assert ignore_line(path) == line
