"""Code unpacked in the container, against the laptop half that packs it."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudjob import layers
from cloudjob.package import CodePackage, Memory, Options, pack
from cloudjob.package.cache import with_layers
from cloudjob.store.directory import DirectoryStore
from jobentry.contract import packages
from jobentry.contract.packages import BELOW, RAW, ZLIB, Content, Descriptor, Entry, Index, Layer
from jobentry.staging import code_package
from jobentry.staging.code_package import UnpackError


def listed(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def tree(folder: Path) -> dict[bytes, tuple[Any, ...]]:
    """Return everything that a folder is, down to the last byte of each name."""
    found: dict[bytes, tuple[Any, ...]] = {}
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        key = os.fsencode(path.relative_to(folder))
        if stat.S_ISLNK(mode):
            found[key] = ("link", os.readlink(os.fsencode(path)))  # noqa: PTH115 (its very bytes)
        elif stat.S_ISDIR(mode):
            found[key] = ("folder", mode & 0o777)
        else:
            found[key] = ("file", mode & 0o777, path.read_bytes())
    return found


def sent(package: CodePackage, store: DirectoryStore, job: str = "job-1") -> str:
    """Put a package as a submit does, and return its URI."""
    with layers.Claim(store, job) as claim:
        kept = claim.keep(package)
        return store.put_bytes(layers.descriptor(package, kept.layers), f"{job}/code.json")


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


def grow(folder: Path, wanted: dict[bytes, Any]) -> None:
    """Make a tree with these entries."""
    for name, (kind, *facts) in wanted.items():
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
    """Leave nothing in a folder, whatever the modes."""
    code_package._remove(str(folder))
    folder.mkdir()


@pytest.mark.long
@settings(deadline=None)
@given(wanted=st.lists(trees, min_size=1, max_size=4), is_compressed=st.booleans())
def test_what_is_packed_is_unpacked(wanted: list[dict[bytes, Any]], is_compressed: bool):
    """Any tree, and any tree that it becomes, comes out as it went in.

    Names, bytes, modes, links and empty folders; each time on top of the layers of before.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, code = Path(scratch, "source"), Path(scratch, "code")
        store, memory = DirectoryStore(Path(scratch, "store")), Memory()
        source.mkdir()
        for each in wanted:
            clear(source)
            grow(source, each)
            (source / "train.py").touch()

            packed = pack(
                source,
                Path(scratch, "layer"),
                script="train.py",
                limit_bytes=1 << 30,
                options=Options(is_compressed=is_compressed),
                memory=memory,
            )
            code_package.fetch_code(sent(packed, store), packed.digest, str(code))
            memory = with_layers(packed.memory, packed.layers)

            assert packed.left_out == ()
            assert tree(code) == tree(source)


def test_code_comes_from_the_store(tmp_path: Path):
    """The laptop's store and the container agree on the URI; nothing is left beside the code."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print()")
    package = pack(tmp_path / "source", tmp_path / "l", script="train.py", limit_bytes=1 << 20)
    uri = sent(package, DirectoryStore(tmp_path / "a store"))

    code_package.fetch_code(uri, package.digest, str(tmp_path / "node" / "code"))

    assert listed(tmp_path / "node") == ["code"]
    assert (tmp_path / "node" / "code" / "train.py").read_text() == "print()"


# ---- packages of our own making, however wrong


class Made:
    """A package in a store, made of entries that ``pack`` would never make."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.layers: list[Layer] = []
        self.indices: list[Index] = []

    def layer(self, index: Index, body: bytes = b"", encoding: str = RAW) -> Made:
        """Add a layer."""
        return self.raw_layer(packages.dump_index(index), body, encoding, index)

    def raw_layer(
        self, data: bytes, body: bytes = b"", encoding: str = RAW, index: Index | None = None
    ) -> Made:
        """Add a layer whose index is ``data``."""
        digest = hashlib.sha256(data).hexdigest()
        whole = body + packages.encode_index(data, encoding, len(body))
        path = self.store / "layers" / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        self.layers.append(Layer(f"layers/{digest}", digest, len(whole)))
        if index is not None:
            self.indices.append(index)
        return self

    @property
    def digest(self) -> str:
        """The digest of what the layers make."""
        return packages.tree_digest(packages.merge(self.indices).values())

    def uri(self, digest: str = "") -> str:
        """Store the descriptor."""
        value = Descriptor(digest or self.digest, 0, 0, tuple(self.layers))
        path = self.store / "job-1" / "code.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(packages.dump_descriptor(value))
        return path.as_uri()

    def unpack(self, **options: Any) -> None:
        """Unpack it into the folder ``node/code``."""
        uri = self.uri()
        code_package.fetch_code(uri, self.digest, str(self.folder / "node" / "code"), **options)


