"""Unpacking of code in a container, with packages of the laptop half and with invalid ones."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.package import CodePackage, PackOptions, SourceCache, claims, pack
from cloudjob.package.cache import with_layers
from cloudjob.store.directory import DirectoryStore
from jobentry.contract import packages
from jobentry.contract.packages import Descriptor, Entry, Layer, Manifest
from jobentry.contract.zip_layer import open_layer
from jobentry.errors import EntryError
from jobentry.staging import code_package


def listed(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def tree(folder: Path) -> dict[bytes, tuple[Any, ...]]:
    """Return the complete contents of a folder, with names as bytes."""
    item_at: dict[bytes, tuple[Any, ...]] = {}
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        key = os.fsencode(path.relative_to(folder))
        if stat.S_ISLNK(mode):
            item_at[key] = ("link", os.readlink(os.fsencode(path)))  # noqa: PTH115 (its exact bytes)
        elif stat.S_ISDIR(mode):
            item_at[key] = ("folder", mode & 0o777)
        else:
            item_at[key] = ("file", mode & 0o777, path.read_bytes())
    return item_at


def store_package(package: CodePackage, store: DirectoryStore, job: str = "job-1") -> str:
    """Store a package as a submit does, and return its URI."""
    with claims.Claim(store, job) as claim:
        kept = claim.keep(package)
        return store.put_bytes(claims.descriptor(package, kept.layers), f"{job}/code.json")


# ---- pack and unpack

names = st.binary(min_size=1, max_size=120).filter(
    lambda name: not set(name) & {0, 0x2F} and name not in (b".", b"..", b"train.py")
) | st.sampled_from([b" ", b"\n", b"-rf", b"a" * 255, "é".encode(), b"1 path=x\n", b"tail "])
contents = st.binary() | st.integers(0, 5_000_000).map(lambda size: b"ab\n" * (size // 3))
files = st.tuples(st.just("file"), st.sampled_from([0o600, 0o755, 0o777, 0o444]), contents)
links = st.tuples(st.just("link"), names)
trees = st.recursive(
    st.dictionaries(names, files | links, max_size=3),
    lambda inner: st.dictionaries(
        names,
        files | links | st.tuples(st.just("folder"), st.sampled_from([0o700, 0o755, 0o500]), inner),
        max_size=4,
    ),
)


def grow(folder: Path, spec: dict[bytes, Any]) -> None:
    """Create the given tree in a folder."""
    for name, (kind, *facts) in spec.items():
        path = folder / os.fsdecode(name)
        if kind == "link":
            path.symlink_to(os.fsdecode(facts[0]))
        elif kind == "file":
            path.write_bytes(facts[1])
            path.chmod(facts[0])
        else:
            path.mkdir()
            grow(path, facts[1])
            path.chmod(facts[0])


def clear(folder: Path) -> None:
    """Empty a folder, whatever the permissions of its contents."""
    code_package._remove(str(folder))
    folder.mkdir()


@pytest.mark.long
@given(specs=st.lists(trees, min_size=1, max_size=4), is_compressed=st.booleans())
def test_packed_trees_are_unpacked_exactly(specs: list[dict[bytes, Any]], is_compressed: bool):
    with tempfile.TemporaryDirectory() as scratch:
        source, code = Path(scratch, "source"), Path(scratch, "code")
        store, source_cache = DirectoryStore(Path(scratch, "store")), SourceCache()
        source.mkdir()
        for spec in specs:
            clear(source)
            grow(source, spec)
            (source / "train.py").touch()

            packed = pack(
                source,
                Path(scratch, "layer"),
                script="train.py",
                limit_bytes=1 << 30,
                options=PackOptions(is_compressed=is_compressed),
                source_cache=source_cache,
            )
            code_package.fetch_code(store_package(packed, store), packed.digest, str(code))
            source_cache = with_layers(packed.source_cache, packed.layers)

            assert packed.left_out == ()
            assert tree(code) == tree(source)


def test_code_comes_from_the_store(tmp_path: Path):
    """The laptop and the node use the same URI; nothing else remains beside the code."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print()")
    package = pack(tmp_path / "source", tmp_path / "l", script="train.py", limit_bytes=1 << 20)
    uri = store_package(package, DirectoryStore(tmp_path / "a store"))

    code_package.fetch_code(uri, package.digest, str(tmp_path / "node" / "code"))

    assert listed(tmp_path / "node") == ["code"]
    assert (tmp_path / "node" / "code" / "train.py").read_text() == "print()"


