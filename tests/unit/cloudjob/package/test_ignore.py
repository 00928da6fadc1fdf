"""Ignore files in any folder work as in git; the tests compare the results with git's."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudjob.errors import PackageError
from cloudjob.package import explain, ignore, revision, scan

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
    excludes_lines=st.lists(patterns, max_size=2),
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
@example(["a"], ["**/*", "!**/a", "**/*"], {}, [], [])
def test_the_package_has_the_files_that_git_would_add(
    files: list[str],
    top: list[str],
    inner: dict[str, list[str]],
    info: list[str],
    excludes_lines: list[str],
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
        excludes = write(Path(scratch, "own"), "\n".join(excludes_lines) + "\n")
        git(folder, "config", "core.excludesFile", str(excludes))

        assert packed_by_cloudjob(folder) == added_by_git(folder)


# What names and patterns are made of: several bytes for a letter, bytes that are no letter, what
# has a meaning in a pattern, and both cases.
PIECES = (
    *(b"a", b"b", b"ab", b"A", b"1", b"7", b"-", b"_", b".", b".py", b".log", b" ", b"\t", b"#"),
    *(b"\xc3\xa9", b"\xe6\x97\xa5", b"\xff", b"\xc3", b"[", b"]", b"*", b"?", b"\\", b"^", b"~"),
    *(b"\x7f", b"!"),
)
CLASSES = b"alnum alpha blank cntrl digit graph lower print punct space upper xdigit no"
WILDCARDS = (
    *(b"*", b"?", b"**", b"***", b"**/", b"/**", b"/**/", b"*/", b"/*", b"/", b"//", b"\\"),
    *(b"[[:%s:]]" % name for name in (*CLASSES.split(), b"")),
    *(b"[^a]", b"[!a]", b"[a-c]", b"[c-a]", b"[]]", b"[^]]", b"[\\]]", b"[]-a]", b"[a-]"),
    *(b"[!\xc3\xa9]", b"[\xc3\xa9]", b"[\x80-\xff]", b"[[:digit:]-z]", b"[a", b"[", b"[--0]"),
    *(b"[[:alpha]", b"[^[:upper:]_]", b"[\\a-\\c]", b"[\\", b"[[a]", b"[[:]", b"[A-Z]"),
    *(b"[^A-Z]", b"[[:digit:]", b"[/]", b"???"),
)


def random_name(chance: random.Random) -> bytes:
    """A file name, which may hold any byte that Linux allows."""
    return b"".join(chance.choices(PIECES, k=chance.choice((1, 1, 2, 3)))).strip(b".") or b"x"


def random_paths(chance: random.Random, number: int) -> list[bytes]:
    """Relative paths of files, of which many share their folders."""
    folders = [b""]
    while len(folders) < number // 8:
        folders.append(chance.choice(folders[-20:]) + random_name(chance) + b"/")
    return [chance.choice(folders) + random_name(chance) for _ in range(number)]


def random_line(chance: random.Random, paths: list[bytes]) -> bytes:
    """A line that often matches a path: parts of it are replaced by wildcards."""
    segments = chance.choice(paths).split(b"/")
    first = chance.randrange(len(segments))
    text = b"/".join(segments[first : chance.randint(first + 1, len(segments))])
    for _ in range(chance.choice((0, 1, 1, 1, 2))):
        begin = chance.randint(0, len(text))
        end = min(len(text), begin + chance.choice((0, 1, 1, 2, len(text))))
        text = text[:begin] + chance.choice(WILDCARDS + PIECES) + text[end:]
    begin = chance.choice((b"", b"", b"", b"/", b"!", b"!/", b"**/", b"\\"))
    return (
        begin
        + text
        + chance.choice((b"", b"", b"", b"/", b"/*", b"/**", b" ", b"\\ ", b"  ", b"\r"))
    )


def random_tree(folder: Path, chance: random.Random, number: int) -> None:
    """Make files, folders, and ignore files in some of the folders."""
    root = os.fsencode(folder)
    paths = random_paths(chance, number)
    for path in paths:
        try:
            os.makedirs(os.path.dirname(root + b"/" + path), exist_ok=True)  # noqa: PTH103, PTH120
            Path(os.fsdecode(root + b"/" + path)).touch()
        except OSError:
            continue  # a folder has this name, or a file the name of a folder above
    for inner, _, _ in os.walk(root):
        if inner == root or (b"/.git/" not in inner + b"/" and chance.random() < 0.4):
            lines = [random_line(chance, paths) for _ in range(chance.choice((1, 3, 9)))]
            text = chance.choice((b"", b"", b"\xef\xbb\xbf")) + b"\n".join(lines)
            Path(os.fsdecode(inner), ".gitignore").write_bytes(text + chance.choice((b"", b"\n")))


def rules_by_git(folder: Path) -> dict[str, str]:
    """Return what ignores each path that git ignores, and is in no folder that it ignores."""
    top = os.fsencode(folder)
    paths = []
    for inner, folders, files in os.walk(top):
        if inner == top:
            folders.remove(b".git")
        paths += [os.path.relpath(inner + b"/" + name, top) for name in (*folders, *files)]
    argv = ("git", "-C", str(folder), "check-ignore", "--no-index", "-z", "-v", "--stdin")
    done = subprocess.run(argv, input=b"\0".join(paths), capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    fields = [os.fsdecode(field) for field in done.stdout.split(b"\0")[:-1]]
    rules = dict[str, str]()
    for file, line, pattern, path in zip(*[iter(fields)] * 4, strict=True):
        if not pattern.startswith("!"):
            rules[path] = f"{file}:{line}"
    return {path: rule for path, rule in rules.items() if os.path.dirname(path) not in rules}  # noqa: PTH120


def rules_by_cloudjob(folder: Path) -> dict[str, str]:
    """Return the same of cloudjob, from the reasons that it gives."""
    from cloudjob.package.messages import shown

    rules = dict[str, str]()
    for path, reason, _ in scan(folder).left_out:
        for end in range(len(reason)):
            file, _, line = reason[:end].rpartition(":")
            if line.isdecimal() and reason[end] == ":":
                rules[path.rstrip("/")] = f"{file}:{line}"
                break
    assert all(shown(path) for path in rules)
    return rules


def compare_with_git(folder: Path, seed: int, number: int) -> int:
    """Make a tree and compare; return how many paths are ignored."""
    from cloudjob.package.messages import shown

    chance = random.Random(seed)
    git(folder.parent, "init", "-q", str(folder))
    folds_case = chance.random() < 0.25
    git(folder, "config", "core.ignoreCase", str(folds_case).lower())
    random_tree(folder, chance, number)
    expected = rules_by_git(folder)
    expected = {
        path: f"{shown(rule.rpartition(':')[0])}:{rule.rpartition(':')[2]}"
        for path, rule in expected.items()
    }

    assert rules_by_cloudjob(folder) == expected, f"seed {seed}"
    return len(expected)


@needs_git
def test_every_path_of_random_trees_is_judged_by_the_line_that_git_names(tmp_path: Path):
    """Any bytes in names, POSIX classes, escapes, ``**``, trailing spaces, nested ignore files."""
    ignored = [compare_with_git(tmp_path / str(seed), seed, 60) for seed in range(20)]

    assert sum(ignored) > 40


@needs_git
@pytest.mark.lengthy
def test_50_000_paths_of_random_trees_are_judged_by_the_lines_that_git_names(tmp_path: Path):
    ignored = 0
    for seed in range(1000, 1200):
        ignored += compare_with_git(tmp_path / str(seed), seed, 260)
        shutil.rmtree(tmp_path / str(seed))

    assert ignored > 500


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


@needs_git
def test_files_that_git_tracks_are_packed_although_a_rule_ignores_them(tmp_path: Path):
    """As in git, a rule applies only to what is not tracked; here, other rules still apply."""
    top = tmp_path / "top"
    git(tmp_path, "init", "-q", str(top))
    write(top / ".gitignore", "*.bin\n/out/\n*.env\n")
    tracked = ("a.bin", "out/deep/best.txt", "job/b.bin", ".env", "out/big.txt", "keep.py")
    for name in (*tracked, "c.bin", "out/other.txt", "out/deep/other/x"):
        write(top / name)
    git(top, "add", "--force", *tracked)
    write(top / ".cloudjobignore", "/out/big.txt\n")

    assert packed_by_cloudjob(top) == {
        ".gitignore", ".cloudjobignore", "a.bin", "job/b.bin", "out/deep/best.txt", "keep.py",
    }  # fmt: skip
    assert explain(top, "a.bin").rule == "git tracks it, although .gitignore:1: *.bin"
    assert explain(top, "out/other.txt").rule == ".gitignore:2: /out/"
    assert packed_by_cloudjob(top / "job") == {"b.bin"}
    if os.getuid() == 0:
        # As of a project that a container mounts: git refuses a repository of another user.
        for path in (top, *top.rglob("*")):
            os.chown(path, 12345, -1)
        assert explain(top, "a.bin").is_packed


@needs_git
def test_a_repository_in_the_source_has_only_its_own_rules(tmp_path: Path, home: Path):
    """As in git: the rules around a submodule or a clone do not apply to the files in it."""
    top = tmp_path / "top"
    write(home / ".config" / "git" / "ignore", "/mine\n*.MINE\n")
    for folder in (top, top / "clone", top / "out" / "module"):
        git(tmp_path, "init", "-q", str(folder))
        for name in ("a.bin", "b.log", "mine", "deep/mine", "x.mine"):
            write(folder / name)
        git(folder, "add", "--force", "a.bin")
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    git(top / "out" / "module", *identity, "commit", "-qm", "first")
    git(top, "add", "out/module")
    write(top / ".gitignore", "*.bin\n/out/\n")
    write(top / "clone" / ".gitignore", "*.log\n")
    # Any number but 0 means yes.
    git(top / "clone", "config", "core.ignoreCase", "2")
    write(top / "broken" / ".git" / "config")
    write(top / "broken" / "c.bin")

    assert packed_by_cloudjob(top) == {
        *(".gitignore", "a.bin", "b.log", "deep/mine", "x.mine"),
        *("clone/.gitignore", "clone/a.bin", "clone/deep/mine"),
        *("out/module/a.bin", "out/module/b.log", "out/module/deep/mine", "out/module/x.mine"),
    }


def test_rules_above_the_source_apply_in_a_worktree_whose_repository_is_elsewhere(tmp_path: Path):
    """As in a container that gets only the worktree: git fails there, and looks no further."""
    write(tmp_path / ".gitignore", "train.py\n")
    write(tmp_path / "top" / ".git", "gitdir: /nonexistent/worktrees/top\n")
    write(tmp_path / "top" / ".gitignore", "*.bin\n")
    for name in ("train.py", "a.bin"):
        write(tmp_path / "top" / "job" / name)

    assert packed_by_cloudjob(tmp_path / "top" / "job") == {"train.py"}


@needs_git
def test_a_repository_in_the_source_cannot_name_a_program_to_run(tmp_path: Path):
    """Git runs ``core.fsmonitor`` before it lists files, and fetches what a sparse index lacks."""
    seen = tmp_path / "seen"
    program = write(tmp_path / "program", f"#!/bin/sh\ntouch {seen}\n")
    program.chmod(0o755)
    inner = tmp_path / "source" / "inner"
    git(tmp_path, "init", "-q", str(inner))
    write(inner / "a")
    git(inner, "add", "a")
    write(inner / "folder" / "b")
    git(inner, "add", "folder")
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    git(inner, *identity, "commit", "-qm", "first")
    lost = git(inner, "rev-parse", "HEAD:folder").decode().strip()
    git(inner, "sparse-checkout", "set", "--cone", "--sparse-index", "none")
    (inner / ".git" / "objects" / lost[:2] / lost[2:]).unlink()
    git(tmp_path, "init", "-q", "--bare", str(tmp_path / "remote"))
    for name, value in {
        "core.fsmonitor": program,
        "core.repositoryFormatVersion": 1,
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": tmp_path / "remote",
        "remote.origin.uploadpack": program,
        # From git 2.40 on, a fetch asks for this before it looks for the remote.
        "fetch.bundleURI": "https://localhost/none",
        "http.sslCert": program,
        "http.sslCertPasswordProtected": "true",
        "credential.helper": f"!{program}",
    }.items():
        git(inner, "config", name, str(value))

    assert packed_by_cloudjob(tmp_path / "source") == {"inner/a"}
    assert revision.of_source(inner) is not None
    assert not seen.exists()


def test_settings_of_git_that_cannot_be_read_end_a_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    git(tmp_path, "init", "-q", str(tmp_path / "source"))
    os.mkfifo(tmp_path / "settings")
    git(tmp_path / "source", "config", "include.path", str(tmp_path / "settings"))
    monkeypatch.setattr(ignore, "_GIT_LIMIT_S", 1.0)

    with pytest.raises(PackageError, match=r"git -C .*source config` did not end in 1 s"):
        packed_by_cloudjob(tmp_path / "source")


def test_long_rules_and_many_of_them_take_little_time(tmp_path: Path):
    """Each of these took minutes, or memory without a limit, before the patterns were automata."""
    lines = [
        "**/*a**a*" + "a*" * 1000 + "b",
        "*" * 100_000 + "q",
        "**/" * 50_000 + "a" * 5000,
        "[" + "[:" * 20_000 + "x]",
        *(f"*n{number}*o" for number in range(20_000)),
        *(f"/a/{number}" for number in range(20_000)),
        *(f"*{number}.bin" for number in range(20_000)),
        *(f"**/n{number}/**/[0-9]?*.tmp" for number in range(20_000)),
        *(f"*?a?*{number % 10}?b" for number in range(20_000)),
        "?n777?o",
    ]
    write(tmp_path / ".gitignore", "\n".join(lines))
    for name in ("a" * 250, "xn777xo", "n12/b/1x.tmp", "n12/b/keep", "/".join(["a"] * 500)):
        write(tmp_path / name)

    left_out = {path for path, _, _ in scan(tmp_path).left_out}

    assert left_out == {"xn777xo", "n12/b/1x.tmp"}


def test_an_enormous_ignore_file_is_refused(tmp_path: Path):
    with (tmp_path / ".gitignore").open("wb") as file:
        file.truncate(40 * 1024 * 1024)

    with pytest.raises(PackageError, match=r"reading \.gitignore: 41\.9 MB is over the limit"):
        scan(tmp_path)


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
            False, "cloudjob's default: __pycache__", "lib/__pycache__/",
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
