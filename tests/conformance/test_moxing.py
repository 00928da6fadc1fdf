"""``moxing.file`` of emulated nodes, in the ways that public scripts use it, on real S3 servers."""

from __future__ import annotations

import csv
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moxing as mox
from jobentry.secrets import private_environ
from moxing.framework.file import file_io
from tests.support.servers import ACCESS_KEY, SECRET_KEY, Server, boto3_client

ROOT = Path(__file__).resolve().parent.parent.parent
EMULATED = ROOT / "entrypoints" / "emulated"


class Bucket:
    """A bucket whose content boto3 writes and checks."""

    def __init__(self, server: Server, name: str, scheme: str) -> None:
        self.url = f"{scheme}://{name}"
        self.name = name
        self._boto3 = boto3_client(server.endpoint)

    def put(self, **objects: str) -> None:
        """Store objects; ``__`` in a name stands for ``/``, ``_dot_`` for a dot."""
        for name, text in objects.items():
            key = name.replace("__", "/").replace("_dot_", ".")
            self._boto3.put_object(Bucket=self.name, Key=key, Body=text.encode())

    def contents(self) -> dict[str, str]:
        """Return the text of every object."""
        listed = self._boto3.list_objects_v2(Bucket=self.name).get("Contents", [])
        bodies = {
            item["Key"]: self._boto3.get_object(Bucket=self.name, Key=item["Key"])["Body"].read()
            for item in listed
        }
        return {key: body.decode() for key, body in bodies.items()}


@pytest.fixture(scope="session", params=["seaweedfs", "moto"])
def server(request: pytest.FixtureRequest) -> Server:
    """A real S3 server."""
    s3_server: Server = request.getfixturevalue(request.param)
    return s3_server


@pytest.fixture
def platform(server: Server) -> dict[str, str]:
    """The platform's variables for access to OBS."""
    return {
        "S3_ENDPOINT": server.endpoint,
        "S3_USE_HTTPS": "0",
        "S3_VERIFY_SSL": "0",
        "ACCESS_KEY_ID": ACCESS_KEY,
        "SECRET_ACCESS_KEY": SECRET_KEY,
        "CLOUDJOB_STORE_PATIENCE_S": "30",
    }


