"""Ignore files: the lines of ``.gitignore`` and its kin, read as git reads them.

pathspec turns a line into a regular expression; which file has the word, and whether a folder above
has been left out already, is git's order and stands here. A line speaks of a path itself, not of
what lies below: the walk never enters a folder that is left out.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cloudjob.package.messages import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GITIGNORE = ".gitignore"
# What pathspec makes of lines like ``*/``, to be looked for anywhere in a path.
_ANY_FOLDER = "(?P<ps_d>/)"
_GLOB = re.compile(r"[*?\[\\]")


class Word(NamedTuple):
    """What one line of an ignore file says about a path.

    Args:
        rule: The file, its line's number, and the line.
        is_named: Whether it keeps a path that it spells out.
    """

    ignores: bool
    rule: str
    is_named: bool


class _Line(NamedTuple):
    number: int
    text: str
    ignores: bool
    pattern: re.Pattern[str]


class Rules:
    """The lines of one ignore file.

    Args:
        shown_name: The file as people know it.
        prefix: The folder below which it is in force, relative to the source, ``/`` at the end.
        above: For a file above the source, the way from its folder down to the source.
    """

    def __init__(self, shown_name: str, text: bytes, *, prefix: str = "", above: str = "") -> None:
        self._name = shown_name
        self._skip = len(prefix)
        self._above = above
        self._lines = list(reversed(list(_lines(text))))
        self._literals, self._suffixes, self._globs = _last_segments(self._lines)
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def word(self, name: str, base: str, is_folder: bool) -> Word | None:
        """Return what the last line that means ``name`` says about it.

        Args:
            name: Relative to the source.
            base: Its last segment.
        """
        known = self._known.get(base)
        if known is None:
            known = self._known[base] = self._may_mean(base)
        return self.says(self._above + name[self._skip :], base, is_folder) if known else None

    def says(self, relative: str, base: str, is_folder: bool) -> Word | None:
        """Return what the last line that means ``relative`` says, seen from the file's folder."""
        path = relative + "/" if is_folder else relative
        for line in self._lines:
            if _means(line, path):
                spelled = line.text[1:].strip().strip("/")
                is_named = line.text.startswith("!") and spelled in (relative, base)
                rule = f"{shown(self._name)}:{line.number}: {line.text}"
                return Word(line.ignores, rule, is_named)
        return None

    def _may_mean(self, base: str) -> bool:
        """Whether any line can mean a path with this last segment: cheap, and right about no."""
        return (
            base in self._literals
            or base.endswith(self._suffixes)
            or any(glob(base) for glob in self._globs)
        )


def parse_own(folder: str, prefix: str, name: str) -> Rules:
    """Read an ignore file that lies in a folder of the source.

    Raises:
        OSError: It cannot be read.
    """
    return Rules(prefix + name, Path(folder, name).read_bytes(), prefix=prefix)


def outer(source: str) -> tuple[Rules, ...]:
    """Return the rules of git that come from elsewhere than the source, the weakest first.

    They are the user's own (``core.excludesFile``), ``.git/info/exclude``, and the ``.gitignore``
    of each folder above, up to the top of the repository that the source lies in. When these leave
    out the source itself, as a folder of results for instance, they say nothing about its files.

    Raises:
        OSError: One of them cannot be read.
    """
    own = _excludes_file(source)
    top = _top(source)
    if top is None:
        return tuple(rules for rules in (Rules(own, _read(own)),) if rules)
    way = os.path.relpath(source, top)
    segments = () if way == "." else tuple(way.split("/"))
    # Each with the number of steps from the top down to the folder that its lines speak from.
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


def of_repository(folder: str, prefix: str) -> Rules:
    """Return ``info/exclude`` of a repository whose top is a folder of the source."""
    path = _info_exclude(folder)
    return Rules(path, _read(path), prefix=prefix)


def _is_left_out(found: list[tuple[Rules, int]], segments: tuple[str, ...]) -> bool:
    """Whether the rules above leave out the source, or a folder on the way down to it."""
    for depth in range(1, len(segments) + 1):
        for rules, steps in reversed(found):
            if steps < depth:
                relative = "/".join(segments[steps:depth])
                word = rules.says(relative, segments[depth - 1], True)
                if word is not None and word.ignores:
                    return True
                if word is not None:
                    break
    return False


# ---- where git's rules lie -----------------------------------------------------------------------


