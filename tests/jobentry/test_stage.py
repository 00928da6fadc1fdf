"""Code unpacked in the container, against the laptop half that packs."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudjob.package import pack
from cloudjob.store.directory import DirectoryStore
from jobentry import stage
from jobentry.stage import StageError


def archive(
    folder: Path, *members: tuple[str, dict[str, Any]], data: bytes = b""
) -> tuple[str, str]:
    """Write a tar with any members, however wrong, and return its path and digest."""
    path = folder / "code.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, facts in members:
            info = tarfile.TarInfo(name)
            info.size = len(data) if not facts.get("type") else 0
            for fact, value in facts.items():
                setattr(info, fact, value)
            tar.addfile(info, io.BytesIO(data))
    return str(path), digest_of(path)


def listed(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def digest_of(path: Path) -> str:
    """Return the digest of a file as ``pack`` writes it."""
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


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


# ---- pack and unpack

names = st.binary(min_size=1, max_size=120).filter(
    lambda name: not set(name) & {0, 0x2F} and name not in (b".", b"..", b"train.py")
) | st.sampled_from([b" ", b"\n", b"-rf", b"a" * 255, "é".encode(), b"1 path=x\n", b"tail "])
files = st.tuples(st.just("file"), st.sampled_from([0o600, 0o755, 0o777, 0o444]), st.binary())
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


@settings(deadline=None)
@given(wanted=trees)
def test_what_is_packed_is_unpacked(wanted: dict[bytes, Any]):
    """Any tree comes out as it went in: names, bytes, modes, links and empty folders."""
    with tempfile.TemporaryDirectory() as scratch:
        source, package, code = Path(scratch, "source"), Path(scratch, "c.tar"), Path(scratch, "c")
        source.mkdir()
        grow(source, wanted)
        (source / "train.py").touch()

        packed = pack(source, package, script="train.py", limit_bytes=1 << 20)
        stage.unpack(str(package), packed.digest, str(code))

        assert packed.left_out == ()
        assert tree(code) == tree(source)


def test_code_comes_from_the_store(tmp_path: Path):
    """The laptop's store and the container agree on the URI; the fetched archive is removed."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print()")
    package = pack(
        tmp_path / "source", tmp_path / "code.tar", script="train.py", limit_bytes=1 << 20
    )
    uri = DirectoryStore(tmp_path / "a store").put(package.path, "job/code.tar")

    stage.fetch_code(uri, package.digest, str(tmp_path / "node" / "code"))

    assert listed(tmp_path / "node") == ["code"]
    assert (tmp_path / "node" / "code" / "train.py").read_text() == "print()"


def test_names_keep_their_bytes_in_any_locale(tmp_path: Path):
    """A container without a UTF-8 locale gets the same names as the laptop had."""
    name, code = "é" * 60, str(tmp_path / "code")
    path, digest = archive(tmp_path, (name, {}), ("link", link(name)))
    run = "import sys; from jobentry import stage; stage.unpack(*sys.argv[1:])"
    env = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    subprocess.run(
        [sys.executable, "-c", run, path, digest, code],
        env={**env, "PYTHONPATH": str(Path(stage.__file__).parents[1])},
        check=True,
    )

    assert sorted(os.listdir(os.fsencode(code))) == [b"link", name.encode()]  # noqa: PTH208 (bytes)
    assert (tmp_path / "code" / "link").is_file()


def test_code_that_is_not_there_is_named(tmp_path: Path):
    """The message goes down to what the store said."""
    with pytest.raises(StageError, match=r"fetch code: fetch object: file:///.*: no such file"):
        stage.fetch_code(f"file://{tmp_path}/missing", "sha256:0", str(tmp_path / "code"))

    assert listed(tmp_path) == []


# ---- unpack refuses


def test_an_archive_with_another_digest_is_not_opened(tmp_path: Path):
    """One wrong bit is enough, and nothing is written."""
    path, digest = archive(tmp_path, ("a", {}))
    Path(path).write_bytes(Path(path).read_bytes() + b"\0")

    with pytest.raises(StageError, match=f"verify code: {path}: digest is .*, not {digest}"):
        stage.unpack(path, digest, str(tmp_path / "code"))

    assert listed(tmp_path) == ["code.tar"]


FOLDER = {"type": tarfile.DIRTYPE, "mode": 0o755}


