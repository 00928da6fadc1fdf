"""The archive of the node half, and its unpacked files, which start faster."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BOOT = Path(__file__).parents[3] / "entrypoints" / "boot.sh"


def _run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=False, capture_output=True, text=True)


@pytest.fixture
def unpacked(zipapp: str, tmp_path: Path) -> Path:
    folder = tmp_path / "opt" / "jobentry"
    folder.parent.mkdir()
    result = _run(sys.executable, "-I", "-S", zipapp, "--unpack", folder)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


def test_unpacked_files_work_like_the_archive(zipapp: str, unpacked: Path):
    expected = _run(sys.executable, "-I", "-S", zipapp, "--help")
    assert expected.stdout.startswith("usage: jobentry")

    assert _run(sys.executable, "-I", "-S", unpacked, "--help").stdout == expected.stdout
    assert (unpacked / "jobentry" / "__pycache__").is_dir()


def test_unpacked_files_can_be_moved(unpacked: Path, tmp_path: Path):
    """An image may copy them from another image."""
    folder = unpacked.rename(tmp_path / "moved")

    ended = _run(sys.executable, folder, "--rank", "--", "/no/such/program")

    assert ended.returncode == 127
    assert ended.stderr == "jobentry: starting /no/such/program: not found on PATH\n"


def test_unpacking_replaces_an_older_version(zipapp: str, unpacked: Path):
    (unpacked / "old.py").touch()

    _run(sys.executable, zipapp, "--unpack", unpacked)

    assert not (unpacked / "old.py").exists()
    assert _run(sys.executable, unpacked, "--help").returncode == 0


def test_an_image_starts_unpacked_files_only_of_the_same_version(zipapp: str, unpacked: Path):
    """If the archive in the image was replaced, its unpacked files are out of date."""
    shutil.copy(BOOT, unpacked.parent)
    shutil.copy(zipapp, unpacked.parent / "jobentry.pyz")
    (unpacked / "__main__.py").write_text("print('unpacked')")
    boot = unpacked.parent / "boot.sh"

    assert _run("sh", boot, "--help").stdout == "unpacked\n"
    with (unpacked.parent / "jobentry.pyz").open("ab") as file:
        file.write(b"\n")
    assert _run("sh", boot, "--help").stdout.startswith("usage: jobentry")


def test_a_script_sees_nothing_of_the_entry(unpacked: Path, tmp_path: Path):
    """Modules, the path and tracebacks are as if Python had started the script."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "ours = [name for name in sys.modules if name.partition('.')[0] == 'jobentry']\n"
        "print(json.dumps([ours, sys.path[0], sys.argv, __name__, __file__]))\n"
        "raise ValueError('no')\n"
    )

    ended = _run(sys.executable, unpacked, "--script", script, "a b")

    path = str(script)
    assert ended.stdout == f'[[], "{tmp_path}", ["{path}", "a b"], "__main__", "{path}"]\n'
    assert "jobentry" not in ended.stderr, ended.stderr
    assert ended.stderr.endswith("ValueError: no\n")


@pytest.mark.parametrize("kind", ["archive", "folder"])
def test_a_safe_path_stays_safe(zipapp: str, unpacked: Path, tmp_path: Path, kind: str):
    """PYTHONSAFEPATH keeps the script's folder off sys.path, if this Python supports it."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(*sys.path, sep='\\n')\n")
    entry = zipapp if kind == "archive" else unpacked
    env = {**os.environ, "PYTHONSAFEPATH": "1"}

    def path_of(*args: str | Path) -> str:
        argv = [sys.executable, *args]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout

    assert path_of(entry, "--script", script) == path_of(script)


def test_unpacking_to_an_unwritable_folder_is_reported_in_one_line(zipapp: str):
    result = _run(sys.executable, zipapp, "--unpack", "/proc/nowhere")

    assert result.returncode == 1
    assert result.stderr.startswith("jobentry: unpacking to /proc/nowhere: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_variables_that_shells_cannot_name_are_left_out_and_reported(
    zipapp: str, tmp_path: Path, shell: str
):
    """Debian's sh drops them and bash does not; the ranks of both see the same."""
    (tmp_path / "opt").mkdir()
    shutil.copy(BOOT, tmp_path / "opt")
    shutil.copy(zipapp, tmp_path / "opt" / "jobentry.pyz")
    (tmp_path / "train.py").write_text("import os; print(sorted(os.environ))")
    environ = {
        "my.var": "1",
        "MY-VAR": "two\nlines.of=it",
        "9lives": "1",
        "GOOD": "1",
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MA_HOME": str(tmp_path),
        "CLOUDJOB_LAUNCHER": "python",
    }
    argv = [shell, tmp_path / "opt" / "boot.sh", "train.py"]
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done
    names = ast.literal_eval(done.stdout.partition(" ")[2])
    assert "GOOD" in names
    assert not {"my.var", "MY-VAR", "9lives", "CLOUDJOB_LEFT_OUT"} & set(names)
    assert done.stderr == (
        "jobentry: left out variables of the image: 9lives, MY-VAR, my.var: a name may have only"
        " letters, digits and _\n"
    )
