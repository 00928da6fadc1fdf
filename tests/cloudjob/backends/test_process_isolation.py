"""Tests of an emulated node's private folders, and of this machine's files that it sees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cloudjob.backends.process import isolation
from cloudjob.backends.process.isolation import HOME, OWN, WORK, folders_named_in
from cloudjob.backends.process.request import mounts_of

ROOTS = [str(Path(isolation.__file__).parents[3]), str(Path(__file__).parents[3] / "entrypoints")]
NODE = f"""
import json, os, sys
sys.path[:0] = {ROOTS!r}
from cloudjob.backends.process.isolation import isolate
isolate("node-a.job", "/etc/hosts", *json.loads(sys.argv[1]))
"""


def on_node(mounts: object, code: str, protected: object = ()) -> str:
    """Run code on a node and return what it prints."""
    argv = [sys.executable, "-c", NODE + code, json.dumps([mounts, protected])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def mounts(tmp_path: Path):
    """Return the mounts of a node whose folders are below ``tmp_path``."""
    home, cache, work, tmp = (str(tmp_path / name) for name in ("h", "c", "w", "run/0"))
    found = mounts_of(home, cache, work, tmp, [str(tmp_path)])
    for source, _ in found:
        Path(source).mkdir(parents=True, exist_ok=True)
    return found


def test_a_node_has_its_own_folders_and_does_not_change_those_of_this_machine(mounts, tmp_path):
    before = {path for folder in OWN for path in (Path(folder), *Path(folder).glob("cj-mark"))}
    existing = {path for path in before if path.exists()}
    code = f"""
found = {{path: sorted(os.listdir(path)) for path in {OWN!r}}}
for path in found:
    open(path + "/cj-mark", "x").close()
print(json.dumps(found))
"""
    found = json.loads(on_node(mounts, code))

    shared = [tmp_path.parts[2]] if str(tmp_path).startswith("/tmp/") else []
    assert found == {
        "/tmp": shared,
        "/cache": [],
        "/home/ma-user": ["modelarts", "user-job-dir"],
        "/home/work": ["modelarts", "user-job-dir"],
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


def test_local_paths_named_by_a_job_stay_visible(mounts, tmp_path):
    (tmp_path / "data.csv").write_text("1,2")

    assert on_node(mounts, f"print(open({str(tmp_path / 'data.csv')!r}).read())") == "1,2"


def test_folders_behind_a_link_below_tmp_are_found():
    """For example, CLOUDJOB_HOME may be a link to another disk."""
    disk = Path(tempfile.mkdtemp(prefix="cj-disk-", dir="/tmp"))
    link = Path(tempfile.mkdtemp(prefix="cj-link-", dir="/tmp")) / "home"
    link.symlink_to(disk)
    try:
        home, cache, work, tmp = (str(link / name) for name in ("h", "c", "w", "run/0"))
        found = mounts_of(home, cache, work, tmp, [str(link), str(disk)])
        for source, _ in found:
            Path(source).mkdir(parents=True, exist_ok=True)
        (disk / "h/kept").write_text("kept")

        assert on_node(found, "print(open('/home/ma-user/kept').read())") == "kept"
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

    found = on_node(mounts, "print(*sorted(os.listdir('/home')))").split()

    assert set(others) <= set(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data=/tmp/a/b.csv", ["/tmp/a"]),
        ("file:///tmp/store/x", ["/tmp/store"]),
        ("/usr/bin:/tmp/venv/bin:/home/ma-user/conda/bin", ["/tmp/venv", "/home/ma-user/conda"]),
        ("/var/tmp/a /tmp /tmp/ ./tmp/a /tmp/../etc", []),
        ("/home/ma-user/modelarts/inputs", []),
        ("/cached/x /home/ma-user2/x", []),
    ],
)
def test_paths_that_a_job_names_are_found_in_any_text(text, expected):
    assert [target for _, target in folders_named_in([text])] == expected
