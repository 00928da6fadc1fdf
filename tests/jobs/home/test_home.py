"""The state folder is private, because programs in it run with the secrets of jobs."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudjob.backends import interpreters
from cloudjob.errors import BackendError
from cloudjob.home import make_home, private_folder
from cloudjob.home.records import Records

ROOT = Path(__file__).parents[3]
NOBODY = 65534
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")

# Uses a state folder that does not exist yet, in each of the ways that can create it.
CREATE_HOME = """
import os, sys
from pathlib import Path
os.umask(0)
home = Path(sys.argv[1])
if sys.argv[2] == "records":
    from cloudjob.home.records import Records
    Records(home / "records.db").close()
elif sys.argv[2] == "entry":
    from cloudjob.backends import interpreters
    interpreters.entry_of(home)
elif sys.argv[2] == "packages":
    from cloudjob.package import cache
    from cloudjob.package.cache import SourceCache
    cache.save(home / "packages" / "x.json", SourceCache())
elif sys.argv[2] == "doctor":
    from cloudjob.machine import doctor
    doctor.check_machine(home)
elif sys.argv[2] == "submit":
    from cloudjob.submission import pipeline
    from cloudjob.model.job import JobSpec
    source = home.parent.parent / "source"
    source.mkdir()
    (source / "train.py").write_text("")
    spec = JobSpec(script="train.py", source=str(source), launcher="python")
    pipeline.submit(spec, home).wait()
"""


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that every user can enter and write to, like /tmp."""
    opened = []
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/tmp"):
            break
        opened.append((folder, stat.S_IMODE(folder.stat().st_mode)))
        folder.chmod(0o755)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    yield tmp_path / "open"
    for folder, mode in opened:
        folder.chmod(mode)


def error_as_other_user(action: Callable[[], object]) -> str:
    """Run ``action`` as another user; return the name of its exception, or an empty string."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        os.waitpid(child, 0)
        return output.read()


@pytest.mark.parametrize("creator", ["records", "entry", "packages", "doctor", "submit"])
def test_nothing_is_open_to_others_whatever_the_umask(open_folder: Path, creator: str):
    home = open_folder / "deep" / "home"

    subprocess.run([sys.executable, "-c", CREATE_HOME, home, creator], cwd=ROOT, check=True)

    paths = [open_folder / "deep", home, *home.rglob("*")]
    folders = [path for path in paths if path.is_dir() and path.lstat().st_mode & 0o077]
    assert [path for path in folders if home / "store" not in path.parents] == []


@NEEDS_ROOT
def test_another_user_can_neither_read_nor_replace_the_entry(open_folder: Path):
    home = open_folder / "home"
    subprocess.run([sys.executable, "-c", CREATE_HOME, home, "entry"], cwd=ROOT, check=True)
    entry = Path(interpreters.entry_of(home), "__main__.py")

    assert error_as_other_user(entry.read_bytes) == "PermissionError"
    assert error_as_other_user(lambda: entry.write_bytes(b"evil")) == "PermissionError"
    assert error_as_other_user((home / "entry").rmdir) == "PermissionError"


@NEEDS_ROOT
@pytest.mark.parametrize("entry_name", ["", "entry", "link"])
def test_a_folder_that_another_user_has_made_is_refused(open_folder: Path, entry_name: str):
    home = open_folder / "home"
    if entry_name == "link":
        real = open_folder / "real"
        real.mkdir(mode=0o700)
        home.symlink_to(real)
        os.lchown(home, NOBODY, NOBODY)
    else:
        home.mkdir(mode=0o700)
        foreign = home / entry_name
        foreign.mkdir(exist_ok=True)
        os.chown(foreign, NOBODY, NOBODY)

    with pytest.raises(BackendError, match="belongs to another user") as caught:
        interpreters.entry_of(home)
    assert "CLOUDJOB_HOME" in caught.value.hint


@NEEDS_ROOT
@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o777])
@pytest.mark.parametrize("has_records", [False, True])
def test_a_shared_folder_is_refused_and_left_as_it_is(
    open_folder: Path, mode: int, has_records: bool
):
    """An example is ``CLOUDJOB_HOME=/tmp``, where anyone can create a ``records.db``."""
    open_folder.chmod(mode)
    if has_records:
        (open_folder / "records.db").touch()
        os.chown(open_folder / "records.db", NOBODY, NOBODY)

    for check in (make_home, lambda folder: Records(folder / "records.db")):
        with pytest.raises(BackendError, match="other users may write to it") as caught:
            check(open_folder)
        assert "CLOUDJOB_HOME" in caught.value.hint
        assert ("chmod" in caught.value.hint) == (mode == 0o777)
        assert stat.S_IMODE(open_folder.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o1777, 0o1770])
def test_a_folder_with_the_sticky_bit_is_never_taken_for_ours(open_folder: Path, mode: int):
    open_folder.chmod(mode)
    (open_folder / "records.db").touch()

    for check in (make_home, private_folder):
        with pytest.raises(BackendError, match="other users may write to it"):
            check(open_folder)
        assert stat.S_IMODE(open_folder.stat().st_mode) == mode


def test_a_folder_of_ours_that_is_open_is_closed(open_folder: Path):
    (open_folder / "records.db").touch()
    make_home(open_folder)
    (open_folder / "entry").mkdir()
    (open_folder / "entry").chmod(0o777)
    private_folder(open_folder / "entry")

    assert [stat.S_IMODE(p.stat().st_mode) for p in (open_folder, open_folder / "entry")] == [
        0o700,
        0o700,
    ]


def test_a_link_of_our_own_may_name_another_disk(tmp_path: Path):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "disk")

    make_home(tmp_path / "home")


def test_a_damaged_entry_is_unpacked_again(tmp_path: Path):
    """Each file is compared as every other, so each change is tried on one."""
    entry = Path(interpreters.entry_of(tmp_path / "home"))
    for pattern, change in (
        ("main.py", "flip"),
        ("__pycache__/main.*.pyc", "flip"),
        ("../digest", "empty"),
        ("main.py", "remove"),
    ):
        [path] = (entry / "jobentry").glob(pattern)
        intact = path.read_bytes()
        if change == "remove":
            path.unlink()
        else:
            path.write_bytes(intact[:-9] + b"?" + intact[-8:] if change == "flip" else b"")

        again = Path(interpreters.entry_of(tmp_path / "home"))

        assert again == entry
        assert len(path.read_bytes()) == len(intact), change
        assert b"?" not in path.read_bytes()[-9:-8]
        assert [entry_file.name for entry_file in entry.parent.iterdir()] == [entry.name]


def test_an_intact_entry_is_left_unchanged(tmp_path: Path):
    entry = Path(interpreters.entry_of(tmp_path / "home"))
    inode = entry.stat().st_ino
    (entry / "jobentry" / "__pycache__" / "main.cpython-38.pyc").write_bytes(b"of another Python")

    assert Path(interpreters.entry_of(tmp_path / "home")).stat().st_ino == inode


def test_an_entry_that_a_quota_refuses_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Btrfs counts a rename, too; the folder that it would have replaced does not exist."""
    rename = Path.rename

    def limited(path: Path, target: Path) -> Path:
        if path.name == "entry":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", limited)
    with pytest.raises(BackendError, match="Disk quota exceeded") as caught:
        interpreters.entry_of(tmp_path / "home")
    assert caught.value.hint.startswith("free some of your quota")
