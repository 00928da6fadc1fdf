"""What an output has besides files, stored by a node and fetched again."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudjob.errors import StoreError
from cloudjob.store.directory import DirectoryStore
from cloudjob.tracking.outputs import OutputLocation, Outputs
from jobentry.contract import env, manifest
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.staging.outputs import Outputs as NodeOutputs

YEAR_NS = 31_556_952 * 10**9


class Node:
    """A node with one output."""

    def __init__(self, tmp_path: Path, *, restore: str = env.RESTORE_NONE) -> None:
        self.store = tmp_path / "store"
        number = len(list(tmp_path.glob("node-*")))
        home = tmp_path / f"node-{number}"
        paths = NodePaths(*(str(home / name) for name in ("", "job", "mount", "log", "node")))
        node = NodeEnv(
            job="j", hosts=("a",), outputs=(("M", self.store.as_uri()),), restore_outputs=restore
        )
        self.outputs = NodeOutputs(node, paths)
        self.folder = Path(paths.output("M"))
        self.outputs.prepare()

    def finish(self) -> str:
        self.outputs.start()
        return self.outputs.finish(60)


def download(store: Path, to: Path) -> Outputs:
    outputs = Outputs([OutputLocation("M", DirectoryStore(store), "")])
    outputs.download(to)
    return outputs


LINKS = {
    "to-file": "model",
    "to-folder": "checkpoint-5",
    "up": "../checkpoint-5/weights",
    "dangling": "not-there",
    "self": ".",
}


def test_links_are_kept(tmp_path: Path):
    node = Node(tmp_path)
    (node.folder / "checkpoint-5").mkdir()
    (node.folder / "checkpoint-5/weights").write_text("w")
    (node.folder / "model").write_text("m")
    (node.folder / "deep").mkdir()
    for name, target in LINKS.items():
        (node.folder / ("deep/up" if name == "up" else name)).symlink_to(target)
    # As many scripts do.
    (node.folder / "absolute").symlink_to(node.folder / "checkpoint-5")

    assert node.finish() == ""
    outputs = download(node.store, tmp_path / "to")

    top = tmp_path / "to/M"
    links = {
        path.relative_to(top).as_posix(): str(path.readlink())
        for path in top.rglob("*")
        if path.is_symlink()
    }
    expected = {name: target for name, target in LINKS.items() if name != "up"}
    assert links == {**expected, "deep/up": LINKS["up"], "absolute": "checkpoint-5"}
    assert (top / "absolute/weights").read_text() == "w"
    assert outputs.notes == ()
    # Readers without manifests get the file to which a link leads.
    assert (node.store / "to-file").read_text() == "m"


def test_what_is_not_kept_is_named_by_the_node_and_by_the_laptop(tmp_path: Path, capsys):
    node = Node(tmp_path)
    (tmp_path / "far").mkdir()
    (tmp_path / "far/file").write_text("far")
    os.mkfifo(node.folder / "pipe")
    (node.folder / "to-far").symlink_to(tmp_path / "far")
    (node.folder / "to-file").symlink_to(tmp_path / "far/file")
    (node.folder / "to-nothing").symlink_to("/nowhere")
    (node.folder / "above").symlink_to("../..")
    (node.folder / "model").write_text("m")
    # An unfinished write has such a name, so no object may.
    (node.folder / ".cloudjob-tmp-x").write_text("m")
    (node.folder / ".cloudjob-tmp-y").mkdir()
    (node.folder / ".cloudjob-tmp-y/model").write_text("m")
    (node.folder / manifest.FOLDER).write_text("m")
    # The kernel says that it is empty: what is stored is no more than that.
    (node.folder / "to-kernel").symlink_to("/proc/self/environ")

    assert node.finish() == ""
    outputs = download(node.store, tmp_path / "to")

    names = [path.name for path in (tmp_path / "to/M").iterdir()]
    assert sorted(names) == ["model", "to-file", "to-kernel"]
    assert (tmp_path / "to/M/to-kernel").read_bytes() == b""
    assert (tmp_path / "to/M/to-file").read_text() == "far"
    assert not (tmp_path / "to/M/to-file").is_symlink()
    notes = "\n".join(outputs.notes)
    err = capsys.readouterr().err
    reserved = (".cloudjob-tmp-x", ".cloudjob-tmp-y", manifest.FOLDER)
    for name in ("pipe", "to-far", "to-file", "to-nothing", "above", *reserved):
        assert f"M/{name} is not kept: " in notes
        assert f"'{name}'" in err


def test_modes_and_empty_folders_are_kept(tmp_path: Path):
    node = Node(tmp_path)
    (node.folder / "run.sh").write_text("#!/bin/sh\n")
    (node.folder / "run.sh").chmod(0o755)
    (node.folder / "read-only").write_text("r")
    (node.folder / "read-only").chmod(0o444)
    (node.folder / "empty/deep").mkdir(parents=True)
    (node.folder / "empty").chmod(0o750)

    assert node.finish() == ""
    download(node.store, tmp_path / "to")

    top = tmp_path / "to/M"
    modes = {
        name: stat.S_IMODE((top / name).stat().st_mode) for name in ("run.sh", "read-only", "empty")
    }
    assert modes == {"run.sh": 0o755, "read-only": 0o444, "empty": 0o750}
    assert (top / "empty/deep").is_dir()
    # A change of the mode alone is stored, too, and a second download succeeds.
    (node.folder / "run.sh").chmod(0o700)
    again = node.outputs._all[0]
    assert again.upload_all() == []
    download(node.store, tmp_path / "to")
    assert stat.S_IMODE((top / "run.sh").stat().st_mode) == 0o700


@pytest.mark.parametrize("years", [-100, -1, 0.0, 140, 146, 300, 400])
def test_files_of_any_time_are_kept_and_hide_no_others(tmp_path: Path, years: float):
    node = Node(tmp_path)
    for name in ("odd", "other"):
        (node.folder / name).write_text(name)
    wanted = int(years * YEAR_NS)
    try:
        os.utime(node.folder / "odd", ns=(wanted, wanted))
    except OverflowError:
        os.utime(node.folder / "odd", (wanted / 1e9, wanted / 1e9))
    time_ns = (node.folder / "odd").stat().st_mtime_ns

    assert node.finish() == ""
    download(node.store, tmp_path / "to")

    assert (tmp_path / "to/M/other").read_text() == "other"
    kept_ns = (tmp_path / "to/M/odd").stat().st_mtime_ns
    assert time_ns in (0, kept_ns) or abs(time_ns) >= 2**63


@pytest.mark.parametrize(
    "name",
    [b"new\nline", b"\xff\xfe", b"n" * 255, b"a b'\"$(x)", b"\xe4\xb8\xad" * 80, b"-rf", b".x"],
)
def test_files_of_any_name_are_kept(tmp_path: Path, name: bytes):
    node = Node(tmp_path)
    Path(os.fsdecode(os.fsencode(node.folder) + b"/" + name)).write_text("1")

    assert node.finish() == ""
    download(node.store, tmp_path / "to")

    assert [os.fsencode(path.name) for path in (tmp_path / "to/M").iterdir()] == [name]


def test_a_restart_restores_links_modes_and_folders(tmp_path: Path):
    node = Node(tmp_path)
    (node.folder / "c-5/empty").mkdir(parents=True)
    (node.folder / "latest").symlink_to("c-5")
    (node.folder / "run.sh").touch(0o700)
    assert node.finish() == ""

    again = Node(tmp_path, restore=env.RESTORE_OWN)

    assert str((again.folder / "latest").readlink()) == "c-5"
    assert (again.folder / "c-5/empty").is_dir()
    assert stat.S_IMODE((again.folder / "run.sh").stat().st_mode) == 0o700


# -- hostile stores -----------------------------------------------------------------------------


def entry(name: str, key: str = "object") -> dict[str, object]:
    digest = "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"
    return {"name": name, "key": key, "size_bytes": 1, "sha256": digest, "modified_ns": 1}


@pytest.fixture
def hostile(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a store with this manifest."""

    def make(*files: object, node: int = 0, **others: object) -> Path:
        store = tmp_path / "store"
        (store / manifest.FOLDER).mkdir(parents=True, exist_ok=True)
        (store / "object").write_bytes(b"0")
        value = {"format": 1, "job": "j", "node": node, "files": files, **others}
        (store / manifest.key(node)).write_text(json.dumps(value))
        return store

    return make


