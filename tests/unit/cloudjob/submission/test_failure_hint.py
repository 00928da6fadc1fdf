"""A failed job says what this machine knows: files, modules and variables that the nodes lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.model.status import Failure
from cloudjob.submission import failure_hint


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in a project of a home folder; ``lib`` is ignored."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "project" / "source"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "__init__.py").touch()
    (folder / "local.py").touch()
    (folder / "train.py").touch()
    (folder / ".gitignore").write_text("lib/\nlocal.py\n")
    (folder.parent / "data.csv").touch()
    (tmp_path / "home" / "all.csv").touch()
    (tmp_path / "elsewhere.csv").touch()
    return folder


def spec_of(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the description of a job of this source, in containers."""
    return {"source": str(folder), "backend": "docker", "image": "img:1", "env": {}} | more


def missing(path: str) -> Failure:
    """Return the failure of a script that does not find a file."""
    return Failure(message=f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'")


# -- files outside the source ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["{home}/all.csv", "{home}/project/data.csv", "../data.csv"])
def test_a_file_that_only_this_machine_has_is_named(source: Path, path: str):
    path = path.format(home=source.parents[1])

    assert failure_hint.hint(spec_of(source), missing(path)) == (
        f"{path} is on this machine, but outside the folder that was sent, {source}: copy it there,"
        " or put it into a store and pass it with --input"
    )


@pytest.mark.parametrize(
    "path",
    ["{home}/none.csv", "../none.csv", "/etc/passwd", "{home}/../elsewhere.csv", "train.py", "\0"],
)
def test_other_missing_files_have_no_hint(source: Path, path: str):
    path = path.format(home=source.parents[1])

    assert failure_hint.hint(spec_of(source), missing(path)) == ""


def test_emulated_nodes_see_the_files_of_this_machine(source: Path):
    spec = spec_of(source, backend="process", image="")

    assert failure_hint.hint(spec, missing("../data.csv")) == ""


# -- modules --------------------------------------------------------------------------------------


def no_module(name: str) -> Failure:
    """Return the failure of a script that imports a module which its Python lacks."""
    return Failure(
        message="exit code 1",
        last_lines=(f"ModuleNotFoundError: No module named '{name}' (Python: /usr/bin/python3)",),
    )


@pytest.mark.parametrize(("module", "path"), [("lib.data", "lib"), ("local", "local.py")])
def test_a_module_of_the_source_that_was_left_out_is_named(source: Path, module: str, path: str):
    text = failure_hint.hint(spec_of(source), no_module(module))

    assert text.startswith(f"{path} is not in the package: left out by .gitignore:")


def test_a_python_without_its_library_is_not_told_to_install_it(source: Path):
    assert "PYTHONHOME" in failure_hint.hint(spec_of(source), no_module("encodings"))


@pytest.mark.parametrize(
    ("name", "text", "module"),
    [
        ("requirements.txt", "numpy\ntorch==2.3  # CPU\n", "torch"),
        ("requirements.txt", "scikit_learn[all]>=1\n", "sklearn"),
        ("requirements.txt", "PyYAML\n", "yaml"),
        ("pyproject.toml", 'dependencies = [\n  "torch>=2",\n]\n', "torch.nn"),
        ("environment.yml", "dependencies:\n  - torch=2.3\n", "torch"),
    ],
)
def test_requirements_that_list_the_module_are_named(
    source: Path, name: str, text: str, module: str
):
    (source / name).write_text(text)
    top = module.partition(".")[0]

    assert failure_hint.hint(spec_of(source), no_module(module)) == (
        f"{name} lists {top}, but cloudjob installs nothing: the image img:1 must have it"
    )


@pytest.mark.parametrize("text", ["torchvision\n", "# torch\n", "my-torch\n", "torch-geometric\n"])
def test_requirements_without_the_module_are_not_named(source: Path, text: str):
    (source / "requirements.txt").write_text(text)

    assert failure_hint.hint(spec_of(source, backend="process", image=""), no_module("torch")) == (
        "cloudjob installs nothing: the Python that runs the script (of the active environment, or"
        " process.python) must have torch"
    )


def test_requirements_that_are_no_plain_file_are_not_read(source: Path):
    (source / "requirements.txt").symlink_to("/dev/zero")

    assert "installs nothing" in failure_hint.hint(spec_of(source), no_module("torch"))


# -- variables ------------------------------------------------------------------------------------

TRACEBACKS = {
    "3.8": ('  File "/usr/lib/python3.8/os.py", line 675, in __getitem__',),
    "3.13": ('  File "<frozen os>", line 716, in __getitem__',),
    "source": ("    print(os.environ['DATA_DIR'])",),
}


def no_variable(name: str, lines: tuple[str, ...] = TRACEBACKS["3.13"]) -> Failure:
    """Return the failure of a script that reads a variable which is not set."""
    return Failure(message=f"KeyError: '{name}'", last_lines=lines)


@pytest.mark.parametrize("lines", TRACEBACKS.values(), ids=TRACEBACKS)
def test_a_variable_that_is_set_only_here_is_named_without_its_value(
    source: Path, lines: tuple[str, ...]
):
    environ = {"DATA_DIR": "/the/value"}

    assert failure_hint.hint(spec_of(source), no_variable("DATA_DIR", lines), environ) == (
        "DATA_DIR is set in this shell, and a job gets only what it is given: add -e"
        ' DATA_DIR="$DATA_DIR"'
    )


@pytest.mark.parametrize(
    ("name", "environ", "text"),
    [
        ("MY_TOKEN", {"MY_TOKEN": "v"}, "MY_TOKEN is set in this shell, and a job gets only what"
         " it is given: add --secret MY_TOKEN"),
        ("MY_TOKEN", {}, "the job has no variable MY_TOKEN: set it in your shell, and add --secret"
         " MY_TOKEN"),
        ("DATA_DIR", {}, "the job has no variable DATA_DIR: -e DATA_DIR=VALUE sets it"),
    ],
)  # fmt: skip
def test_the_hint_depends_on_the_name_and_on_this_shell(
    source: Path, name: str, environ: dict[str, str], text: str
):
    assert failure_hint.hint(spec_of(source), no_variable(name), environ) == text


@pytest.mark.parametrize(
    ("more", "failure"),
    [
        ({}, Failure(message="KeyError: 'DATA_DIR'", last_lines=("    row['DATA_DIR']",))),
        ({}, Failure(message="KeyError: 3", last_lines=TRACEBACKS["3.13"])),
        ({"env": {"DATA_DIR": "x"}}, no_variable("DATA_DIR")),
        ({"secrets": {"DATA_DIR": ""}}, no_variable("DATA_DIR")),
        ({"inputs": {"DATA_DIR": "s3://b/x"}}, no_variable("DATA_DIR")),
        ({"source": ""}, no_variable("DATA_DIR")),
    ],
)
def test_other_keys_have_no_hint(source: Path, more: dict[str, Any], failure: Failure):
    assert failure_hint.hint(spec_of(source, **more), failure, {"DATA_DIR": "x"}) == ""


# -- what nodes may write -------------------------------------------------------------------------


@given(st.text(max_size=200), st.lists(st.text(max_size=200), max_size=5))
def test_any_failure_can_be_explained(message: str, lines: list[str]):
    spec = {"source": "/no/such/folder", "backend": "docker"}

    failure_hint.hint(spec, Failure(message=message, last_lines=tuple(lines)), {})
    failure_hint.hint(spec, Failure(message=f"No such file or directory: '{message}'"), {})
