"""The bytecode of the container half, which starts faster than the zipapp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", *words]
    return subprocess.run(
        argv, check=False, capture_output=True, text=True, env={**os.environ, **env}
    )


@pytest.fixture
def copy(zipapp: str, tmp_path: Path) -> Path:
    """A zipapp of one's own."""
    path = tmp_path / "lib" / "jobentry.pyz"
    path.parent.mkdir()
    path.write_bytes(Path(zipapp).read_bytes())
    return path


@pytest.fixture
def compiled(copy: Path) -> Path:
    """Its bytecode."""
    path = copy.with_suffix(".pyc")
    made = _run(copy, "--compile", path)
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    return path


def test_bytecode_does_what_the_zipapp_does(copy: Path, compiled: Path):
    """Also when it is named by a relative path, and when the zipapp is gone."""
    expected = _run(copy, "--help")
    assert expected.stdout.startswith("usage: jobentry")

    assert _run(compiled, "--help").stdout == expected.stdout
    assert _run(os.path.relpath(compiled), "--help").stdout == expected.stdout
    copy.unlink()
    assert _run(compiled, "--help").stdout == expected.stdout


def test_both_are_moved_together(copy: Path, compiled: Path, tmp_path: Path):
    """As a folder that one image copies from another is."""
    folder = copy.parent.rename(tmp_path / "moved")

    shown = _run(folder / compiled.name, "--rank", "--", "/no/such/program")

    assert shown.returncode == 127
    assert shown.stderr == "jobentry: starting /no/such/program: not found on PATH\n"


def test_another_zipapp_was_laid_over_it(copy: Path, compiled: Path, zipapp: str):
    """As on an image of another version: the halves of a job must be of one."""
    script = Path(__file__).parents[2] / "scripts" / "build_zipapp.py"
    code = (
        "import runpy, sys\n"
        "build = runpy.run_path(sys.argv[1])\n"
        "bare = build['bare']\n"
        "changed = lambda text: bare(text).replace('usage: jobentry', 'usage: another ')\n"
        "build['zipapp'].__globals__['bare'] = changed\n"
        "open(sys.argv[2], 'wb').write(build['zipapp'](build['ROOT'] / 'entrypoints'))\n"
    )
    subprocess.run([sys.executable, "-c", code, script, copy], check=True)

    assert _run(copy, "--help").stdout.startswith("usage: another ")
    assert _run(compiled, "--help").stdout.startswith("usage: another ")


def test_a_script_finds_nothing_of_ours(compiled: Path, tmp_path: Path):
    """Modules, the first place of the path, what a traceback shows: all is as Python has it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "ours = [name for name in sys.modules if name.partition('.')[0] == 'jobentry']\n"
        "print(json.dumps([ours, sys.path[0], sys.argv, __name__, __file__]))\n"
        "raise ValueError('no')\n"
    )

    ended = subprocess.run(
        [sys.executable, compiled, "--script", script, "a b"],
        check=False,
        capture_output=True,
        text=True,
    )

    path = str(script)
    assert ended.stdout == f'[[], "{tmp_path}", ["{path}", "a b"], "__main__", "{path}"]\n'
    assert "jobentry" not in ended.stderr, ended.stderr
    assert ended.stderr.endswith("ValueError: no\n")


@pytest.mark.parametrize("kind", ["zipapp", "bytecode"])
def test_a_safe_path_stays_safe(copy: Path, compiled: Path, tmp_path: Path, kind: str):
    """PYTHONSAFEPATH keeps the script's folder off the path, where Python knows it."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(*sys.path, sep='\\n')\n")
    entry = copy if kind == "zipapp" else compiled
    env = {**os.environ, "PYTHONSAFEPATH": "1"}

    def path_of(*words: str | Path) -> str:
        argv = [sys.executable, *words]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout

    assert path_of(entry, "--script", script) == path_of(script)


def test_a_folder_that_is_not_there(zipapp: str, tmp_path: Path):
    """It says what is wrong, and fails."""
    target = tmp_path / "nowhere" / "jobentry.pyc"

    made = _run(zipapp, "--compile", target)

    assert made.returncode == 1
    assert made.stderr == f"jobentry: writing {target}: No such file or directory\n"