def _top(source: str) -> str | None:
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
    """Return the path of the user's own ignore file: what git says, else git's default."""
    import shutil
    import subprocess

    git = shutil.which("git")
    if git is not None:
        argv = (git, "-C", source, "config", "--path", "-z", "--get", "core.excludesFile")
        # Only what its settings are found by: a secret of the job may be a variable of ours.
        env = {name: value for name, value in os.environ.items() if _SETTINGS.match(name)}
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode == 0:
            return posixpath.join(source, os.fsdecode(done.stdout.partition(b"\0")[0]))
    settings = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return posixpath.join(settings, "git", "ignore")


def _read(path: str) -> bytes:
    """Return what a file outside the source holds; nothing for one that cannot be read."""
    try:
        # A named pipe would be waited for.
        return Path(path).read_bytes() if Path(path).is_file() else b""
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return b""


# ---- lines ---------------------------------------------------------------------------------------


def _lines(data: bytes) -> Iterable[_Line]:
    """Yield the lines that mean something, as git reads them."""
    if not data.strip():
        return
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern  # 25 ms

    # A byte order mark and carriage returns mean nothing.
    text = os.fsdecode(data.removeprefix(b"\xef\xbb\xbf")).replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), 1):
        try:
            pattern = GitIgnoreSpecPattern(line)
        except (ValueError, re.error):
            continue  # git passes over what it cannot read, such as [z-a]
        if pattern.include is not None and pattern.regex is not None:
            yield _Line(number, line, pattern.include, _quick(pattern.regex))


def _means(line: _Line, path: str) -> bool:
    """Whether a line means this very path; a folder's path ends with ``/``.

    pathspec takes what lies below a folder along, and ``a/**`` for ``a/`` itself; git does neither.
    """
    if line.pattern.pattern == _ANY_FOLDER:
        return path.endswith("/")
    match = line.pattern.search(path)
    if match is None:
        return False
    if line.text.rstrip().endswith("/**/"):
        return path.endswith("/") and match.end() < len(path)
    if "ps_d" in line.pattern.groupindex and match["ps_d"] is not None:
        return match.end("ps_d") == len(path)
    return not (match.end() == len(path) and path.endswith("/"))


def _last_segments(
    lines: Iterable[_Line],
) -> tuple[set[str], tuple[str, ...], list[Callable[[str], object]]]:
    """Return what the last segment of a path must be for any line to mean it.

    Either one of some texts, or one that ends so, or one that these patterns match.
    """
    from_line: dict[str, re.Pattern[str]] = {}
    literals: set[str] = set()
    suffixes: set[str] = set()
    for line in lines:
        segment = line.text.removeprefix("!").rstrip().rstrip("/").rpartition("/")[2]
        if not _GLOB.search(segment):
            literals.add(segment)
        elif segment.startswith("*") and not _GLOB.search(segment[1:]) and segment[1:]:
            suffixes.add(segment[1:])
        else:
            from_line[segment] = _segment_pattern(segment)
    return literals, tuple(suffixes), [pattern.match for pattern in from_line.values()]


def _segment_pattern(segment: str) -> re.Pattern[str]:
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    if segment in ("*", "**") or segment.endswith("\\"):
        return re.compile("")
    # Without its folders a line may look like a comment.
    pattern = GitIgnoreSpecPattern("/" + segment).regex
    return re.compile("") if pattern is None else _quick(pattern)


# What pathspec makes of ``*``, of ``/**/``, and of the way to a line without a slash.
_STAR, _FOLDERS, _TOP = "[^/]*", "(?:/.+)?", "^(?:.+/)?"


def _quick(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern that matches the same paths and does not try them in every possible way.

    With ``*a*b*``, nothing is lost when the first star ends at the first ``a``: the next one takes
    all that follows. As it is, ``*a*a*a*a*b`` takes minutes for a name of 100 letters.
    """
    regex = pattern.pattern
    if regex.count(_STAR) + regex.count(_FOLDERS) < 3:
        return pattern
    numbers = itertools.count()

    def atomic(text: str) -> str:
        # Python 3.10 has no atomic groups; a group that was looked at ahead is one.
        name = f"once_{next(numbers)}"
        return f"(?=(?P<{name}>{text}))(?P={name})"

    def segments(text: str) -> str:
        first, *rest = text.split(_STAR)
        made = [
            _STAR + part if "(" in part or number == len(rest) else atomic("[^/]*?" + part)
            for number, part in enumerate(rest, 1)
        ]
        return first + "".join(made)

    first, *rest = regex.split(_FOLDERS)
    if rest and first.startswith(_TOP):
        first = "^" + atomic("(?:.+?/)??" + segments(first[len(_TOP) :]))
    else:
        first = segments(first)
    last = _FOLDERS + segments(rest.pop()) if rest else ""
    return re.compile(
        first + "".join(atomic("(?:/.+?)??" + segments(part)) for part in rest) + last
    )