def content(data: bytes, offset: int = 0) -> Content:
    """Return where ``data`` lies."""
    return Content(hashlib.sha256(data).hexdigest(), len(data), offset, len(data), RAW)


EMPTY = content(b"")


def file(name: str, data: bytes = b"", mode: int = 0o644) -> Entry:
    """Return a file."""
    return Entry(name, "file", mode, len(data), content(data).digest)


def folder(name: str) -> Entry:
    """Return a folder."""
    return Entry(name, "folder", 0o755)


def link(name: str, target: str) -> Entry:
    """Return a link."""
    return Entry(name, "link", target=target)


def made(tmp_path: Path, *entries: Entry, body: bytes = b"") -> Made:
    """Return a package of one layer."""
    return Made(tmp_path).layer(Index(entries, (content(body),)), body)


def test_names_keep_their_bytes_in_any_locale(tmp_path: Path):
    """A container without a UTF-8 locale gets the same names as the laptop had."""
    name = "é" * 60
    package = made(tmp_path, file(name), link("link", name))
    run = "import sys; from jobentry.staging import code_package as c; c.fetch_code(*sys.argv[1:])"
    env = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    subprocess.run(
        [sys.executable, "-c", run, package.uri(), package.digest, str(tmp_path / "code")],
        env={**env, "PYTHONPATH": str(Path(code_package.__file__).parents[2])},
        check=True,
    )

    found = sorted(os.listdir(os.fsencode(tmp_path / "code")))  # noqa: PTH208 (bytes)
    assert found == [b"link", name.encode()]
    assert (tmp_path / "code" / "link").is_file()


def test_code_that_is_not_there_is_named(tmp_path: Path):
    """The message goes down to what the store said."""
    with pytest.raises(UnpackError, match=r"fetch code: read object: file:///.*: no such file"):
        code_package.fetch_code(f"file://{tmp_path}/missing", "sha256:0", str(tmp_path / "code"))

    assert listed(tmp_path) == []


def test_a_layer_that_is_not_there_is_named(tmp_path: Path):
    """Nothing is left, and what was there stays."""
    package = made(tmp_path, file("a"))
    uri = package.uri()
    (package.store / package.layers[0].key).unlink()

    with pytest.raises(UnpackError, match="no such file or directory"):
        package.unpack()
    assert uri.startswith("file://")
    assert listed(tmp_path / "node") == []


# ---- unpack refuses


def test_a_package_with_another_digest_is_not_unpacked(tmp_path: Path):
    """Neither one whose descriptor says so, nor one whose layers make another tree."""
    package = made(tmp_path, file("a"))
    other = "sha256:" + "0" * 64
    target = str(tmp_path / "node" / "code")

    with pytest.raises(UnpackError, match=f"verify code: .*digest is {package.digest}, not"):
        code_package.fetch_code(package.uri(), other, target)
    with pytest.raises(UnpackError, match=r"digest of the tree is .*, not sha256:0000"):
        code_package.fetch_code(package.uri(other), other, target)

    assert listed(tmp_path / "node") == []


@pytest.mark.parametrize("position", range(0, 5, 2))
def test_one_wrong_bit_in_a_content_is_found(tmp_path: Path, position: int):
    """Though the index is as it should be."""
    package = made(tmp_path, file("a", b"hello"), body=b"hello")
    path = package.store / package.layers[0].key
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)

    with pytest.raises(UnpackError, match="a content is not the one with the digest"):
        package.unpack()
    assert listed(tmp_path / "node") == []