# ---- hand-made packages, most of them invalid


def sha256(data: bytes) -> str:
    """Return the SHA-256 digest of some data."""
    return hashlib.sha256(data).hexdigest()


def zipped(files: Iterable[tuple[str | zipfile.ZipInfo, bytes]]) -> bytes:
    """Return a zip file with these entries."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, data in files:
            archive.writestr(name, data)
    return whole.getvalue()


class HandmadePackage:
    """A package in a store, made of layers that ``pack`` would never write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.layers: list[Layer] = []
        self.manifests: list[Manifest] = []

    def layer(
        self, entries: Sequence[Entry], bodies: Sequence[bytes] = (b"",), removed: Any = ()
    ) -> HandmadePackage:
        """Add a layer with the bodies to which its entries refer."""
        digests = {entry.digest for entry in entries}
        held = {sha256(body): body for body in bodies if sha256(body) in digests}
        contents = {digest: f"contents/{digest}" for digest in held}
        self.manifests.append(Manifest(entries, contents, removed))
        data = packages.dump_manifest(self.manifests[-1])
        return self.raw_layer(data, [(contents[digest], held[digest]) for digest in held])

    def raw_layer(
        self,
        manifest: bytes,
        files: Sequence[tuple[str | zipfile.ZipInfo, bytes]] = (),
        change: Callable[[bytes], bytes] = lambda data: data,
    ) -> HandmadePackage:
        """Add a layer with this manifest and these zip entries, and change the zip file."""
        digest = sha256(manifest)
        path = self.store / "layers" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change(zipped([*files, ("manifest.json", manifest)])))
        self.layers.append(Layer(f"layers/{digest}", digest, path.stat().st_size))
        return self

    @property
    def digest(self) -> str:
        """The digest of the tree that results from the layers."""
        return packages.tree_digest(packages.merge(self.manifests).values())

    def uri(self, digest: str = "") -> str:
        """Store the descriptor and return its URI."""
        value = Descriptor(digest or self.digest, 0, 0, tuple(self.layers))
        path = self.store / "job-1" / "code.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(packages.dump_descriptor(value))
        return path.as_uri()

    def unpack(self, **options: Any) -> None:
        """Unpack it into the folder ``node/code``."""
        uri = self.uri()
        code_package.fetch_code(uri, self.digest, str(self.folder / "node" / "code"), **options)


def file(name: str, data: bytes = b"", mode: int = 0o644) -> Entry:
    """Return the entry of a file."""
    return Entry(name, "file", mode, len(data), sha256(data))


def folder(name: str) -> Entry:
    """Return the entry of a folder."""
    return Entry(name, "folder", 0o755)


def link(name: str, target: str) -> Entry:
    """Return the entry of a link."""
    return Entry(name, "link", target=target)


def one_layer_package(tmp_path: Path, *entries: Entry, body: bytes = b"") -> HandmadePackage:
    """Return a package of one layer."""
    return HandmadePackage(tmp_path).layer(entries, [body])


def test_names_keep_their_bytes_in_any_locale(tmp_path: Path):
    """A container without a UTF-8 locale gets the same names as the laptop."""
    name = "é" * 60
    package = one_layer_package(tmp_path, file(name), link("link", name))
    run = "import sys; from jobentry.staging import code_package as c; c.fetch_code(*sys.argv[1:])"
    env = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    subprocess.run(
        [sys.executable, "-c", run, package.uri(), package.digest, str(tmp_path / "code")],
        env={**env, "PYTHONPATH": str(Path(code_package.__file__).parents[2])},
        check=True,
    )

    entries = sorted(os.listdir(os.fsencode(tmp_path / "code")))  # noqa: PTH208 (bytes)
    assert entries == [b"link", name.encode()]
    assert (tmp_path / "code" / "link").is_file()