@pytest.mark.parametrize(
    "links",
    [
        {"a": "../../docs"},
        {"a": "/{docs}"},
        {"a": "b", "b": "../.."},
        {"d/y": "..", "d/a": "y/../../docs"},
        {"a": "x/../../docs"},
        {"a": ".."},
    ],
    ids=str,
)
def test_no_link_of_a_store_leads_out_of_the_folder(tmp_path, hostile, links):
    docs = tmp_path / "docs"
    docs.mkdir()
    links = {name: target.replace("{docs}", str(docs)[1:]) for name, target in links.items()}
    inside = [entry(f"{name}/thesis") for name in links] + [entry("good")]
    store = hostile(*inside, links=links, folders={"docs": 0o700})

    with contextlib.suppress(StoreError):
        download(store, tmp_path / "to")

    assert list(docs.iterdir()) == []
    assert (tmp_path / "to/M/good").read_bytes() == b"0"
    top = os.path.realpath(tmp_path / "to/M")
    for path in (tmp_path / "to").rglob("*"):
        assert os.path.realpath(path).startswith(top)


def test_an_earlier_link_in_the_folder_is_not_followed(tmp_path, hostile):
    """Two downloads into one folder, and a store that lists a link, then a file behind it."""
    docs, to = tmp_path / "docs", tmp_path / "to"
    docs.mkdir()
    (to / "M").mkdir(parents=True)
    (to / "M/c").symlink_to(docs)
    (to / "M/f").symlink_to(docs / "thesis")
    store = hostile(entry("c/thesis"), entry("f"), entry("good"), folders={"c": 0o700})

    with pytest.raises(StoreError, match=r"fetching M/c/thesis to .*: Not a directory"):
        download(store, to)

    assert list(docs.iterdir()) == []

    assert (to / "M/good").read_bytes() == b"0"
    assert not (to / "M/f").is_symlink()


