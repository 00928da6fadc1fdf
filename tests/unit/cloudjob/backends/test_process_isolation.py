"""Tests of an emulated node's private folders, and of this machine's files that it sees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudjob.backends.process import isolation, node_files
from cloudjob.backends.process.isolation import HOME, OWN, WORK, paths_named_in
from cloudjob.backends.process.request import mounts_of
from cloudjob.model.job import JobSpec
from cloudjob.model.submission import StoredCode, Submission

ROOTS = [str(Path(isolation.__file__).parents[3]), str(Path(__file__).parents[4] / "entrypoints")]
NODE = f"""
import json, os, sys
sys.path[:0] = {ROOTS!r}
from cloudjob.backends.process.isolation import isolate
isolate("node-a.job", "/etc/hosts", *json.loads(sys.argv[1]))
"""


def on_node(mounts: object, code: str, protected: object = (), visible: object = ()) -> str:
    """Run code on a node and return what it prints."""
    argv = [sys.executable, "-c", NODE + code, json.dumps([mounts, protected, visible])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a folder of this machine below one that is private to nodes."""
    with tempfile.TemporaryDirectory(prefix="cj-node-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def mounts(tmp_path: Path):
    """Return the mounts of a node whose folders are below ``tmp_path``."""
    sources = mounts_of(*(str(tmp_path / name) for name in ("h", "c", "w", "v", "run/0")))
    for source, _ in sources:
        Path(source).mkdir(parents=True, exist_ok=True)
    return sources


def test_a_node_has_its_own_folders_and_does_not_change_those_of_this_machine(mounts, tmp_path):
    before = {path for folder in OWN for path in (Path(folder), *Path(folder).glob("cj-mark"))}
    existing = {path for path in before if path.exists()}
    code = f"""
found = {{path: sorted(os.listdir(path)) for path in {OWN!r}}}
for path in found:
    open(path + "/cj-mark", "x").close()
print(json.dumps(found))
"""
    values = json.loads(on_node(mounts, code))

    assert values == {
        "/tmp": [],
        "/var/tmp": [],
        "/run/lock": [],
        "/cache": [],
        "/home/ma-user": ["modelarts", "user-job-dir"],
        "/home/work": ["modelarts", "user-job-dir"],
        "/dev/shm": [],
    }
    assert {path for path in before if path.exists()} == existing
    assert not any(Path(folder, "cj-mark").exists() for folder in OWN)
    assert (tmp_path / "run/0/tmp/cj-mark").exists()


def test_the_folder_of_the_code_has_its_three_documented_names(mounts):
    code = f"""
open("{HOME}/modelarts/user-job-dir/a.py", "x").close()
print(os.listdir("{HOME}/user-job-dir"), os.listdir("{WORK}/user-job-dir"))
"""
    assert on_node(mounts, code) == "['a.py'] ['a.py']"


def test_a_node_cannot_write_to_the_root_which_is_lost_with_it(mounts):
    code = """
try:
    os.mkdir("/cloudjob-new")
except OSError as error:
    print(error.strerror)
"""
    assert on_node(mounts, code) == "Read-only file system"


def test_a_node_reads_what_is_shown_and_cannot_change_it(mounts, tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    (tmp_path / "folder").mkdir()
    paths = [str(tmp_path / "data.csv"), str(tmp_path / "folder")]
    code = f"""
paths = {paths!r}
print(open(paths[0]).read())
for act, path in ((os.remove, paths[0]), (os.truncate, paths[0]), (os.mkdir, paths[1] + "/a")):
    try:
        act(path, *[0] * (act is os.truncate))
        print("changed")
    except OSError as error:
        print(error.strerror)
"""
    lines = on_node(mounts, code, visible=[(path, path) for path in paths]).splitlines()

    assert lines[0] == "1,2"
    assert set(lines[1:]) == {"Device or resource busy", "Read-only file system"}


def test_a_node_that_empties_its_folders_removes_no_file_of_this_machine(mounts, tmp_path):
    """A script may empty its folder for temporary files, in which it sees what the job names."""
    for name in ("data/deep/a", "data/b", "project/train.py", "lone", "shown/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    before = _files_in(tmp_path)
    named = [(str(tmp_path / name), str(tmp_path / f"run/{name}")) for name in ("data", "lone")]
    visible = [(str(tmp_path / "shown"), str(tmp_path / "shown"))]
    code = f"""
import shutil
print(*sorted(os.listdir({str(tmp_path)!r})))
for folder in {OWN!r}:
    # Only what the test has made: if nodes had no folders of their own, this would be the machine.
    shutil.rmtree(os.path.join(folder, {tmp_path.name!r}), ignore_errors=True)
print(os.path.exists({str(tmp_path / "data/b")!r}))
"""
    lines = on_node(mounts, code, named, visible).splitlines()

    assert lines == ["data lone shown", "False"]
    assert _files_in(tmp_path) == before


def _files_in(folder: Path) -> list[Path]:
    """Return the files of this machine, without those of the node."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if "run" not in path.relative_to(folder).parts)


def test_a_path_inside_a_shown_folder_can_have_another_kind(mounts, tmp_path):
    """For example, what pip changes in a virtual environment, and an output beside an input."""
    (tmp_path / "x/lib").mkdir(parents=True)
    (tmp_path / "x/out").mkdir()
    machine = f"{isolation.MACHINE}{tmp_path}/x"
    code = f"""
open({str(tmp_path / "x/lib/new")!r}, "x").close()
open({machine + "/out/model"!r}, "x").close()
try:
    open({machine + "/other"!r}, "x")
except OSError as error:
    print(error.strerror)
"""
    visible = [(str(tmp_path / "x"), str(tmp_path / "x")), (str(tmp_path / "x"), machine)]
    changed = [(str(tmp_path / "x/lib"), str(tmp_path / "run/changes"))]
    written = [(str(tmp_path / "x/out"), machine + "/out")]

    assert on_node([*mounts, *written], code, changed, visible) == "Read-only file system"
    assert _files_in(tmp_path / "x") == [tmp_path / "x/out/model"]


@pytest.mark.parametrize("folder", ["/dev/shm", "/run/lock", "/var/tmp"])
def test_a_folder_that_all_users_share_is_the_node_s_own(mounts, folder):
    """A script may empty it, as it may in a container; the test itself removes nothing there."""
    with tempfile.TemporaryDirectory(prefix="cj-mark-", dir=folder) as mark:
        assert Path(mark).name not in on_node(mounts, f"print(os.listdir({folder!r}))")


def test_a_node_can_change_no_folder_of_this_machine_that_every_user_can_change(mounts):
    """Asks the machine for such folders, as distributions differ; the sticky bit marks them."""
    find = ["find", "/run", "/var", "/dev", "-maxdepth", "3", "-type", "d", "-perm", "-1002"]
    done = subprocess.run(find, capture_output=True, text=True, check=False)
    code = f"""
for path in {done.stdout.split()!r}:
    if os.path.isdir(path) and os.access(path, os.W_OK):
        print(path, os.stat(path).st_dev, os.stat(path).st_ino)
"""
    for line in on_node(mounts, code).splitlines():
        path, *identity = line.split()
        facts = Path(path).stat()
        assert identity != [str(facts.st_dev), str(facts.st_ino)], path


def test_folders_behind_a_link_below_tmp_are_found():
    """For example, CLOUDJOB_HOME may be a link to another disk."""
    disk = Path(tempfile.mkdtemp(prefix="cj-disk-", dir="/tmp"))
    link = Path(tempfile.mkdtemp(prefix="cj-link-", dir="/tmp")) / "home"
    link.symlink_to(disk)
    try:
        sources = mounts_of(*(str(link / name) for name in ("h", "c", "w", "v", "run/0")))
        for source, _ in sources:
            Path(source).mkdir(parents=True, exist_ok=True)
        (disk / "h/kept").write_text("kept")

        assert on_node(sources, "print(open('/home/ma-user/kept').read())") == "kept"
    finally:
        shutil.rmtree(disk)
        shutil.rmtree(link.parent)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_node_changes_a_protected_folder_for_itself_only(mounts, tmp_path, is_on_disk):
    folder = tmp_path / "lib,with:signs"
    folder.mkdir()
    (folder / "old").write_text("old")
    # An overlay cannot store its changes in /proc, so they are kept in memory.
    changes = tmp_path / "changes" if is_on_disk else Path("/proc/self/task")
    code = f"""
os.chdir({str(folder)!r})
os.remove("old")
open("new", "x").close()
print(os.listdir())
"""
    assert on_node(mounts, code, [[str(folder), str(changes)]]) == "['new']"
    assert [path.name for path in folder.iterdir()] == ["old"]


def test_a_node_sees_the_home_folders_of_this_machine(mounts):
    others = sorted(path.name for path in Path("/home").glob("*") if path.name != "ma-user")

    homes = on_node(mounts, "print(*sorted(os.listdir('/home')))").split()

    assert set(others) <= set(homes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data=@/a/b.csv", ["a/b.csv"]),
        ("@/a", ["a"]),
        ("file://@/a/b.csv", ["a/b.csv"]),
        ("/usr/bin:@/a:@/c d", ["a", "c d"]),
        ("--x=@/c d/e", ["c d/e"]),
        ("@/a/new.csv", ["a"]),
        ("@/a/part-*.csv", ["a"]),
        ("@/a/../a/b.csv", ["a/b.csv"]),
        ("@/link", ["link", "a"]),
        ("/tmp/missing/x /tmp /tmp/ ./tmp/a /tmp/../etc /var@/a", []),
        ("/home/ma-user/modelarts/inputs /cached/x /home/ma-user2/x", []),
    ],
)
def test_paths_that_a_job_names_are_found_in_any_text(text, expected):
    with tempfile.TemporaryDirectory(prefix="cj-named-", dir="/tmp") as folder:
        for name in ("a/b.csv", "c d/e"):
            Path(folder, name).parent.mkdir()
            Path(folder, name).touch()
        Path(folder, "link").symlink_to("a")

        named_paths = paths_named_in([text.replace("@", folder)])

        assert named_paths == tuple(f"{folder}/{name}".rstrip("/") for name in expected)


def test_folders_to_which_the_links_in_a_named_folder_lead_are_named_too(tmp_path):
    """Caches of models are folders of links to files in another folder."""
    with tempfile.TemporaryDirectory(prefix="cj-named-", dir="/tmp") as folder:
        for name in ("blobs/1", "snapshots/main/README"):
            Path(folder, name).parent.mkdir(parents=True)
            Path(folder, name).touch()
        Path(folder, "snapshots/main/model").symlink_to("../../blobs/1")

        named_paths = paths_named_in([f"{folder}/snapshots/main"])

        assert named_paths == (f"{folder}/snapshots/main", f"{folder}/blobs")


def test_what_a_job_names_is_changeable_on_the_node_and_what_a_secret_names_is_not(tmp_path):
    """The log names changed files, and must not name what a secret contains."""
    for name in ("data", "key", "in", "out", "home"):
        (tmp_path / name).mkdir()
    submission = Submission(
        spec=JobSpec(
            script="train.py",
            source=str(tmp_path / "data"),
            secrets={"KEY": str(tmp_path / "key")},
            inputs={"DATA": (tmp_path / "in").as_uri()},
        ),
        job="job",
        code=StoredCode((tmp_path / "home/store/job/code.json").as_uri(), "sha256:0"),
        record_uri=(tmp_path / "home/store/job/record/exit.json").as_uri(),
        outputs=(("OUT", (tmp_path / "out").as_uri()),),
    )

    files = node_files.files_of(submission, [], tmp_path / "home")

    machine = f"{isolation.MACHINE}{tmp_path}"
    assert files.named == (str(tmp_path / "data"),)
    assert files.shown == (
        (str(tmp_path / "key"), str(tmp_path / "key")),
        # With what is beside the input.
        (str(tmp_path), machine),
    )
    assert set(files.mounts) == {
        (str(tmp_path / name), f"{machine}/{name}")
        for name in ("home", "home/store/job/record", "out")
    }
    assert files.on_node(str(tmp_path / "out/model")) == f"{machine}/out/model"
    assert files.on_node("/data/model") == "/data/model"
