"""Ignore files in any folder work as in git; the tests compare the results with git's."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudjob.package import explain, scan

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is the judge here")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder for git, so that the settings of this host have no effect."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return folder


def write(path: Path, text: str = "") -> Path:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def git(folder: Path, *arguments: str) -> bytes:
    """Run git in a folder."""
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True).stdout


def added_by_git(folder: Path) -> set[str]:
    """Return the files that git would add."""
    listed = git(folder, "ls-files", "--others", "--exclude-standard", "-z")
    return {os.fsdecode(name) for name in listed.split(b"\0") if name}


def packed_by_cloudjob(folder: Path) -> set[str]:
    """Return the files that cloudjob would pack."""
    return {entry.name for entry in scan(folder).entries if entry.kind != "folder"}


segments = st.sampled_from(
    ["a", "b", "ab", "a.py", "b.log", "build", "foo", "x y", "-", "c#", "!d"]
)
patterns = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "", "", "!", "\\!", "#"]),
    st.sampled_from(["", "", "/", "**/"]),
    st.lists(
        segments | st.sampled_from(["*", "*.py", "*.log", "?", "[ab]", "[!a]", "a*", "**", "\\a"]),
        min_size=1,
        max_size=3,
    ).map("/".join),
    st.sampled_from(["", "", "/", "/*", "/**", " ", "\\ "]),
)
paths = st.lists(segments, min_size=1, max_size=4).map("/".join)


def test_invalid_and_pathological_patterns_are_harmless(tmp_path: Path):
    """An invalid range matches nothing, as in git."""
    lines = ["[z-a]", "*" + "a*" * 20 + "b", "**/a" * 20 + "/b", "*[b-a]*c"]
    write(tmp_path / ".gitignore", "\n".join([*lines, "*.log"]))
    write(tmp_path / "a.log")
    write(tmp_path / ("a" * 200))
    write(Path(tmp_path, *["a"] * 60, "c"))

    assert packed_by_cloudjob(tmp_path) == {".gitignore", "a" * 200, "a/" * 60 + "c"}


@needs_git
@given(
    files=st.lists(paths, min_size=1, max_size=12),
    top=st.lists(patterns, max_size=6),
    inner=st.dictionaries(paths, st.lists(patterns, max_size=3), max_size=2),
    info=st.lists(patterns, max_size=2),
    own=st.lists(patterns, max_size=2),
)
@example(["foo/a", "foo/keep"], ["foo/**", "!foo/keep"], {}, [], [])
@example(["foo/a", "foo/keep"], ["foo/", "!foo/keep"], {}, [], [])
@example(["a/b/a.py", "a/a.py"], ["*.py"], {"a": ["!a.py"]}, [], [])
@example(["foo/foo", "foo/a"], ["foo", "!/foo"], {}, [], [])
@example(["a", "foo/a", "foo/b/a"], ["*/"], {}, [], ["*/"])
@example(["a", "foo/a", "foo/b/a"], ["!foo/", "**/", "!foo/"], {}, [], [])
@example(["foo/a", "foo/b/a", "b/foo/b/a"], ["foo/**/"], {}, [], [])
@example(["foo/a", "foo/b/a"], ["**/b/**/"], {}, [], [])
@example(["foo/a", "a"], ["**/*/**"], {}, [], [])
def test_the_package_has_the_files_that_git_would_add(
    files: list[str],
    top: list[str],
    inner: dict[str, list[str]],
    info: list[str],
    own: list[str],
):
    """Random mixes of negation, nested .gitignore files, info/exclude and core.excludesFile."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "repository")
        folder.mkdir()
        git(folder, "init", "-q")
        for name in files:
            path = folder / name
            try:
                write(path)
            except OSError:
                continue  # its parent is a file
        ignore_files = {"": top, **{f"{name}/": lines for name, lines in inner.items()}}
        for parent, lines in ignore_files.items():
            if (folder / parent).is_dir():
                write(folder / parent / ".gitignore", "\n".join(lines) + "\n")
        write(folder / ".git" / "info" / "exclude", "\n".join(info) + "\n")
        excludes = write(Path(scratch, "own"), "\n".join(own) + "\n")
        git(folder, "config", "core.excludesFile", str(excludes))

        assert packed_by_cloudjob(folder) == added_by_git(folder)


@needs_git
def test_gitignore_files_above_the_source_apply_within_its_repository(tmp_path: Path):
    """A source is often a folder of a larger repository."""
    top = tmp_path / "top"
    git(tmp_path, "init", "-q", str(top))
    write(top / ".gitignore", "*.log\n/job/data/\n")
    write(top / "job" / ".gitignore", "!keep.log\n")
    for name in ("job/train.py", "job/a.log", "job/keep.log", "job/data/x", "job/deep/data/x"):
        write(top / name)

    assert packed_by_cloudjob(top / "job") == {"train.py", ".gitignore", "keep.log", "deep/data/x"}
    assert explain(top / "job", "a.log").rule == f"{top}/.gitignore:1: *.log"
    assert explain(top / "job", "data/x") == (
        "data/x",
        False,
        f"{top}/.gitignore:2: /job/data/",
        "data/",
    )