def test_missing_code_is_reported(tmp_path: Path):
    with pytest.raises(EntryError, match=r"fetching the code: reading file:///.*: no such file"):
        code_package.fetch_code(f"file://{tmp_path}/missing", "sha256:0", str(tmp_path / "code"))

    assert listed(tmp_path) == []


def test_a_missing_layer_is_reported(tmp_path: Path):
    package = one_layer_package(tmp_path, file("a"))
    uri = package.uri()
    (package.store / package.layers[0].key).unlink()

    with pytest.raises(EntryError, match="no such file or directory"):
        package.unpack()
    assert uri.startswith("file://")
    assert listed(tmp_path / "node") == []


# ---- refused packages


def test_a_package_with_another_digest_is_not_unpacked(tmp_path: Path):
    package = one_layer_package(tmp_path, file("a"))
    other = "sha256:" + "0" * 64
    target = str(tmp_path / "node" / "code")

    with pytest.raises(EntryError, match=f"verify code: .*digest is {package.digest}, not"):
        code_package.fetch_code(package.uri(), other, target)
    with pytest.raises(EntryError, match=r"digest of the tree is .*, not sha256:0000"):
        code_package.fetch_code(package.uri(other), other, target)

    assert listed(tmp_path / "node") == []


@pytest.mark.parametrize("position", range(0, 5, 2))
def test_one_wrong_bit_in_a_content_is_detected(tmp_path: Path, position: int):
    package = one_layer_package(tmp_path, file("a", b"hello"), body=b"hello")
    path = package.store / package.layers[0].key
    data = bytearray(path.read_bytes())
    data[data.index(b"hello") + position] ^= 1
    path.write_bytes(data)

    with pytest.raises(EntryError, match=r"layers/\w{12} is damaged: ") as caught:
        package.unpack()
    assert caught.value.damaged_layers == (package.layers[0].key,)
    assert listed(tmp_path / "node") == []


LONG = "x" * 4096


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([file("/etc/passwd")], "'/etc/passwd' is not a path below the folder"),
        ([file("../a")], "'../a' is not a path below the folder"),
        ([file("a\0b")], "is not a path below the folder"),
        ([file("")], "'' is not a path below the folder"),
        ([folder("d"), file("d/../../a")], "'d/../../a' is not a path below the folder"),
        ([folder("d"), file("d//a")], "'d//a' is not a path below the folder"),
        ([file("./a")], "'./a' is not a path below the folder"),
        ([file("a"), file("a")], "'a' is listed twice"),
        ([folder("a"), link("a", "b")], "'a' is listed twice"),
        ([link("a", "/etc")], "'a' is a link that leaves the folder"),
        ([link("a", "../b")], "'a' is a link that leaves the folder"),
        ([link("a", "")], "'a' is a link that leaves the folder"),
        ([link("a", "b\0")], "'a' is a link that leaves the folder"),
        ([link("a", LONG)], "'a' is a link that leaves the folder"),
        ([folder("d"), link("d/a", "../../b")], "'d/a' is a link that leaves the folder"),
        ([folder("d"), link("l", "d"), file("l/a")], "'l/a' does not lie in a folder of the"),
        ([file("a"), file("a/b")], "'a/b' does not lie in a folder of the package"),
        ([file("d/a")], "'d/a' does not lie in a folder of the package"),
        (
            [folder("d"), folder("d/e"), link("d/e/up", "../.."), link("z", "d/e/up/..")],
            "link 'z' leaves the folder",
        ),
        ([file("a" * 256)], "name too long"),
    ],
)
def test_an_entry_that_is_never_packed_is_refused(tmp_path: Path, entries: Any, problem: str):
    """Nothing is written outside the folder, and no partial folder remains."""
    package = HandmadePackage(tmp_path).layer(entries)
    if problem.endswith("twice"):
        package.manifests = [Manifest([], {})]

    with pytest.raises(EntryError, match=f"unpacking the code: file://.*: .*{problem}"):
        package.unpack()

    assert listed(tmp_path) == ["node", "store"]
    assert listed(tmp_path / "node") == []


