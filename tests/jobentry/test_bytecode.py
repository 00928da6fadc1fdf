"""The copy of the zipapp that starts faster."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", *words]
    return subprocess.run(argv, check=False, capture_output=True, text=True)


def test_a_copy_holds_bytecode_and_works(zipapp: str, tmp_path: Path):
    """An image makes it in the place of the original, and its build stops when that fails."""
    copy = tmp_path / "jobentry.pyz"
    copy.write_bytes(Path(zipapp).read_bytes())

    made = _run(str(copy), "--compile", str(copy))

    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    assert "jobentry/main.pyc" in zipfile.ZipFile(copy).namelist()
    assert _run(str(copy), "--help").stdout == _run(zipapp, "--help").stdout


def test_a_folder_that_is_not_there(zipapp: str, tmp_path: Path):
    """It says what is wrong, and fails."""
    target = tmp_path / "nowhere" / "jobentry.pyz"

    made = _run(zipapp, "--compile", str(target))

    assert made.returncode == 1
    assert made.stderr == f"jobentry: writing {target}: No such file or directory\n"