@needs_git
def test_a_source_folder_that_git_ignores_is_packed(tmp_path: Path):
    """A user who submits a folder of results wants its files."""
    top = tmp_path / "top"
    git(tmp_path, "init", "-q", str(top))
    write(top / ".gitignore", "/out/\n*.py\n")
    write(top / "out" / "run" / "train.py")

    assert packed_by_cloudjob(top / "out" / "run") == {"train.py"}


@needs_git
def test_core_excludesfile_and_info_exclude_apply(tmp_path: Path, home: Path):
    top = tmp_path / "top"
    git(tmp_path, "init", "-q", str(top))
    write(top / "a")
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    git(top, "add", "a")
    git(top, *identity, "commit", "-qm", "first")
    git(top, "worktree", "add", "-q", str(tmp_path / "other"))
    write(top / ".git" / "info" / "exclude", "*.secret\n")
    write(home / ".config" / "git" / "ignore", "*.mine\n")
    for name in ("x.secret", "y.mine", "z"):
        write(tmp_path / "other" / name)

    assert packed_by_cloudjob(tmp_path / "other") == {"a", "z", ".git"} - {".git"}
    assert explain(tmp_path / "other", "y.mine").rule == f"{home}/.config/git/ignore:1: *.mine"


def test_git_gets_no_secret_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job's secrets are often variables of the submitting shell."""
    seen = tmp_path / "seen"
    write(tmp_path / "bin" / "git", f"#!/bin/sh\nenv >{seen}\nexit 1\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("TOKEN", "s3cret")
    write(tmp_path / "source" / "train.py")

    assert packed_by_cloudjob(tmp_path / "source") == {"train.py"}
    assert "GIT_CONFIG_NOSYSTEM=1" in seen.read_text()
    assert "s3cret" not in seen.read_text()


def test_ignore_files_apply_outside_a_repository(tmp_path: Path):
    """Outside a repository, only ignore files in the source apply."""
    write(tmp_path / "source" / ".gitignore", "*.log\n")
    write(tmp_path / "source" / "a.log")
    write(tmp_path / ".gitignore", "*\n")

    assert packed_by_cloudjob(tmp_path / "source") == {".gitignore"}


def test_patterns_and_names_that_are_not_utf8_match(tmp_path: Path):
    """A line that is not UTF-8 matches the same bytes, even in a file with UTF-8 lines."""
    (tmp_path / ".gitignore").write_bytes(b"caf\xe9\n*.log\n\xc3\xa9*\n")
    for name in (b"caf\xe9", b"caf\xe9.log", b"caf\xea", b"\xc3\xa9t\xe9"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()

    assert {os.fsencode(name) for name in packed_by_cloudjob(tmp_path)} == {
        b".gitignore",
        b"caf\xea",
    }


def test_explain_names_the_rule_that_keeps_a_path(tmp_path: Path):
    """The rule can be a negated line."""
    source = tmp_path / "source"
    write(source / ".gitignore", "*.so\n")
    write(source / ".cloudjobignore", "# what git leaves out\n!*.so\n")
    write(source / "op.so")
    write(source / ".env")
    write(source / "lib" / "__pycache__" / "x.pyc")
    (source / "out").symlink_to("/etc")

    explained = {
        path: explain(source, path)[1:]
        for path in ("op.so", ".env", "lib", "lib/__pycache__/x.pyc", "out", ".gitignore")
    }

    assert explained == {
        "op.so": (True, ".cloudjobignore:2: !*.so", "op.so"),
        ".env": (False, "may hold secrets: its name", ".env"),
        "lib": (True, "no rule leaves it out", "lib/"),
        "lib/__pycache__/x.pyc": (
            False, "left out by default: __pycache__", "lib/__pycache__/",
        ),
        "out": (False, "refused: it is a link to /etc, outside the source", "out"),
        ".gitignore": (True, "no rule leaves it out", ".gitignore"),
    }  # fmt: skip
    assert explain(source, str(source / "op.so")) == explain(source, "op.so")


def test_follow_links_packs_the_targets_of_outside_links(tmp_path: Path):
    """A link to a file becomes a file, a link to a folder becomes a tree; cycles are refused."""
    source, other = tmp_path / "source", tmp_path / "other"
    write(source / "train.py")
    write(other / "data" / "a", "1")
    write(other / "model", "22")
    (other / "data" / "up").symlink_to("../model")
    (source / "data").symlink_to(other / "data")
    (source / "model").symlink_to("../other/model")
    (source / "inside").symlink_to("train.py")

    tree = scan(source, follow_links=True)

    assert {(entry.name, entry.kind, entry.size_bytes) for entry in tree.entries} == {
        ("data", "folder", 0), ("data/a", "file", 1), ("data/up", "file", 2),
        ("inside", "link", 0), ("model", "file", 2), ("train.py", "file", 0),
    }  # fmt: skip
    (other / "data" / "circle").symlink_to("../data")
    with pytest.raises(Exception, match="a folder that contains the link"):
        scan(source, follow_links=True)
