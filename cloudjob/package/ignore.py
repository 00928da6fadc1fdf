"""Ignore files: the lines of ``.gitignore`` and ``.cloudjobignore``, read as git reads them.

``globs`` matches the patterns. Which file takes precedence, and whether a parent folder is already
left out, is decided here. A line applies to a path itself and not to the paths below: the scan
never enters a folder that is left out.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.model.text import size_text
from cloudjob.package.globs import GlobPattern, Globs
from cloudjob.package.messages import shown

GITIGNORE = ".gitignore"
# A larger ignore file is a mistake. Up to here, reading it takes seconds.
_LIMIT_BYTES = 32 * 1024 * 1024


class IgnoreDecision(NamedTuple):
    """The effect of one line of an ignore file on a path.

    Args:
        rule: The file, the line's number, and the line.
        is_named: Whether the line keeps a path that it names in full.
    """

    ignores: bool
    rule: str
    is_named: bool


class GitSettings(NamedTuple):
    """What git is configured to do in a folder.

    Args:
        excludes_file: The user's own ignore file, ``core.excludesFile``.
        folds_case: Whether rules ignore the case of names, ``core.ignoreCase``.
    """

    excludes_file: str
    folds_case: bool = False


class _Line(NamedTuple):
    number: int
    text: str
    ignores: bool
    pattern: GlobPattern


class IgnoreRules:
    """The lines of one ignore file.

    Args:
        shown_name: The file's name in messages.
        prefix: The folder in which it applies, relative to the source, with ``/`` at the end.
        above: For a file above the source, the path from its folder down to the source.

    Raises:
        PackageError: The file is too large.
    """

    def __init__(
        self,
        shown_name: str,
        text: bytes,
        *,
        prefix: str = "",
        above: str = "",
        folds_case: bool = False,
    ) -> None:
        if len(text) > _LIMIT_BYTES:
            raise PackageError(
                f"reading {shown(shown_name)}: {size_text(len(text))} is over the limit of "
                f"{size_text(_LIMIT_BYTES)} for an ignore file",
                hint="a pattern such as /data/* replaces many lines",
            )
        self._name = shown_name
        self._skip = len(prefix)
        self._above = above
        self._lines = list(_lines(text))
        patterns = [line.pattern for line in self._lines]
        self._globs = Globs(patterns, folds_case=folds_case)

    def decide(self, name: str, is_folder: bool) -> IgnoreDecision | None:
        """Return the decision of the last line that matches ``name``.

        Args:
            name: Relative to the source.
        """
        return self.decide_relative(self._above + name[self._skip :], is_folder)

    def decide_relative(self, relative: str, is_folder: bool) -> IgnoreDecision | None:
        """Return the decision of the last line that matches a path in the file's folder."""
        index = self._globs.last_match(os.fsencode(relative), is_folder)
        if index < 0:
            return None
        line = self._lines[index]
        text = line.text[1:].strip().strip("/")
        is_named = not line.ignores and text in (relative, relative.rpartition("/")[2])
        return IgnoreDecision(
            line.ignores, f"{shown(self._name)}:{line.number}: {line.text}", is_named
        )


def outer_rules(source: str, settings: GitSettings, prefix: str = "") -> tuple[IgnoreRules, ...]:
    """Return the rules of git from outside a folder, highest precedence first.

    They are the user's own (``core.excludesFile``), ``.git/info/exclude``, and the ``.gitignore``
    of each folder above, up to the top of the repository that the source lies in. If they leave out
    the source itself, for instance as a folder of results, they do not apply to its files.

    Args:
        source: The source, or the top of a repository in it.
        prefix: Where ``source`` is in the user's source, with ``/`` at the end.

    Raises:
        OSError: One of these files cannot be read.
        PackageError: One is too large.
    """
    excludes, folds_case = settings
    top = _repository_root(source)
    if top is None:
        text = _read(excludes)
        return (IgnoreRules(excludes, text, folds_case=folds_case),) if text else ()
    relative = os.path.relpath(source, top)
    segments = () if relative == "." else tuple(relative.split("/"))
    # Each with the depth, from the top, of the folder that its lines are relative to.
    files = [(excludes, 0), (_info_exclude(top), 0)]
    files += [
        (posixpath.join(top, *segments[:steps], GITIGNORE), steps) for steps in range(len(segments))
    ]
    levels = []
    for path, steps in files:
        if text := _read(path):
            above = "".join(f"{segment}/" for segment in segments[steps:])
            rules = IgnoreRules(path, text, prefix=prefix, above=above, folds_case=folds_case)
            levels.append((rules, steps))
    return () if _is_left_out(levels, segments) else tuple(rules for rules, _ in reversed(levels))


def _is_left_out(levels: list[tuple[IgnoreRules, int]], segments: tuple[str, ...]) -> bool:
    """Whether the rules above leave out the source, or a folder on the way down to it."""
    for depth in range(1, len(segments) + 1):
        for rules, steps in reversed(levels):
            if steps < depth:
                relative = "/".join(segments[steps:depth])
                decision = rules.decide_relative(relative, is_folder=True)
                if decision is not None and decision.ignores:
                    return True
                if decision is not None:
                    break
    return False


