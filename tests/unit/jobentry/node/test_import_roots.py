"""Python on a node imports the package, wherever an editable install leads to the source."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from jobentry.node import import_roots

# What setuptools, and the package editables, put into an environment for an editable install.
SETUPTOOLS = """
import sys
MAPPING = {mapping!r}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        from importlib.util import spec_from_file_location
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")
sys.meta_path.append(Finder)
"""
EDITABLES = """
import sys
class Finder:
    _redirections = {mapping!r}
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        from importlib.util import spec_from_file_location
        if name in cls._redirections:
            return spec_from_file_location(name, cls._redirections[name])
sys.meta_path.append(Finder)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source with a package in ``src`` and one at the top, and the unpacked package beside it."""
    for top in ("source", "code"):
        for name in ("src/inner", "outer"):
            (tmp_path / top / name).mkdir(parents=True)
            (tmp_path / top / name / "__init__.py").write_text(f"where = {top!r}\n")
    return tmp_path / "source"


def environment(folder: Path, finder: str = "", path: str = "") -> dict[str, str]:
    """An environment of ranks whose Python has a finder of an editable install."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(finder)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, [path, str(site)])),
    }


def imported(environ: dict[str, str], source: Path) -> str:
    """Import both packages as a rank would; return where they came from."""
    path = import_roots.python_path(
        sys.executable, environ, str(source), str(source.parent / "code")
    )
    argv = [sys.executable, "-c", "import inner, outer; print(inner.where, outer.where)"]
    done = subprocess.run(
        argv, env={**environ, "PYTHONPATH": path}, cwd="/", capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def test_a_folder_of_the_source_on_the_path_is_replaced(source: Path, tmp_path: Path):
    """As a ``.pth`` file of hatchling, uv or setuptools adds it, or the user's PYTHONPATH."""
    environ = environment(tmp_path, path=f"{source}/src:{source}")

    assert imported(environ, source) == "code code"


@pytest.mark.parametrize(
    ("finder", "end"),
    [(SETUPTOOLS, ""), (EDITABLES, "/__init__.py")],
    ids=["setuptools", "editables"],
)
def test_a_finder_of_an_editable_install_is_overruled(
    source: Path, tmp_path: Path, finder: str, end: str
):
    mapping = {"inner": f"{source}/src/inner{end}", "outer": f"{source}/outer{end}"}

    assert imported(environment(tmp_path, finder.format(mapping=mapping)), source) == "code code"


def test_what_cannot_be_imported_from_the_package_is_named(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A package with another name than its folder, and a folder that was not packed."""
    (source / "left-out").mkdir()
    finder = SETUPTOOLS.format(mapping={"renamed": f"{source}/outer"})
    environ = environment(tmp_path, finder, path=f"{source}/left-out")

    path = import_roots.python_path(sys.executable, environ, str(source), str(tmp_path / "code"))

    assert path == environ["PYTHONPATH"]
    output = "".join(capfd.readouterr())
    assert f"Python imports {source}/outer, which is not in the job's package" in output
    assert f"Python imports {source}/left-out, which is not in the job's package" in output


def test_a_virtual_environment_inside_the_source_is_not_named(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """As in the tutorial, where ``python3 -m venv .venv`` makes it beside the script."""
    venv.create(source / ".venv", symlinks=True)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source)}

    python = str(source / ".venv" / "bin" / "python")
    path = import_roots.python_path(python, environ, str(source), str(tmp_path / "code"))

    assert path == f"{tmp_path}/code:{source}"
    assert "".join(capfd.readouterr()) == ""


def test_nothing_changes_for_a_python_that_cannot_start(source: Path):
    assert import_roots.python_path("/no/python", {}, str(source), "/code") == ""