@pytest.mark.parametrize(
    "bad",
    [
        {**entry("late"), "modified_ns": 10**40},
        {**entry("x"), "name": "../x"},
        {"name": "half"},
        "text",
        None,
    ],
    ids=str,
)
def test_one_bad_entry_never_hides_the_others(tmp_path, hostile, bad):
    store = hostile(bad, entry("good"))

    outputs = download(store, tmp_path / "to")

    assert [file.name for file in outputs] == ["M/good"]
    assert (tmp_path / "to/M/good").read_bytes() == b"0"
    assert any("not valid" in note for note in outputs.notes)


def test_one_bad_manifest_or_missing_object_never_hides_the_others(tmp_path, hostile):
    store = hostile(entry("missing", "gone"), entry("damaged", "other"), entry("good"))
    (store / "other").write_bytes(b"1")
    (store / manifest.key(1)).write_text("{")

    outputs = Outputs([OutputLocation("M", DirectoryStore(store), "")])
    with pytest.raises(StoreError, match="2 files are lost: M/damaged, M/missing; first: "):
        outputs.download(tmp_path / "to")

    assert (tmp_path / "to/M/good").read_bytes() == b"0"
    assert any("node-1.json" in note for note in outputs.notes)


def test_a_manifest_of_an_earlier_version_is_read(tmp_path, hostile):
    """It has neither links nor modes."""
    store = hostile(entry("a/b"))

    download(store, tmp_path / "to")

    assert (tmp_path / "to/M/a/b").read_bytes() == b"0"
    assert [file.link for file in Outputs([OutputLocation("M", DirectoryStore(store), "")])] == [""]


OUT = "../../../../docs"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"links": {"a": ".", "a/a/a/a/a/to": f"{OUT}/thesis"}}, {}),
        ({"links": {"a": ".", "a/a/a/a/a/to": OUT}}, {"folders": {"to/new": 0o755, "to": 0o777}}),
    ],
    ids=str,
)
def test_nothing_is_restored_behind_a_link(tmp_path, hostile, first, second):
    """Else a node would store the file to which a link of the store leads."""
    docs = tmp_path / "docs"
    docs.mkdir(0o700)
    (docs / "thesis").write_text("secret")
    store = hostile(entry("good"), **first)
    hostile(node=1, **second)

    again = Node(tmp_path, restore=env.RESTORE_ALL)
    assert (again.folder / OUT / "thesis").exists()
    again.finish()

    assert [path.name for path in docs.iterdir()] == ["thesis"]
    assert stat.S_IMODE(docs.stat().st_mode) == 0o700
    assert not any(path.read_bytes() == b"secret" for path in store.rglob("*") if path.is_file())