@pytest.fixture
def bucket(
    server: Server,
    platform: dict[str, str],
    new_bucket: Callable[[Server], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bucket]:
    """An empty bucket."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3_", "OBS_", "CLOUDJOB_S3_")):
            monkeypatch.delenv(name)
    for name, value in platform.items():
        monkeypatch.setenv(name, value)
    yield Bucket(server, new_bucket(server), "s3" if server.name == "moto" else "obs")
    private_environ._values.clear()


def files(folder: Path) -> dict[str, str]:
    """Return the text of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


# -- copy_parallel --------------------------------------------------------------------------------


def test_a_folder_is_copied_down_and_back_up(bucket: Bucket, tmp_path: Path):
    bucket.put(data__a_dot_txt="A", data__sub__b="B", database="no")
    cache = tmp_path / "cache" / "data"

    mox.file.copy_parallel(f"{bucket.url}/data", str(cache))
    mox.file.copy_parallel(src_url=f"{cache}/", dst_url=f"{bucket.url}/out/", threads=4)

    assert files(cache) == {"a.txt": "A", "sub/b": "B"}
    contents = bucket.contents()
    assert contents["out/a.txt"] == "A"
    assert contents["out/sub/b"] == "B"


def test_a_single_object_is_copied_to_a_file_name_or_into_a_folder(bucket: Bucket, tmp_path: Path):
    bucket.put(archive_dot_zip="zip")

    mox.file.copy_parallel(f"{bucket.url}/archive.zip", str(tmp_path / "new" / "b.zip"))
    mox.file.copy_parallel(f"{bucket.url}/archive.zip", str(tmp_path))
    mox.file.copy_parallel(str(tmp_path / "archive.zip"), f"{bucket.url}/up/c.zip")

    assert files(tmp_path) == {"new/b.zip": "zip", "archive.zip": "zip"}
    assert bucket.contents()["up/c.zip"] == "zip"


def test_an_empty_prefix_is_copied_as_an_empty_folder(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Scripts then search the folder for a checkpoint to resume from."""
    mox.file.copy_parallel(f"{bucket.url}/train/V1", str(tmp_path / "train"))

    assert list((tmp_path / "train").iterdir()) == []
    assert "No files to copy" in caplog.text


def test_doubled_slashes_in_an_address_count_as_one(bucket: Bucket, tmp_path: Path):
    bucket.put(a__b__c="C")

    mox.file.copy_parallel(f"{bucket.url}//a//b/", str(tmp_path / "b"))
    mox.file.write(f"{bucket.url}/a//d", "D")

    assert files(tmp_path) == {"b/c": "C"}
    assert bucket.contents() == {"a/b/c": "C", "a/d": "D"}


def test_a_local_folder_is_copied_to_a_local_folder(tmp_path: Path):
    """The platform may have replaced ``data_url`` by a local path."""
    source = tmp_path / "inputs"
    (source / "empty").mkdir(parents=True)
    (source / "f").write_text("F")
    (source / "loop").symlink_to(source)

    mox.file.copy_parallel(str(source), str(tmp_path / "cache"))

    assert files(tmp_path / "cache") == {"f": "F"}
    assert (tmp_path / "cache" / "empty").is_dir()
    with pytest.raises(mox.file.MoxFileNotExistsException):
        mox.file.copy_parallel(str(tmp_path / "none"), str(tmp_path / "x"))


def test_a_file_list_limits_what_is_copied(bucket: Bucket, tmp_path: Path):
    bucket.put(d__a="A", d__b="B", d__c__e="E")

    mox.file.copy_parallel(
        f"{bucket.url}/d", str(tmp_path), file_list=["a", "c/e"], threads=0, is_processing=False
    )

    assert files(tmp_path) == {"a": "A", "c/e": "E"}


def test_empty_folders_are_kept_on_the_way_up_and_down(bucket: Bucket, tmp_path: Path):
    (tmp_path / "out" / "logs" / "empty").mkdir(parents=True)

    mox.file.copy_parallel(str(tmp_path / "out"), f"{bucket.url}/out")
    mox.file.copy_parallel(f"{bucket.url}/out", str(tmp_path / "back"))

    assert mox.file.is_directory(f"{bucket.url}/out/logs/empty")
    assert (tmp_path / "back" / "logs" / "empty").is_dir()


@pytest.mark.parametrize("server", ["moto"], indirect=True)
def test_an_object_and_a_folder_of_one_name_are_refused(bucket: Bucket, server: Server, tmp_path):
    """Only on moto, as SeaweedFS cannot store both."""
    bucket.put(x="X", x__y="Y")

    with pytest.raises(mox.file.MoxFileNameDuplicateException):
        mox.file.copy_parallel(f"{bucket.url}/x", str(tmp_path / "x"))


@pytest.mark.parametrize("name", ["no-such-bucket-here", "no-such-bucket-here/x", "BUCKET/none"])
def test_a_missing_bucket_or_object_does_not_exist(bucket: Bucket, tmp_path: Path, name: str):
    url = "s3://" + name.replace("BUCKET", bucket.name)
    calls = [mox.file.stat, mox.file.get_size, mox.file.list_directory, mox.file.scan_dir]
    calls += [lambda url: mox.file.rename(url, f"{bucket.url}/y")]
    if "/" in name:
        calls += [mox.file.read, lambda url: mox.file.copy(url, str(tmp_path / "x"))]
    if not name.startswith("BUCKET"):
        # A prefix without objects is an empty folder, but only in an existing bucket.
        calls += [lambda url: mox.file.copy_parallel(url, str(tmp_path / "x"))]
        calls += [lambda url: mox.file.write(f"{url}/y", "z")]
    for call in calls:
        with pytest.raises(mox.file.MoxFileNotExistsException):
            call(url)

    assert not mox.file.exists(url)
    assert not mox.file.is_directory(url)
    assert bucket.contents() == files(tmp_path) == {}


def test_a_file_has_no_directory_to_list(bucket: Bucket, tmp_path: Path):
    bucket.put(d__a="123")
    (tmp_path / "a").write_text("123")
    for url in (f"{bucket.url}/d/a", str(tmp_path / "a")):
        for function in (mox.file.list_directory, mox.file.scan_dir):
            with pytest.raises(NotADirectoryError):
                function(url)


@pytest.mark.parametrize("server", ["moto"], indirect=True)
def test_keys_that_lead_out_of_the_folder_are_refused(bucket: Bucket, server: Server, tmp_path):
    """Only on moto, as SeaweedFS cannot store such a key."""
    boto3_client(server.endpoint).put_object(Bucket=bucket.name, Key="d/../../evil", Body=b"")

    with pytest.raises(mox.file.MoxFileReadException):
        mox.file.copy_parallel(f"{bucket.url}/d", str(tmp_path / "d"))
    assert files(tmp_path) == {}


# -- one file -------------------------------------------------------------------------------------


def test_files_are_written_appended_and_read(bucket: Bucket):
    url = f"{bucket.url}/log.txt"

    mox.file.write(url, "one\n")
    mox.file.append(url, "zwei ü\n")
    mox.file.write(f"{bucket.url}/bytes", b"\0\xff", binary=True)
    mox.file.append_remote(url, f"{bucket.url}/bytes")

    assert mox.file.read(url) == "one\nzwei ü\n"
    assert mox.file.read(f"{bucket.url}/bytes", binary=True) == b"\0\xffone\nzwei \xc3\xbc\n"
    assert mox.file.get_size(url) == 12


def test_an_open_file_behaves_as_a_local_one(bucket: Bucket):
    url = f"{bucket.url}/results/table.csv"

    with mox.file.File(url, "w") as file:
        csv.writer(file).writerows([["a", "b"], ["1", "2"]])
        file.flush()
        assert mox.file.exists(url)
        file.writelines(["3,4\n"])
    with mox.file.File(url) as file:
        assert [row["b"] for row in csv.DictReader(file)] == ["2", "4"]
        assert (file.seek(0), file.readline(), file.size(), file.readable()) == (
            0,
            "a,b\n",
            14,
            True,
        )
    with mox.file.File(url, "r+b") as file:
        file.write(b"A")
    with mox.file.File(f"{bucket.url}/p", "wb") as file:
        pickle.dump({"epoch": 3}, file)
    with mox.file.File(f"{bucket.url}/p", "rb") as file:
        assert pickle.load(file) == {"epoch": 3}

    assert mox.file.read(url)[:3] == "A,b"
    with pytest.raises(mox.file.MoxFileNotExistsException):
        mox.file.File(f"{bucket.url}/none", "r")


def test_copy_moves_one_file_in_any_direction(bucket: Bucket, tmp_path: Path):
    (tmp_path / "f").write_text("F")

    mox.file.copy(str(tmp_path / "f"), f"{bucket.url}/f")
    mox.file.copy(f"{bucket.url}/f", f"s3://{bucket.name}/g")
    mox.file.copy(f"{bucket.url}/g", str(tmp_path / "h"))
    mox.file.rename(f"{bucket.url}/g", str(tmp_path / "i"))

    assert files(tmp_path) == {"f": "F", "h": "F", "i": "F"}
    assert bucket.contents() == {"f": "F"}
    with pytest.raises(mox.file.MoxFileNotExistsException):
        mox.file.copy(f"{bucket.url}/g", str(tmp_path / "j"))
    with pytest.raises(NotADirectoryError):
        mox.file.copy(f"{bucket.url}/f", str(tmp_path / "f" / "below a file"))


# -- folders --------------------------------------------------------------------------------------


def test_files_and_folders_are_looked_up(bucket: Bucket):
    bucket.put(d__a="123", d__s__b="4567", other="")
    top = f"{bucket.url}/d"

    assert [mox.file.exists(url) for url in (top, f"{top}/", f"{top}/a", f"{top}/none")] == [
        True,
        True,
        True,
        False,
    ]
    assert [mox.file.is_directory(url) for url in (top, f"{top}/a", bucket.url)] == [
        True,
        False,
        True,
    ]
    assert sorted(mox.file.list_directory(top)) == ["a", "s"]
    assert mox.file.list_directory(f"{top}/", recursive=True) == ["a", "s", "s/b"]
    assert mox.file.list_directory(top, skip_file=True, remove_sep=False) == ["s/"]
    assert mox.file.glob(f"{bucket.url}/*/*/b") == [f"{top}/s/b"]
    assert mox.file.glob(f"{top}/?") == [f"{top}/a", f"{top}/s"]
    assert list(mox.file.walk(top)) == [(top, ["s"], ["a"]), (f"{top}/s", [], ["b"])]
    assert [root for root, _, _ in mox.file.walk(top, topdown=False)] == [f"{top}/s", top]
    walk = mox.file.walk(top)
    next(walk)[1].clear()
    assert list(walk) == []
    assert [entry.path for entry in mox.file.scan_dir(top) if entry.is_file()] == [f"{top}/a"]
    assert mox.file.get_size(top) == 0
    assert mox.file.get_size(top, recursive=True) == 7
    assert mox.file.stat(f"{top}/a").length == 3
    assert mox.file.stat(top).is_directory
    for function in (mox.file.stat, mox.file.list_directory, mox.file.get_size):
        with pytest.raises(mox.file.MoxFileNotExistsException):
            function(f"{top}/none")


def test_folders_are_made_and_removed(bucket: Bucket):
    bucket.put(keep="K", d__a="A", d__s__b="B", d2="2")

    mox.file.make_dirs(f"{bucket.url}/new/sub")
    mox.file.mk_dir(f"{bucket.url}/new/sub2")
    assert sorted(mox.file.list_directory(f"{bucket.url}/new")) == ["sub", "sub2"]
    with pytest.raises(OSError, match="does not exist"):
        mox.file.mk_dir(f"{bucket.url}/none/sub")
    mox.file.remove(f"{bucket.url}/d")  # documented to do nothing
    mox.file.remove(f"{bucket.url}/none")
    assert mox.file.exists(f"{bucket.url}/d/s/b")
    mox.file.remove(f"{bucket.url}/d", recursive=True)
    mox.file.remove(f"{bucket.url}/new/", recursive=True)
    mox.file.remove(f"{bucket.url}/keep")

    assert bucket.contents() == {"d2": "2"}


def test_a_folder_is_renamed(bucket: Bucket, tmp_path: Path):
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "1").write_text("one")

    mox.file.rename(str(tmp_path / "ckpt"), f"{bucket.url}/ckpt")
    mox.file.rename(f"{bucket.url}/ckpt", f"{bucket.url}/final")

    assert files(tmp_path) == {}
    assert bucket.contents() == {"final/1": "one"}


def test_set_auth_replaces_keys_and_server(bucket: Bucket, server: Server, monkeypatch):
    bucket.put(a="A")
    monkeypatch.setenv("S3_ENDPOINT", "https://obs.cn-north-4.myhuaweicloud.com")
    monkeypatch.setenv("SECRET_ACCESS_KEY", "wrong")

    mox.file.set_auth(
        ak=ACCESS_KEY, sk=SECRET_KEY, server="127.0.0.1", port=server.port, is_secure=False
    )

    assert mox.file.read(f"{bucket.url}/a") == "A"


@pytest.mark.parametrize("name", ["a?b", "a%20b", "ü x", "#h", "a+b&c", "it's", "*star", " end "])
def test_any_name_can_be_written_read_and_copied(bucket: Bucket, tmp_path: Path, name: str):
    mox.file.write(f"{bucket.url}/d/{name}", name)
    mox.file.copy_parallel(f"{bucket.url}/d", str(tmp_path))

    assert mox.file.read(f"{bucket.url}/d/{name}") == name
    assert files(tmp_path) == {name: name}


def test_an_empty_address_or_a_folder_is_refused_as_a_file(
    bucket: Bucket, tmp_path: Path, monkeypatch
):
    """An empty address does not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep").write_text("")
    for call in (
        lambda: mox.file.remove("", recursive=True),
        lambda: mox.file.copy_parallel("", f"{bucket.url}/out"),
        lambda: mox.file.stat(""),
    ):
        with pytest.raises(mox.file.MoxFileNotExistsException):
            call()
    with pytest.raises(IsADirectoryError):
        mox.file.write(f"{bucket.url}/folder/", "text")

    assert files(tmp_path) == {"keep": ""}
    assert bucket.contents() == {}


# -- how scripts import it ------------------------------------------------------------------------


def run(
    code: str, *path: Path, cwd: Path = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python as on an emulated node, with ``path`` as PYTHONPATH."""
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, path)), **environ}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=kept,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_shift_lets_pythons_own_functions_take_addresses(bucket: Bucket, platform, tmp_path: Path):
    bucket.put(d__a="A", d__s__b="B")
    code = f"""
import glob, os, shutil, sys
import moxing as mox
mox.file.shift('os', 'mox')
top = {bucket.url!r} + '/d'
assert sorted(os.listdir(top)) == ['a', 's']
assert open(top + '/a').read() == 'A'
with open(top + '/new', 'w', encoding='ascii') as file:
    print('text', file=file)
assert os.path.exists(top + '/new') and os.path.isdir(top) and os.path.getsize(top + '/new') == 5
assert os.stat(top + '/new').st_size == 5
assert glob.glob(top + '/n*') == [top + '/new']
assert [root for root, _, _ in os.walk(top)] == [top, top + '/s']
with os.scandir(top) as entries:
    assert sorted(entry.name for entry in entries) == ['a', 'new', 's']
os.makedirs(top + '/m', exist_ok=True)
os.mkdir(top + '/m/n')
os.rename(top + '/new', top + '/m/moved')
os.remove(top + '/a')
shutil.copytree(top, 'local')
shutil.copyfile('local/m/moved', top + '/copy')
shutil.rmtree(top + '/s')
os.makedirs('deep/er', mode=0o700, exist_ok=True)
shutil.copytree('local', 'again')
with open('plain', 'x', buffering=1) as file:
    file.write(open(top + '/copy').read())
assert sorted(os.listdir('.')) == ['again', 'deep', 'local', 'plain']
assert len(list(os.walk('.'))) > 5
os.remove('plain'); shutil.rmtree('deep')
"""
    done = run(code, EMULATED, MOX_SILENT_MODE="1", cwd=tmp_path, **platform)

    assert (done.returncode, done.stderr) == (0, "")
    contents = bucket.contents()
    assert {key for key in contents if not key.endswith("/")} == {"d/copy", "d/m/moved"}
    assert files(tmp_path / "again") == {"m/moved": "text\n", "s/b": "B"}


def test_a_forked_child_does_not_share_its_parents_connections(
    bucket: Bucket, platform: dict[str, str]
):
    bucket.put(**{f"f{number}": str(number) for number in range(8)})
    code = f"""
        import os, sys
        import moxing as mox
        mox.file.read("{bucket.url}/f0")
        children = []
        for number in range(4):
            child = os.fork()
            if not child:
                indices = range(number, number + 5)
                texts = [mox.file.read(f"{bucket.url}/f{{index}}") for index in indices]
                sys.exit(texts != [str(index) for index in indices])
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
    """

    done = run(textwrap.dedent(code), EMULATED, MOX_SILENT_MODE="1", **platform)

    assert (done.stdout, done.stderr) == ("[0, 0, 0, 0]\n", "")


@pytest.mark.parametrize(
    "code",
    [
        "import moxing as mox; mox.file.exists",
        "import moxing.file; moxing.file.File",
        "from moxing.framework import file; file.copy_parallel",
        "import moxing.framework.file as f; f.MoxFileNotExistsException",
        "from moxing.framework.file import file_io; file_io._LARGE_FILE_TASK_NUM = 1",
        "import moxing as mox; mox.file.file_io._NUMBER_OF_PROCESSES = 1",
        "import moxing.tensorflow as mox; mox.file.exists",
        "import moxing.mxnet as mox; mox.file.exists",
    ],
)
def test_every_documented_import_works(code: str):
    done = run(code, EMULATED, MOX_SILENT_MODE="1")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_silent_mode_hides_the_line_at_the_import(tmp_path: Path):
    assert "INFO:root:Using" in run("import moxing", EMULATED).stderr


@pytest.mark.parametrize("is_first", [True, False])
def test_a_real_moxing_takes_precedence(tmp_path: Path, is_first: bool):
    """Even if it comes later, as installed packages do after the folders in ``PYTHONPATH``."""
    real = tmp_path / "real"
    (real / "moxing" / "file").mkdir(parents=True)
    (real / "moxing" / "__init__.py").write_text("from moxing import file\nreal = True\n")
    (real / "moxing" / "file" / "__init__.py").write_text("def copy_parallel(): pass\n")
    (tmp_path / "data" / "moxing").mkdir(parents=True)
    path = [real, EMULATED] if is_first else [tmp_path / "data", EMULATED, real]

    done = run("import moxing.file; assert moxing.real; moxing.file.copy_parallel()", *path)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_archive_of_the_entry_is_enough(tmp_path: Path):
    """Another interpreter of the image imports moxing from it, and ``sys.path`` is unchanged."""
    archive = tmp_path / "jobentry.pyz"
    build = [sys.executable, ROOT / "scripts" / "build_zipapp.py", archive]
    subprocess.run(build, check=True)
    code = (
        "import sys; before = list(sys.path); import moxing.file; assert sys.path == before;"
        f"moxing.file.copy_parallel({str(ROOT / 'configs')!r}, {str(tmp_path / 'out')!r})"
    )

    done = run(code, archive / "emulated", MOX_SILENT_MODE="1")

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").is_dir()


def test_all_names_of_the_vendors_api_exist():
    names: list[Any] = [getattr(mox.file, name) for name in mox.file.__all__]

    assert len(names) >= 25
    assert file_io.File is mox.file.File