def link(target: str) -> dict[str, Any]:
    """Return the facts of a member that is a symbolic link."""
    return {"type": tarfile.SYMTYPE, "linkname": target}


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ([("/etc/passwd", {})], "'/etc/passwd' is not a path below the folder"),
        ([("../a", {})], "'../a' is not a path below the folder"),
        ([("d", FOLDER), ("d/../../a", {})], "'d/../../a' is not a path below the folder"),
        ([("d", FOLDER), ("d//a", {})], "'d//a' is not a path below the folder"),
        ([("./a", {})], "'./a' is not a path below the folder"),
        ([("a", {}), ("a", {})], "'a' is there twice"),
        ([("a", FOLDER), ("a", link("b"))], "'a' is there twice"),
        ([("a", link("/etc"))], "'a' is a link that leaves the folder"),
        ([("a", link("../b"))], "'a' is a link that leaves the folder"),
        ([("a", link(""))], "'a' is a link that leaves the folder"),
        ([("d", FOLDER), ("d/a", link("../../b"))], "'d/a' is a link that leaves the folder"),
        ([("d", FOLDER), ("l", link("d")), ("l/a", {})], "'l/a' does not lie in a folder of the"),
        ([("a", {}), ("a/b", {})], "'a/b' does not lie in a folder of the archive"),
        (
            [("d", FOLDER), ("d/e", FOLDER), ("d/e/up", link("../..")), ("z", link("d/e/up/.."))],
            "link 'z' leaves the folder",
        ),
        ([("a", {"type": tarfile.LNKTYPE, "linkname": "b"})], "'a' is neither a file, a folder"),
        ([("a", {"type": tarfile.CHRTYPE})], "'a' is neither a file, a folder nor a symbolic"),
        ([("a", {"type": tarfile.FIFOTYPE})], "'a' is neither a file, a folder nor a symbolic"),
        ([("a", {"type": tarfile.GNUTYPE_SPARSE})], "'a' is neither a file"),
    ],
)
def test_a_member_that_is_never_packed_is_refused(tmp_path: Path, members: Any, fault: str):
    """Nothing is written outside the folder, and nothing is left of it."""
    path, digest = archive(tmp_path, *members)

    with pytest.raises(StageError, match=f"unpack code: {path}: {fault}"):
        stage.unpack(path, digest, str(tmp_path / "code"))

    assert listed(tmp_path) == ["code.tar"]


def test_more_bytes_than_the_limit_are_refused(tmp_path: Path):
    """The sum over all files counts, and is known before they are written."""
    path, digest = archive(tmp_path, ("a", {}), ("b", {}), data=b"x" * 600)

    with pytest.raises(StageError, match="more than 1000 bytes of files"):
        stage.unpack(path, digest, str(tmp_path / "code"), limit_bytes=1000)
    assert listed(tmp_path) == ["code.tar"]

    stage.unpack(path, digest, str(tmp_path / "code"), limit_bytes=1200)


@pytest.mark.parametrize("cut_bytes", [0, 100, 700])
def test_what_is_no_whole_archive_is_refused(tmp_path: Path, cut_bytes: int):
    """Also when its digest is right: somebody stored the wrong thing."""
    path, _ = archive(tmp_path, ("a", {}), data=b"x" * 600)
    Path(path).write_bytes(Path(path).read_bytes()[:cut_bytes])

    with pytest.raises(StageError, match=f"unpack code: {path}: "):
        stage.unpack(path, digest_of(Path(path)), str(tmp_path / "code"))

    assert listed(tmp_path) == ["code.tar"]


# ---- unpack replaces


def test_a_folder_from_before_is_replaced_as_a_whole(tmp_path: Path):
    """After a restart nothing of the first run remains, not even where nobody may write."""
    code = tmp_path / "code"
    (code / "old" / "locked").mkdir(parents=True)
    (code / "old" / "locked" / "file").touch()
    (code / "old" / "locked").chmod(0o500)
    (code / "link").symlink_to("old/locked")
    path, digest = archive(tmp_path, ("a", {"mode": 0o640}))

    stage.unpack(path, digest, str(code))

    assert tree(code) == {b"a": ("file", 0o640, b"")}
    assert listed(tmp_path) == ["code", "code.tar"]


def test_a_folder_from_before_survives_a_failure(tmp_path: Path):
    """It is only moved aside when the new one is complete."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "old").touch()
    path, digest = archive(tmp_path, ("a", {}), ("../b", {}))

    with pytest.raises(StageError):
        stage.unpack(path, digest, str(tmp_path / "code"))

    assert listed(tmp_path / "code") == ["old"]
    assert listed(tmp_path) == ["code", "code.tar"]


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path):
    """One line says which archive was to go where."""
    path, digest = archive(tmp_path, ("a", {}))

    with pytest.raises(StageError, match=f"unpack code: {path} to /dev/null/code: "):
        stage.unpack(path, digest, "/dev/null/code")
