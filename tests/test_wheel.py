"""The wheel installs into a fresh environment, and each extra brings what its modules import."""

from __future__ import annotations

import ast
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_architecture import imported

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("cloudjob", "entrypoints", "scripts", "images", "docs", "pyproject.toml", "README.md",
           "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "configs", "examples")  # fmt: skip
# Files and folders of cloudjob, and the extra that they need; all others must do without.
EXTRAS = {
    "backends/docker": "docker",
    "backends/delivery.py": "docker",
    "backends/kubernetes": "kubernetes",
    "backends/modelarts": "modelarts",
    "cli/console.py": "console",
    "console": "console",
    "emulator": "emulator",
    "machine/images.py": "docker",
    "store/s3": "s3",
}
# Commands that need an extra.
COMMANDS = {
    "console": ("console",),
    "docker": ("doctor", "--backend", "docker"),
    "emulator": ("emulator", "up"),
    "kubernetes": ("doctor", "--backend", "kubernetes"),
    "modelarts": ("doctor", "--backend", "modelarts"),
    "s3": ("doctor", "--store", "s3://bucket"),
}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: x, user: x}}]
clusters: [{name: x, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: x, user: {token: t}}]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the project; the first of several workers builds it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    copy = folder / "project"
    with (folder / "project.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return next((copy / "dist").glob("*.whl"), None) or _built(copy)


def _built(copy: Path) -> Path:
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyz")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", copy / "dist", copy)
    return next((copy / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, installed by pip, and what it needs without any extra."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    _run(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
    _link(_needed(folder, ()), folder)
    return folder


def test_the_wheel_alone_runs_a_job(bare: Path, tmp_path: Path):
    (tmp_path / "hello.py").write_text("print('hello')")
    done = _cloudjob(bare, tmp_path, "submit", "--launcher", "python", "hello.py")

    assert (done.returncode, done.stdout) == (0, "[0] hello\n"), done.stderr


@pytest.mark.parametrize("extra", COMMANDS)
def test_a_command_whose_extra_is_missing_names_it(extra: str, bare: Path, tmp_path: Path):
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    done = _cloudjob(bare, tmp_path, *COMMANDS[extra])
    shown = done.stdout + done.stderr

    assert f"pip install 'cloudjob[{extra}]'" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("extra", ["", *sorted(set(EXTRAS.values()))])
def test_an_extra_brings_all_that_its_modules_import(extra: str, wheel: Path, tmp_path: Path):
    folder = tmp_path / "env"
    venv.create(folder)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(_site(folder))
    _link(_needed(folder, (extra,)), folder)
    names = sorted(set(_imports(extra)))
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"

    assert "cloudjob.errors" in names
    _run(folder / "bin" / "python", "-I", "-W", "ignore", "-c", code)


def _imports(extra: str) -> Iterator[str]:
    for path in (ROOT / "cloudjob").rglob("*.py"):
        name = path.relative_to(ROOT / "cloudjob").as_posix()
        needed = next((EXTRAS[part] for part in EXTRAS if name.startswith(part)), "")
        if needed == extra:
            # The names of a package that is imported from may be modules, or not.
            found = imported(ast.parse(path.read_bytes()))
            yield from (module for module in found if module != "__future__")


def _needed(folder: Path, extras: Sequence[str]) -> list[Distribution]:
    """Return the distributions, among those of the tests, that the wheel and its extras need."""
    own = PathDistribution(next(_site(folder).glob("cloudjob-*.dist-info")))
    found: dict[tuple[str, str], Distribution] = {}

    def add(dist: Distribution, extra: str) -> None:
        name = canonicalize_name(dist.metadata["Name"])
        if (name, extra) in found:
            return
        found[name, extra] = dist
        for text in dist.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                other = own if needed.name == "cloudjob" else distribution(needed.name)
                for each in ("", *needed.extras):
                    add(other, each)

    for extra in ("", *extras):
        add(own, extra)
    return [dist for (name, _), dist in found.items() if name != "cloudjob"]


def _link(dists: list[Distribution], folder: Path) -> None:
    """Make distributions of the tests' environment a part of another one."""
    names = {Path(str(file)).parts[0] for dist in dists for file in dist.files or ()}
    for name in names - {"..", "__pycache__"}:
        source = Path(sysconfig.get_paths()["purelib"], name)
        if source.exists():
            (_site(folder) / name).symlink_to(source)


def _site(folder: Path) -> Path:
    return next((folder / "lib").glob("python*/site-packages"))


def _cloudjob(env: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "CLOUDJOB_HOME": str(folder / "state"),
        "KUBECONFIG": str(folder / "kubeconfig"),
    }
    return subprocess.run(
        [env / "bin" / "cloudjob", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def _run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