LONG = "x" * 4096


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([file("/etc/passwd")], "'/etc/passwd' is not a path below the folder"),
        ([file("../a")], "'../a' is not a path below the folder"),
        ([file("a\0b")], "is not a path below the folder"),
        ([file("")], "'' is not a path below the folder"),
        ([folder("d"), file("d/../../a")], "'d/../../a' is not a path below the folder"),
        ([folder("d"), file("d//a")], "'d//a' is not a path below the folder"),
        ([file("./a")], "'./a' is not a path below the folder"),
        ([file("a"), file("a")], "'a' is there twice"),
        ([folder("a"), link("a", "b")], "'a' is there twice"),
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
def test_an_entry_that_is_never_packed_is_refused(tmp_path: Path, entries: Any, fault: str):
    """Nothing is written outside the folder, and nothing is left of it."""
    package = Made(tmp_path).layer(Index(tuple(entries), (EMPTY,)))
    if fault.endswith("twice"):
        package.indices = [Index((), ())]

    with pytest.raises(UnpackError, match=f"unpack code: file://.*: .*{fault}"):
        package.unpack()

    assert listed(tmp_path) == ["node", "store"]
    assert listed(tmp_path / "node") == []


def test_more_bytes_than_the_limit_are_refused(tmp_path: Path):
    """The sum over all files counts, also where two share a content."""
    data = b"x" * 600
    package = made(tmp_path, file("a", data), file("b", data), body=data)

    with pytest.raises(UnpackError, match="more than 1000 bytes of files"):
        package.unpack(limit_bytes=1000)
    assert listed(tmp_path / "node") == []

    package.unpack(limit_bytes=1200)
    assert tree(tmp_path / "node" / "code") == {
        b"a": ("file", 0o644, data),
        b"b": ("file", 0o644, data),
    }


@pytest.mark.parametrize("size_bytes", [10_000, 50_000_000])
def test_a_bomb_is_not_inflated(tmp_path: Path, size_bytes: int):
    """A content may not become longer than the index says, whatever its bytes hold."""
    body = zlib.compress(b"\0" * 200_000_000, 9)
    bomb = Content("0" * 64, size_bytes, 0, len(body), ZLIB)
    package = Made(tmp_path).layer(
        Index((Entry("a", "file", 0o644, size_bytes, "0" * 64),), (bomb,)), body
    )

    with pytest.raises(UnpackError, match="a content is not the one with the digest"):
        package.unpack()
    assert listed(tmp_path / "node") == []


def test_an_index_that_is_a_bomb_is_not_inflated(tmp_path: Path):
    """Its footer says how long it is."""
    data = zlib.compress(b" " * 400_000_000, 9)
    digest = "0" * 64
    footer = packages._FOOTER.pack(packages.MAGIC, 1, 1, 0, len(data), 1000)
    package = made(tmp_path, file("a"))
    (package.store / "layers" / digest).write_bytes(data + footer)
    package.layers = [Layer(f"layers/{digest}", digest, len(data) + len(footer))]

    with pytest.raises(UnpackError, match="inflated it is not 1000 bytes long"):
        package.unpack()


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"format":1,"files":[],"folders":[],"links":[],"contents":[],"removed":' + b"9" * 10**6,
        b'{"format":1e999}',
        b'{"format":NaN}',
        b'{"format":2}',
        b"\xff",
        b"null",
        b'{"format":1,"files":[["a",420,0]],"folders":[],"links":[],"contents":[],"removed":[]}',
        b'{"format":1,"files":[],"folders":[["a",4095]],"links":[],"contents":[],"removed":[]}',
        b'{"format":1,"files":[],"folders":[["\\ud800",420]],"links":[],"contents":[],"removed":[]}',
        b'{"format":1,"files":[],"folders":[[true,420]],"links":[],"contents":[],"removed":[]}',
        b'{"format":1,"files":[],"folders":[],"links":[],"contents":[["x",1,0,1,"raw"]],"removed":[]}',
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, data: bytes):
    """At once, whatever it holds."""
    package = Made(tmp_path).raw_layer(data)

    with pytest.raises(UnpackError, match="unpack code: file://"):
        package.unpack()
    assert listed(tmp_path / "node") == []


@pytest.mark.parametrize("limit", [0, 4300])
def test_a_number_of_a_million_digits_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: int
):
    """Whether Python itself refuses such numbers, as it does since 3.11, or we must."""
    if limit and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python has no limit of its own")
    monkeypatch.setattr(sys, "get_int_max_str_digits", lambda: limit, raising=False)
    begun_s = time.process_time()

    with pytest.raises(packages.FormatError, match="cannot be read"):
        packages.load_index(b'{"format":1,"files":[],"contents":' + b"9" * 10**6 + b"}")

    assert time.process_time() - begun_s < 2


