"""Nodes have folders of their own: scripts that empty them remove no file of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import Cloud, Mpi

# Empties the folder for temporary files, and whatever else is private to a node.
EMPTY = """
import os, shutil
for folder in (os.environ["TMPDIR"], "/tmp", "/cache", "/dev/shm"):
    for name in os.listdir(folder):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
print("left:", *(name for _, _, names in os.walk("/tmp") for name in names))
with open(os.environ["HOME"] + "/modelarts/outputs/MODEL_0/model.pt", "w") as file:
    file.write("model")
"""


@pytest.fixture
def laptop(mpi: Mpi) -> Iterator[Cloud]:
    """A user whose project, data and state folder are below /tmp."""
    with tempfile.TemporaryDirectory(prefix="cj-user-", dir="/tmp") as folder:
        value = Cloud(Path(folder), mpi)
        yield value
        assert not value.kill_remaining()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a user, without those of cloudjob and those that tests write."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] in ("data", "out", "source", "user")
    }


def test_a_script_that_empties_its_tmpdir_removes_no_file_of_the_user(laptop: Cloud):
    laptop.write("train.py", EMPTY)
    for name in ("data/train.csv", "data/deep/folder/x", "out/earlier.pt", "user/notes"):
        (laptop.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (laptop.folder / name).write_text("precious")
    before = contents(laptop.folder)
    folder = laptop.folder
    jobs = [
        laptop.submit(
            "--launcher=python",
            f"--input=DATA=file://{folder}/data",
            f"--output=MODEL=file://{folder}/{out}",
            "-e",
            f"CONFIG={folder}/user/notes",
            "train.py",
            f"--data={folder}/data",
            f"--store={laptop.home}",
        )
        for out in ("out", "out/new")
    ]

    for done in jobs:
        assert done.code == 0, done
        assert b"left: notes\n" in done.out
        # The store is below /tmp, too.
        assert laptop.status(done.job)["state"] == "SUCCEEDED"
        assert laptop.cli("logs", done.job).out == done.out
    after = contents(laptop.folder)
    written = {name for name in after if ".cloudjob-outputs" not in name} - set(before)
    assert written == {"out/model.pt", "out/new/model.pt"}
    assert {name: after[name] for name in before} == before


def test_a_script_learns_that_its_node_has_a_version_of_a_named_folder(laptop: Cloud):
    """It writes to a folder that the command line names, and the user looks for the file there."""
    (laptop.folder / "runs").mkdir()
    laptop.write("train.py", "import sys\nopen(sys.argv[1] + '/log.csv', 'w').write('1')\n")

    done = laptop.submit("--launcher=python", "train.py", f"{laptop.folder}/runs")

    assert done.code == 0, done
    assert list((laptop.folder / "runs").iterdir()) == []
    assert f"{laptop.folder}/runs/log.csv was written on ma-job-".encode() in done.err, done
    assert b"--output" in done.err


def test_the_cache_of_inputs_is_used_where_it_is_below_tmp(laptop: Cloud):
    (laptop.folder / "data").mkdir()
    (laptop.folder / "data/x").write_text("x")
    laptop.write("train.py", "import os\nprint(open(os.environ['DATA'] + '/x').read())\n")
    options = ("--launcher=python", f"--input=DATA=file://{laptop.folder}/data", "train.py")
    first = laptop.submit(*options)
    [cached] = (laptop.home / "cache").glob("*/*")
    facts = cached.stat()
    cached.chmod(0o600)
    cached.write_text("y")
    os.utime(cached, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    second = laptop.submit(*options)

    assert (first.lines, second.lines) == ([b"[0] x"], [b"[0] y"]), (first, second)


def test_an_input_has_the_files_beside_it_to_which_its_links_lead(laptop: Cloud):
    laptop.write(
        "train.py",
        "import os\n"
        "for folder, _, names in sorted(os.walk(os.environ['DATA'])):\n"
        "    for name in sorted(names):\n"
        "        print('file', os.path.relpath(os.path.join(folder, name), os.environ['DATA']))\n",
    )
    (laptop.folder / "other" / "deep").mkdir(parents=True)
    (laptop.folder / "other" / "deep" / "a").write_text("a")
    (laptop.folder / "data" / "sub").mkdir(parents=True)
    (laptop.folder / "data" / "file").symlink_to("../other/deep/a")
    (laptop.folder / "data" / "sub" / "folder").symlink_to("../../other/deep")

    done = laptop.submit(
        "--launcher=python", f"--input=DATA=file://{laptop.folder}/data", "train.py"
    )

    assert done.lines == [b"[0] file file", b"[0] file sub/folder/a"], done


def test_a_program_that_a_script_starts_finds_moxing(laptop: Cloud):
    """The entry has another path on the node, as the state folder is below /tmp."""
    laptop.write("train.py", "import os\nassert not os.system('python -c \"import moxing\"')\n")

    done = laptop.submit("--launcher=python", "train.py")

    assert done.code == 0, done