def test_more_bytes_than_the_limit_are_refused(tmp_path: Path):
    """The limit applies to the sum over all files, even if two have the same content."""
    data = b"x" * 600
    package = one_layer_package(tmp_path, file("a", data), file("b", data), body=data)

    with pytest.raises(EntryError, match="more than 1000 bytes of files"):
        package.unpack(limit_bytes=1000)
    assert listed(tmp_path / "node") == []

    package.unpack(limit_bytes=1200)
    assert tree(tmp_path / "node" / "code") == {
        b"a": ("file", 0o644, data),
        b"b": ("file", 0o644, data),
    }


BOMB_BYTES = 50_000_000


def deflated(name: str) -> zipfile.ZipInfo:
    """Return an entry that is compressed."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


@pytest.mark.parametrize("announced_bytes", [10_000, BOMB_BYTES, 2 * BOMB_BYTES])
@pytest.mark.parametrize("in_zip_bytes", [10_000, BOMB_BYTES])
def test_a_zip_bomb_is_not_inflated(tmp_path: Path, announced_bytes: int, in_zip_bytes: int):
    """No more is written than the manifest announces, whatever the zip file holds or declares."""
    entry = Entry("a", "file", 0o644, announced_bytes, "0" * 64)
    manifest = Manifest([entry], {"0" * 64: "files/a"})

    def change(data: bytes) -> bytes:
        real, declared = BOMB_BYTES.to_bytes(4, "little"), in_zip_bytes.to_bytes(4, "little")
        return data.replace(real, declared)

    body = b"\0" * BOMB_BYTES
    package = HandmadePackage(tmp_path)
    package.raw_layer(packages.dump_manifest(manifest), [(deflated("files/a"), body)], change)
    package.manifests.append(manifest)
    tracemalloc.start()
    try:
        with pytest.raises(EntryError, match="is damaged"):
            package.unpack(limit_bytes=1 << 40)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < BOMB_BYTES / 5
    assert listed(tmp_path / "node") == []


def test_a_manifest_that_is_a_bomb_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "MANIFEST_LIMIT_BYTES", 1_000_000)
    bomb = zipped([(deflated("manifest.json"), b" " * BOMB_BYTES)])
    less = bomb.replace(BOMB_BYTES.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    for data, problem in (
        (bomb, "its manifest is too long"),
        (less, "its manifest has the digest|CRC"),
    ):
        opened = open_layer(io.BytesIO(data), "0" * 64)
        with pytest.raises(packages.FormatError, match=problem), opened:
            pass


# ---- zip files that cloudjob does not write


def patched(data: bytes, place: int, value: bytes) -> bytes:
    """Return ``data`` with these bytes at an offset."""
    return data[:place] + value + data[place + len(value) :]


def in_directory(data: bytes, number: int) -> int:
    """Return the offset of an entry in the central directory of a zip file."""
    place = -1
    for _ in range(number + 1):
        place = data.index(b"PK\1\2", place + 1)
    return place


def end_of(data: bytes) -> int:
    """Return the offset of the end record of a zip file."""
    return data.rindex(b"PK\5\6")


def with_directory_flags(flags: int) -> Callable[[bytes], bytes]:
    """Return a function that sets the flags of the first entry."""
    return lambda data: patched(data, in_directory(data, 0) + 8, flags.to_bytes(2, "little"))


def overlapping(data: bytes) -> bytes:
    """Make the second entry start where the first one does."""
    first = data[in_directory(data, 0) + 42 :][:4]
    return patched(data, in_directory(data, 1) + 42, first)


def too_long(data: bytes) -> bytes:
    """Make the first entry overlap the second one."""
    return patched(data, in_directory(data, 0) + 20, (500).to_bytes(4, "little"))


ODD_ZIPS: dict[str, Callable[[bytes], bytes]] = {
    "encrypted": with_directory_flags(0x1),
    "strongly encrypted": with_directory_flags(0x41),
    "data descriptor": with_directory_flags(0x8),
    "patch data": with_directory_flags(0x20),
    "unknown method": lambda data: patched(data, in_directory(data, 0) + 10, b"\x0c\0"),
    "overlapping entries": overlapping,
    "an entry that reaches into the next": too_long,
    "data before": lambda data: b"#!/bin/sh\n" + data,
    "data behind": lambda data: data + b"x",
    "a zip behind": lambda data: data + data,
    "a comment": lambda data: data[:-2] + b"\x04\0abcd",
    "data before the directory": lambda data: (
        data[: in_directory(data, 0)] + b"PK\1\2" + data[in_directory(data, 0) :]
    ),
    "a directory beyond the end": lambda data: patched(
        data, end_of(data) + 16, b"\xff\xff\xff\x7f"
    ),
    "a directory of 4 GiB": lambda data: patched(data, end_of(data) + 12, b"\xff\xff\xff\xff"),
    "an entry beyond the end": lambda data: patched(
        data, in_directory(data, 0) + 42, b"\xff\xff\xff\x7f"
    ),
    "a name that is not UTF-8": lambda data: with_directory_flags(0x800)(
        data.replace(b"files/a", b"files/\xff")
    ),
    "a name with a zero byte": lambda data: data.replace(b"files/a", b"files/\0"),
    "other names in front of the contents": lambda data: data.replace(b"files/a", b"files/b", 1),
    "empty": lambda data: b"",
    "not a zip file": lambda data: b"x" * len(data),
    "a tar file": lambda data: b"train.py".ljust(257, b"\0") + b"ustar".ljust(1000, b"\0"),
}


@pytest.mark.parametrize("name", ODD_ZIPS)
def test_a_zip_file_that_cloudjob_does_not_write_is_refused(tmp_path: Path, name: str):
    """It is reported as damaged, and nothing is written."""
    manifest = Manifest([file("a", b"hello")], {sha256(b"hello"): "files/a"})
    data = packages.dump_manifest(manifest)
    package = HandmadePackage(tmp_path).raw_layer(data, [("files/a", b"hello")], ODD_ZIPS[name])
    package.manifests.append(manifest)

    with pytest.raises(EntryError, match=r"layers/\w{12} is damaged: "):
        package.unpack()
    assert listed(tmp_path / "node") == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([("files/a", b""), ("files/a", b"")], "an entry is listed twice"),
        ([("files/a", b""), ("files/b", b"")], "list different entries"),
        ([], "list different entries"),
        ([("files/A", b"")], "list different entries"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_layer_whose_entries_differ_from_its_manifest_is_refused(
    tmp_path: Path, files: Any, problem: str
):
    manifest = Manifest([file("a")], {sha256(b""): "files/a"})
    package = HandmadePackage(tmp_path).raw_layer(packages.dump_manifest(manifest), files)
    package.manifests.append(manifest)

    with pytest.raises(EntryError, match=problem):
        package.unpack()


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", "C:\\evil", "a/../../evil"])
def test_the_name_of_a_zip_entry_is_never_a_path(tmp_path: Path, name: str):
    """File names come only from the manifest."""
    manifest = Manifest([file("a", b"1")], {sha256(b"1"): name})
    package = HandmadePackage(tmp_path).raw_layer(packages.dump_manifest(manifest), [(name, b"1")])
    package.manifests.append(manifest)

    package.unpack()

    assert tree(tmp_path / "node" / "code") == {b"a": ("file", 0o644, b"1")}
    assert listed(tmp_path) == ["node", "store"]


def test_names_that_differ_by_case_only_are_two_files(tmp_path: Path):
    package = HandmadePackage(tmp_path).layer([file("a", b"1"), file("A", b"2")], [b"1", b"2"])

    package.unpack()

    assert tree(tmp_path / "node" / "code") == {
        b"a": ("file", 0o644, b"1"),
        b"A": ("file", 0o644, b"2"),
    }


def row(**changes: Any) -> bytes:
    """Return a manifest with one file, changed as given."""
    fields = {"path": "a", "mode": "0644", "size": 0, "sha256": sha256(b""), **changes}
    return json.dumps(
        {"format": 2, "files": [fields], "folders": [], "links": [], "removed": []}
    ).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"format":2,"files":[],"folders":[],"links":[],"removed":' + b"9" * 10**6,
        b'{"format":1e999}',
        b'{"format":NaN}',
        b'{"format":1}',
        b'{"format":2}',
        b"\xff",
        b"null",
        row(mode="07777"),
        row(mode="644"),
        row(mode=420),
        row(path="\ud800"),
        row(path=True),
        row(path=None),
        row(size=-1),
        row(size=True),
        row(size=1 << 63),
        row(sha256="x"),
        row(sha256=None),
        row(entry=1),
        row(entry="manifest.json"),
        row(entry=[]),
        b'{"format":2,"files":[1],"folders":[],"links":[],"removed":[]}',
        b'{"format":2,"files":{},"folders":[],"links":[],"removed":[]}',
        b'{"format":2,"files":[],"folders":[],"links":[{"path":"a"}],"removed":[]}',
        b'{"format":2,"files":[],"folders":[],"links":[],"removed":[1]}',
    ],
)
def test_an_invalid_manifest_is_refused(tmp_path: Path, data: bytes):
    package = HandmadePackage(tmp_path).raw_layer(data)

    with pytest.raises(EntryError, match="unpacking the code: file://"):
        package.unpack()
    assert listed(tmp_path / "node") == []


def test_a_number_of_a_million_digits_is_refused_at_once():
    """Python before 3.11 would take hours to read it."""
    with pytest.raises(packages.FormatError, match="a number is too long"):
        packages.load_manifest(b'{"format":2,"files":' + b"9" * 10**6 + b"}")


@pytest.mark.parametrize("cut_bytes", [0, 10, 100, 300])
def test_a_truncated_layer_is_refused(tmp_path: Path, cut_bytes: int):
    package = one_layer_package(tmp_path, file("a", b"x" * 600), body=b"x" * 600)
    path = package.store / package.layers[0].key
    whole = path.read_bytes()

    for part in (whole[:cut_bytes], whole[-cut_bytes:] if cut_bytes else b"", whole + b"x"):
        path.write_bytes(part)
        with pytest.raises(EntryError, match="unpacking the code: file://"):
            package.unpack()

    assert listed(tmp_path / "node") == []


def test_a_content_that_no_layer_holds_is_refused(tmp_path: Path):
    package = HandmadePackage(tmp_path).layer([file("a")], bodies=[])

    with pytest.raises(EntryError, match="is in no layer"):
        package.unpack()


def hostile(rng: random.Random) -> tuple[list[Entry], list[bytes], list[str]]:
    """Return a layer of random entries, most of them hostile."""
    segments = [
        *("a", "b", "..", ".", "", "/", "d", "d/a", "../x", "/etc", "d/../..", "a/b", "\0", "é"),
        *("node", "../../victim", "victim", "d/l", "d/l/x", "~", "a" * 300),
    ]
    body = rng.randbytes(rng.randrange(40))
    entries = []
    for _ in range(rng.randrange(1, 7)):
        name = "/".join(rng.choices(segments, k=rng.choice([1, 1, 2, 3])))
        kind = rng.choice(["file", "folder", "link"])
        target = "/".join(rng.choices(segments, k=rng.choice([1, 2, 3])))
        if kind == "file":
            digest = rng.choice([sha256(body)] * 4 + [sha256(b""), "0" * 64])
            size_bytes = rng.choice([len(body)] * 8 + [0, 1, 1 << 40])
            entries.append(Entry(name, kind, rng.randrange(512), size_bytes, digest))
        elif kind == "folder":
            entries.append(Entry(name, kind, rng.randrange(512)))
        else:
            entries.append(Entry(name, kind, target=target))
    return entries, [b"", body], rng.choices(segments, k=rng.randrange(3))


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.lengthy)])
def test_thousands_of_hostile_packages_do_no_harm(tmp_path: Path, count: int):
    """Each has a matching digest; a few are harmless and unpacked, the others are refused.

    Only the code folder is ever created, and every error is one of cloudjob's own.
    """
    rng = random.Random(4)
    (tmp_path / "victim").write_text("unharmed")
    (tmp_path / "node").mkdir()
    unpacked = 0
    for number in range(count):
        package = HandmadePackage(tmp_path)
        for _ in range(rng.choice([1, 1, 2, 3])):
            package.layer(*hostile(rng))
        damaged = rng.choice(package.layers)
        if number % 3 == 0:
            path = package.store / damaged.key
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        try:
            package.unpack()
        except (EntryError, packages.FormatError):
            assert listed(tmp_path / "node") == []
        else:
            unpacked += 1
            assert listed(tmp_path / "node") == ["code"]
            for path in (tmp_path / "node" / "code").rglob("*"):
                # Circular links are harmless.
                real = os.path.realpath(path)
                assert f"{real}/".startswith(f"{tmp_path}/node/code/")
            code_package._remove(str(tmp_path / "node" / "code"))
        if number % 100 == 0:
            code_package._remove(str(package.store))

    assert (tmp_path / "victim").read_text() == "unharmed"
    assert set(listed(tmp_path)) <= {"node", "store", "victim"}
    assert unpacked > count // 1000


# ---- replaced folders


def test_an_existing_folder_is_replaced_completely(tmp_path: Path):
    code = tmp_path / "node" / "code"
    (code / "old" / "locked").mkdir(parents=True)
    (code / "old" / "locked" / "file").touch()
    (code / "old" / "locked").chmod(0o500)
    (code / "link").symlink_to("old/locked")
    package = one_layer_package(tmp_path, file("a", mode=0o640))

    package.unpack()

    assert tree(code) == {b"a": ("file", 0o640, b"")}
    assert listed(tmp_path / "node") == ["code"]


def test_an_existing_folder_survives_a_failure(tmp_path: Path):
    code = tmp_path / "node" / "code"
    code.mkdir(parents=True)
    (code / "old").touch()
    package = one_layer_package(tmp_path, file("a"), file("../b"))

    with pytest.raises(EntryError):
        package.unpack()

    assert listed(code) == ["old"]
    assert listed(tmp_path / "node") == ["code"]


def test_an_unwritable_folder_is_reported(tmp_path: Path):
    package = one_layer_package(tmp_path, file("a"))

    with pytest.raises(EntryError, match=r"unpacking the code: .* to /dev/null/code: "):
        code_package.fetch_code(package.uri(), package.digest, "/dev/null/code")


# ---- when a node fetches its code


@pytest.mark.parametrize(
    ("nodes", "most_in_a_second", "last_s"), [(1, 1, 0), (64, 64, 0), (1000, 101, 9.99)]
)
def test_the_nodes_of_a_large_job_fetch_their_code_in_turns(
    nodes: int, most_in_a_second: int, last_s: float
):
    """A small job does not wait, and neither does the head of a large one."""
    turns = [code_package.turn_s(node, nodes) for node in range(nodes)]

    assert turns[0] == 0
    assert max(turns) == last_s
    assert all(sum(0 <= other - turn < 1 for other in turns) <= most_in_a_second for turn in turns)


def test_the_wait_for_a_turn_is_limited():
    assert code_package.turn_s(9999, 10_000) == 30