@pytest.mark.parametrize("cut_bytes", [0, 10, 100, 300])
def test_a_layer_that_was_cut_is_refused(tmp_path: Path, cut_bytes: int):
    """Also when it is cut so that the footer is there, or the beginning is missing."""
    package = made(tmp_path, file("a", b"x" * 600), body=b"x" * 600)
    path = package.store / package.layers[0].key
    whole = path.read_bytes()

    for part in (whole[:cut_bytes], whole[-cut_bytes:] if cut_bytes else b"", whole + b"x"):
        path.write_bytes(part)
        with pytest.raises(UnpackError, match="unpack code: file://"):
            package.unpack()

    assert listed(tmp_path / "node") == []


def test_a_content_that_no_layer_holds_is_refused(tmp_path: Path):
    """A layer may only speak of what is there."""
    below = EMPTY._replace(offset=BELOW)
    package = Made(tmp_path).layer(Index((file("a"),), (below,)))

    with pytest.raises(UnpackError, match="is in no layer"):
        package.unpack()


def hostile(picked: random.Random) -> tuple[Index, bytes]:
    """Return a layer of random entries, most of which mean harm."""
    words = ["a", "b", "..", ".", "", "/", "d", "d/a", "../x", "/etc", "d/../..", "a/b", "\0", "é",
             "node", "../../victim", "victim", "d/l", "d/l/x", "~", "a" * 300]  # fmt: skip
    body = picked.randbytes(picked.randrange(40))
    known = [EMPTY, content(body)]
    for _ in range(picked.randrange(3)):
        known.append(
            Content(
                picked.choice([content(body).digest, "0" * 64]),
                picked.choice([0, 1, len(body), 1 << 40]),
                picked.choice([BELOW, 0, 1, 1 << 40]),
                picked.choice([0, len(body), 1 << 40]),
                picked.choice([RAW, ZLIB]),
            )
        )
    entries = []
    for _ in range(picked.randrange(1, 7)):
        name = "/".join(picked.choices(words, k=picked.choice([1, 1, 2, 3])))
        kind = picked.choice(["file", "folder", "link"])
        each = picked.choice(known)
        target = "/".join(picked.choices(words, k=picked.choice([1, 2, 3])))
        if kind == "file":
            entries.append(Entry(name, kind, picked.randrange(512), each.size_bytes, each.digest))
        elif kind == "folder":
            entries.append(Entry(name, kind, picked.randrange(512)))
        else:
            entries.append(Entry(name, kind, target=target))
    removed = tuple(picked.choices(words, k=picked.randrange(3)))
    return Index(tuple(entries), tuple(known), removed), body


@pytest.mark.long
def test_ten_thousand_hostile_packages_do_no_harm(tmp_path: Path):
    """Each with a digest that fits: a few are harmless and unpacked, the others refused as such.

    Nothing but the folder of the code is ever made, and no error is any other than ours.
    """
    picked = random.Random(4)
    (tmp_path / "victim").write_text("unharmed")
    (tmp_path / "node").mkdir()
    unpacked = 0
    for number in range(10_000):
        package = Made(tmp_path)
        for _ in range(picked.choice([1, 1, 2, 3])):
            index, body = hostile(picked)
            package.layer(index, body)
        damaged = picked.choice(package.layers)
        if number % 3 == 0:
            path = package.store / damaged.key
            data = bytearray(path.read_bytes())
            data[picked.randrange(len(data))] ^= 1 << picked.randrange(8)
            path.write_bytes(data)
        try:
            package.unpack()
        except (UnpackError, packages.FormatError):
            assert listed(tmp_path / "node") == []
        else:
            unpacked += 1
            assert listed(tmp_path / "node") == ["code"]
            for path in (tmp_path / "node" / "code").rglob("*"):
                # Links that lead in a circle are harmless.
                real = os.path.realpath(path)
                assert real.startswith(f"{tmp_path}/node/code/")
            code_package._remove(str(tmp_path / "node" / "code"))
        if number % 100 == 0:
            code_package._remove(str(package.store))

    assert (tmp_path / "victim").read_text() == "unharmed"
    assert set(listed(tmp_path)) <= {"node", "store", "victim"}
    assert unpacked > 10