# ---- where git's rules are -----------------------------------------------------------------------


def _repository_root(source: str) -> str | None:
    folder = source
    # Git looks no further than a file .git, even if it names a repository that is not here.
    while not (Path(folder, ".git").is_file() or is_repository(folder)):
        above = posixpath.dirname(folder)
        if above == folder:
            return None
        folder = above
    return folder


def is_repository(folder: str) -> bool:
    """Whether git takes a folder for the top of a repository."""
    return os.path.lexists(posixpath.join(_git_folder(folder), "HEAD"))


def _info_exclude(top: str) -> str:
    return posixpath.join(_git_folder(top), "info", "exclude")


def _git_folder(top: str) -> str:
    """Return the folder of a repository's data; a worktree and a submodule have it elsewhere."""
    git = posixpath.join(top, ".git")
    if Path(git).is_file():
        text = os.fsdecode(_read(git)).strip()
        git = posixpath.join(top, text.removeprefix("gitdir:").strip())
        common = os.fsdecode(_read(posixpath.join(git, "commondir"))).strip()
        git = posixpath.join(git, common)
    return git


def git_settings(source: str) -> GitSettings:
    """Return what git is configured to do in a folder; its defaults where there is no git."""
    values = dict[str, str]()
    names = r"^core\.(excludesfile|ignorecase)$"
    for item in _git(source, "config", "-z", "--get-regexp", names).split(b"\0"):
        name, is_set, value = os.fsdecode(item).partition("\n")
        values[name] = value if is_set else "yes"
    settings = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    excludes_file = values.get("core.excludesfile") or posixpath.join(settings, "git", "ignore")
    folds_case = values.get("core.ignorecase", "no").lower() not in ("", "false", "no", "off", "0")
    return GitSettings(posixpath.join(source, os.path.expanduser(excludes_file)), folds_case)  # noqa: PTH111


def tracked_files(folder: str) -> tuple[str, ...]:
    """Return the files that git tracks although its rules ignore them; none without a repository.

    Args:
        folder: A folder of the repository's work tree; the paths are relative to it.
    """
    if _repository_root(folder) is None:
        return ()
    listed = _git(folder, "ls-files", "-z", "--cached", "--ignored", "--exclude-standard")
    return tuple(os.fsdecode(name) for name in listed.split(b"\0") if name)


_GIT_LIMIT_S = 60.0
# With these variables, git fetches nothing. A fetch may ask a program for a password before its
# transport is refused, so none starts; an old git knows only the second.
WITHOUT_FETCH = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
# The variables by which git finds its settings; others may hold secrets.
_SETTINGS = r"(HOME|PATH|LANG|LC_\w+|XDG_CONFIG_HOME|GIT_CONFIG_\w+|GIT_CEILING_\w+)\Z"


def _git(folder: str, *arguments: str) -> bytes:
    """Return what git prints; nothing if it fails, or if there is no git.

    Raises:
        PackageError: It does not end.
    """
    import shutil
    import subprocess

    git = shutil.which("git")
    if git is None:
        return b""
    # A repository's own settings can name programs for git to run: one before it lists files, and
    # those that fetch what is missing. Without these, neither command runs any, so a repository
    # may belong to another user, as in a container.
    settings = ("-c", "core.fsmonitor=false", "-c", "safe.directory=*")
    argv = (git, "-C", folder, *settings, *arguments)
    env = {name: value for name, value in os.environ.items() if re.match(_SETTINGS, name)}
    env.update(WITHOUT_FETCH)
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        command = f"git -C {shown(folder)} {arguments[0]}"
        raise PackageError(
            f"reading the ignore rules of git: `{command}` did not end in {_GIT_LIMIT_S:g} s",
            hint="do its settings name a pipe (include.path), or is its file system slow?",
        ) from None
    return done.stdout if done.returncode == 0 else b""


def _read(path: str) -> bytes:
    """Return the contents of a file outside the source; empty if it cannot be read."""
    try:
        # Opening a named pipe would block.
        return Path(path).read_bytes() if Path(path).is_file() else b""
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return b""


# ---- lines ---------------------------------------------------------------------------------------


def _lines(data: bytes) -> Iterator[_Line]:
    """Yield the lines that are patterns, as git reads them."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        # git sees nothing after a zero byte.
        text = line.removesuffix(b"\r").partition(b"\0")[0]
        pattern = _without_spaces(text).removeprefix(b"!")
        if pattern and not line.startswith(b"#"):
            yield _Line(
                number,
                os.fsdecode(text),
                not text.startswith(b"!"),
                GlobPattern(pattern.removesuffix(b"/"), pattern.endswith(b"/")),
            )


def _without_spaces(text: bytes) -> bytes:
    """Return a line without the spaces at its end, up to one behind a backslash."""
    kept = text.rstrip(b" ")
    backslashes = len(kept) - len(kept.rstrip(b"\\"))
    is_escaped = backslashes % 2 == 1 and len(kept) < len(text)
    return kept + b" " * is_escaped
