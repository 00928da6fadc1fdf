"""Ignore files: the lines of ``.gitignore`` and ``.cloudjobignore``, read as git reads them.

pathspec turns a line into a regular expression. The rules for which file takes precedence, and
whether a parent folder is already left out, are those of git and implemented here. A line applies
to a path itself and not to the paths below: the scan never enters a folder that is left out.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cloudjob.package.messages import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pathspec import GitIgnoreSpec
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

GITIGNORE = ".gitignore"
# The regular expression that pathspec returns for lines like ``*/``; it matches anywhere in a path.
_ANY_FOLDER = "(?P<ps_d>/)"


class Decision(NamedTuple):
    """The effect of one line of an ignore file on a path.

    Args:
        rule: The file, the line's number, and the line.
        is_named: Whether the line keeps a path that it names in full.
    """

    ignores: bool
    rule: str
    is_named: bool


class _Line(NamedTuple):
    number: int
    text: str
    pattern: GitIgnoreSpecPattern


class Rules:
    """The lines of one ignore file.

    Args:
        shown_name: The file's name in messages.
        prefix: The folder in which it applies, relative to the source, with ``/`` at the end.
        above: For a file above the source, the path from its folder down to the source.
    """

    def __init__(self, shown_name: str, text: bytes, *, prefix: str = "", above: str = "") -> None:
        self._name = shown_name
        self._skip = len(prefix)
        self._above = above
        self._lines = list(_lines(text))
        self._spec = _spec(self._lines) if self._lines else None

    def __bool__(self) -> bool:
        return bool(self._lines)

    def decide(self, name: str, is_folder: bool) -> Decision | None:
        """Return the decision of the last line that matches ``name``.

        Args:
            name: Relative to the source.
        """
        return self.decide_relative(self._above + name[self._skip :], is_folder)

    def decide_relative(self, relative: str, is_folder: bool) -> Decision | None:
        """Return the decision of the last line that matches a path in the file's folder."""
        path = relative + "/" if is_folder else relative
        if not self._may_apply(path):
            return None
        for line in reversed(self._lines):
            if _applies(line, path):
                text = line.text[1:].strip().strip("/")
                base = relative.rpartition("/")[2]
                is_named = line.text.startswith("!") and text in (relative, base)
                rule = f"{shown(self._name)}:{line.number}: {line.text}"
                return Decision(bool(line.pattern.include), rule, is_named)
        return None

    def _may_apply(self, path: str) -> bool:
        """Whether any line matches; uses Hyperscan, so that most paths take a microsecond."""
        try:
            return self._spec is not None and self._spec.check_file(path).include is not None
        except UnicodeEncodeError:
            return True


def read_rules(folder: str, prefix: str, name: str) -> Rules:
    """Read an ignore file in a folder of the source.

    Raises:
        OSError: The file cannot be read.
    """
    return Rules(prefix + name, Path(folder, name).read_bytes(), prefix=prefix)


def outer_rules(source: str) -> tuple[Rules, ...]:
    """Return the rules of git from outside the source, lowest precedence first.

    They are the user's own (``core.excludesFile``), ``.git/info/exclude``, and the ``.gitignore``
    of each folder above, up to the top of the repository that the source lies in. If they leave out
    the source itself, for instance as a folder of results, they do not apply to its files.

    Raises:
        OSError: One of these files cannot be read.
    """
    own = _excludes_file(source)
    top = _repository_root(source)
    if top is None:
        return tuple(rules for rules in (Rules(own, _read(own)),) if rules)
    relative = os.path.relpath(source, top)
    segments = () if relative == "." else tuple(relative.split("/"))
    # Each with the depth, from the top, of the folder that its lines are relative to.
    files = [(own, 0), (_info_exclude(top), 0)]
    files += [
        (posixpath.join(top, *segments[:steps], GITIGNORE), steps) for steps in range(len(segments))
    ]
    found = [
        (Rules(path, _read(path), above="".join(f"{s}/" for s in segments[steps:])), steps)
        for path, steps in files
    ]
    found = [(rules, steps) for rules, steps in found if rules]
    return () if _is_left_out(found, segments) else tuple(rules for rules, _ in found)


def repository_rules(folder: str, prefix: str) -> Rules:
    """Return the rules in ``info/exclude`` of a repository whose top is a folder of the source."""
    path = _info_exclude(folder)
    return Rules(path, _read(path), prefix=prefix)


def _is_left_out(found: list[tuple[Rules, int]], segments: tuple[str, ...]) -> bool:
    """Whether the rules above leave out the source, or a folder on the way down to it."""
    for depth in range(1, len(segments) + 1):
        for rules, steps in reversed(found):
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
    while not os.path.lexists(posixpath.join(folder, ".git")):
        above = posixpath.dirname(folder)
        if above == folder:
            return None
        folder = above
    return folder


def _info_exclude(top: str) -> str:
    """Return the path of ``info/exclude``; a worktree and a submodule have it elsewhere."""
    git = posixpath.join(top, ".git")
    if Path(git).is_file():
        text = os.fsdecode(_read(git)).strip()
        git = posixpath.join(top, text.removeprefix("gitdir:").strip())
        common = os.fsdecode(_read(posixpath.join(git, "commondir"))).strip()
        git = posixpath.join(git, common) if common else git
    return posixpath.join(git, "info", "exclude")


_SETTINGS = re.compile(r"(HOME|PATH|LANG|LC_\w+|XDG_CONFIG_HOME|GIT_\w+)\Z")


def _excludes_file(source: str) -> str:
    """Return the path of the user's own ignore file: as configured in git, or git's default."""
    import shutil
    import subprocess

    git = shutil.which("git")
    if git is not None:
        argv = (git, "-C", source, "config", "--path", "-z", "--get", "core.excludesFile")
        # Only the variables by which git finds its settings; others may hold secrets.
        env = {name: value for name, value in os.environ.items() if _SETTINGS.match(name)}
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode == 0:
            return posixpath.join(source, os.fsdecode(done.stdout.partition(b"\0")[0]))
    settings = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return posixpath.join(settings, "git", "ignore")


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
    if not data.strip():
        return
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern  # 25 ms

    # Ignore a byte order mark and carriage returns.
    text = os.fsdecode(data.removeprefix(b"\xef\xbb\xbf")).replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        try:
            pattern = GitIgnoreSpecPattern(line)
        except (ValueError, re.error):
            continue  # git skips what it cannot read, such as [z-a]
        if pattern.include is not None and pattern.regex is not None:
            yield _Line(number, line, pattern)


def _spec(lines: Sequence[_Line]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    patterns = [line.pattern for line in lines]
    try:
        return GitIgnoreSpec(patterns, backend="best")
    except UnicodeEncodeError:  # a line that is not UTF-8
        return GitIgnoreSpec(patterns, backend="simple")


def _applies(line: _Line, path: str) -> bool:
    """Whether a line matches exactly this path; a folder's path ends with ``/``.

    pathspec also applies a line to the paths below a folder, and ``a/**`` to ``a/``; git does not.
    """
    regex = line.pattern.regex
    assert regex is not None, "lines that are not patterns are left out"
    if regex.pattern == _ANY_FOLDER:
        return path.endswith("/")
    match = regex.search(path)
    if match is None:
        return False
    if line.text.rstrip().endswith("/**/"):
        return path.endswith("/") and match.end() < len(path)
    if "ps_d" in regex.groupindex and match["ps_d"] is not None:
        return match.end("ps_d") == len(path)
    return not (match.end() == len(path) and path.endswith("/"))