# ---- several threads


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a package that three threads unpack together."""
    monkeypatch.setattr(code_package, "_PART_BYTES", 1000)
    monkeypatch.setattr(code_package.os, "sched_getaffinity", lambda _: {0, 1, 2})
    picked = random.Random(6)
    bodies = [picked.randbytes(picked.randrange(3000)) for _ in range(100)]
    entries, contents, offset = [], [], 0
    for number, body in enumerate(bodies):
        entries.append(file(f"{number}", body, 0o600 if number % 2 else 0o777))
        contents.append(content(body, offset))
        offset += len(body)
    return Made(tmp_path).layer(Index(tuple(entries), tuple(contents)), b"".join(bodies))


def test_several_threads_unpack_the_same(large: Made):
    """Each its part, nothing twice and nothing left out."""
    assert len(code_package._split([code_package._Place(None, EMPTY, [])] * 90)) == 3  # type: ignore[arg-type]

    large.unpack()

    found = tree(large.folder / "node" / "code")
    assert len(found) == 100
    assert {hashlib.sha256(facts[2]).hexdigest() for facts in found.values()} == {
        each.digest for each in large.indices[0].contents
    }


def test_work_is_split_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    """A package of 100,000 files does not take minutes of it."""
    monkeypatch.setattr(code_package.os, "sched_getaffinity", lambda _: {0, 1})
    places = [code_package._Place(None, EMPTY, [])] * 100_000  # type: ignore[arg-type]
    begun_s = time.process_time()

    parts = code_package._split(places)

    assert sum(map(len, parts)) == len(places)
    assert time.process_time() - begun_s < 10


@pytest.mark.parametrize("place", [10, 50, 95])
def test_a_fault_in_any_thread_is_told(large: Made, place: int):
    """And nothing of the code is left."""
    path = large.store / large.layers[0].key
    data = bytearray(path.read_bytes())
    wrong = next(each for each in large.indices[0].contents[place:] if each.size_bytes)
    data[wrong.offset] ^= 1
    path.write_bytes(data)

    with pytest.raises(UnpackError, match=f"not the one with the digest {wrong.digest}"):
        large.unpack()
    assert listed(large.folder / "node") == []


# ---- unpack replaces


def test_a_folder_from_before_is_replaced_as_a_whole(tmp_path: Path):
    """After a restart nothing of the first run remains, not even where nobody may write."""
    code = tmp_path / "node" / "code"
    (code / "old" / "locked").mkdir(parents=True)
    (code / "old" / "locked" / "file").touch()
    (code / "old" / "locked").chmod(0o500)
    (code / "link").symlink_to("old/locked")
    package = made(tmp_path, file("a", mode=0o640))

    package.unpack()

    assert tree(code) == {b"a": ("file", 0o640, b"")}
    assert listed(tmp_path / "node") == ["code"]


def test_a_folder_from_before_survives_a_failure(tmp_path: Path):
    """It is only moved aside when the new one is complete."""
    code = tmp_path / "node" / "code"
    code.mkdir(parents=True)
    (code / "old").touch()
    package = made(tmp_path, file("a"), file("../b"))

    with pytest.raises(UnpackError):
        package.unpack()

    assert listed(code) == ["old"]
    assert listed(tmp_path / "node") == ["code"]


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path):
    """One line says which package was to go where."""
    package = made(tmp_path, file("a"))

    with pytest.raises(UnpackError, match=r"unpack code: .* to /dev/null/code: "):
        code_package.fetch_code(package.uri(), package.digest, "/dev/null/code")


# ---- when to ask


@pytest.mark.parametrize(
    ("nodes", "most_in_a_second", "last_s"), [(1, 1, 0), (64, 64, 0), (1000, 101, 9.99)]
)
def test_the_nodes_of_a_large_job_take_turns(nodes: int, most_in_a_second: int, last_s: float):
    """A small job waits for nothing, and the head of a large one neither."""
    turns = [code_package.turn_s(node, nodes) for node in range(nodes)]

    assert turns[0] == 0
    assert max(turns) == last_s
    assert all(sum(0 <= other - turn < 1 for other in turns) <= most_in_a_second for turn in turns)


def test_nobody_waits_for_his_turn_for_ever():
    """Beyond some thousand nodes the last ones ask together."""
    assert code_package.turn_s(9999, 10_000) == 30
