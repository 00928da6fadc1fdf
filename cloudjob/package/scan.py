"""What goes into a package: decided from names, ``stat`` and ignore files alone."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.package import ignore, secret_names
from cloudjob.package.ignore import GITIGNORE, Rules
from cloudjob.package.messages import CLOUDJOBIGNORE, came_back, reading, shown, translated
from cloudjob.package.tree import FILE, FOLDER, LINK, LeftOut, Seen, SourceEntry, Tree

# What no job needs in the cloud, whatever the ignore files say.
_DEFAULT_NAMES = frozenset(
    {
        ".cloudjob", ".git", ".hg", ".svn", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache",
        ".ruff_cache", ".ipynb_checkpoints", "node_modules", ".tox", ".nox", ".DS_Store",
    }
)  # fmt: skip
_LISTED = 10


class Verdict(NamedTuple):
    """Whether a path goes, and why.

    Args:
        reason: Why it is left out; empty when it goes.
        kept_by: The line that keeps it, when there is one.
        is_named: Whether that line spells it out.
    """

    reason: str = ""
    kept_by: str = ""
    is_named: bool = False


def scan(source: Path, *, besides: Path | None = None, follow_links: bool = False) -> Tree:
    """Decide what of ``source`` goes into the package, reading only stat and ignore files.

    Args:
        source: The user's folder.
        besides: A path that is never part of the package, even when it lies in the source.
        follow_links: Take what links outside the source lead to, instead of refusing them.

    Raises:
        PackageError: A folder cannot be read, or something cannot be carried to another machine.
    """
    _check_folder(source)
    root = os.path.realpath(source)
    skipped = "" if besides is None else os.path.relpath(os.path.realpath(besides), root)
    walk = _Walk(source, root, skipped, follow_links=follow_links)
    walk.run()
    _check_refused(source, walk.refused)
    # Bytes, not characters: the order must not depend on how a machine decodes names. Most have
    # names whose bytes are their characters, and need not be encoded.
    is_plain = all(entry.name.isascii() for entry in walk.entries)
    walk.entries.sort(key=attrgetter("name") if is_plain else _name_bytes)
    return Tree(source, tuple(walk.entries), tuple(sorted(walk.left_out)))


def _name_bytes(entry: SourceEntry) -> bytes:
    return os.fsencode(entry.name)


class Refused(NamedTuple):
    """What cannot be carried to another machine, and why."""

    name: str
    fault: str


class InForce(NamedTuple):
    """The ignore files that speak about what is in one folder, the deepest first."""

    own: tuple[Rules, ...]
    git: tuple[Rules, ...]


class _Folder(NamedTuple):
    """A folder to look into.

    Args:
        prefix: Its name and ``/``; empty for the source.
        path: Where it is read.
        trail: Device and inode of the folders that were entered through links, outermost first.
    """

    prefix: str
    path: str
    in_force: InForce
    trail: tuple[tuple[int, int], ...] = ()


class _Walk:
    """One walk over the source."""

    def __init__(self, source: Path, root: str, skipped: str, *, follow_links: bool) -> None:
        self._source = source
        self._root = root
        self._skipped = skipped
        self._follow_links = follow_links
        self.entries: list[SourceEntry] = []
        self.left_out: list[LeftOut] = []
        self.refused: list[Refused] = []

    def run(self) -> None:
        """Look at everything."""
        with reading(self._source, "."):
            outer = tuple(reversed(ignore.outer(self._root)))
        waiting = [_Folder("", self._root, InForce((), outer))]
        while waiting:
            waiting += self._look_into(waiting.pop())

    def _look_into(self, folder: _Folder) -> list[_Folder]:
        prefix = folder.prefix
        with reading(self._source, prefix or "."), os.scandir(folder.path) as found:
            children = list(found)
        in_force = with_rules_of(self._source, folder.path, prefix, children, folder.in_force)
        inner: list[_Folder] = []
        name = prefix or "."
        # One guard for all, and not one for each: there may be ten thousand.
        with _guarded(self._source, lambda: name):
            for child in children:
                name = prefix + child.name
                if name != self._skipped:
                    inner += self._look_at(name, child, folder, in_force)
        return inner

    def _look_at(
        self, name: str, child: os.DirEntry[str], folder: _Folder, in_force: InForce
    ) -> Iterable[_Folder]:
        """Decide about one child; return the folders that it leads into."""
        is_folder = child.is_dir(follow_symlinks=False)
        verdict = judge(name, child, is_folder, in_force)
        if verdict.reason:
            self.left_out.append(LeftOut(name + "/" * is_folder, verdict.reason))
            return ()
        if child.is_symlink():
            return self._link(name, child, verdict, folder, in_force)
        status = child.stat(follow_symlinks=False)
        if is_folder:
            self.entries.append(SourceEntry(name, FOLDER, status.st_mode & 0o777))
            return (_Folder(name + "/", child.path, in_force, folder.trail),)
        self._take(name, status, verdict, child.path if folder.trail else "", child.path)
        return ()

    def _take(
        self, name: str, status: os.stat_result, verdict: Verdict, real: str, path: str
    ) -> None:
        """Add a file, unless it is something else or a key."""
        if not stat.S_ISREG(status.st_mode):
            kind = _SPECIAL.get(stat.S_IFMT(status.st_mode), "is no file")
            self.refused.append(Refused(name, kind))
            return
        if secret_names.may_be_key(name) and not verdict.is_named:
            reason = secret_names.key_reason(path, status.st_size)
            if reason:
                self.left_out.append(LeftOut(name, reason))
                return
        seen = Seen(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        self.entries.append(
            SourceEntry(name, FILE, status.st_mode & 0o777, seen, "", verdict.is_named, real)
        )

    def _link(
        self,
        name: str,
        child: os.DirEntry[str],
        verdict: Verdict,
        folder: _Folder,
        in_force: InForce,
    ) -> list[_Folder]:
        """Keep a link whose end lies in the source; refuse or follow one whose end does not.

        It must stay inside by where it really leads, and by its letters as well: the other machine
        may lack the folders that lead it back.
        """
        target = os.readlink(child.path)  # noqa: PTH115 (a Path would tidy the target up)
        real = os.path.realpath(child.path)
        if folder.trail or not _is_inside(real, self._root):
            if self._follow_links:
                return self._follow(name, real, target, verdict, folder, in_force)
            self.refused.append(Refused(name, f"is a link to {shown(target)}, outside the source"))
            return []
        letters = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if posixpath.isabs(target) or letters.split("/", 1)[0] == "..":
            target = os.path.relpath(real, posixpath.dirname(child.path))
        self.entries.append(SourceEntry(name, LINK, 0o777, target=target))
        return []

    def _follow(
        self,
        name: str,
        real: str,
        target: str,
        verdict: Verdict,
        folder: _Folder,
        in_force: InForce,
    ) -> list[_Folder]:
        try:
            status = Path(real).stat()
        except OSError as error:
            fault = f"is a link to {shown(target)}: {came_back(error)}"
            self.refused.append(Refused(name, fault))
            return []
        if not stat.S_ISDIR(status.st_mode):
            self._take(name, status, verdict, real, real)
            return []
        place = (status.st_dev, status.st_ino)
        if place in folder.trail or _is_inside(self._root, real):
            fault = f"is a link to {shown(target)}, a folder that it lies in itself"
            self.refused.append(Refused(name, fault))
            return []
        self.entries.append(SourceEntry(name, FOLDER, status.st_mode & 0o777))
        return [_Folder(name + "/", real, in_force, (*folder.trail, place))]


@contextmanager
def _guarded(source: Path, name: Callable[[], str]) -> Iterator[None]:
    """Translate what the file system says about the path that ``name`` names then."""
    try:
        yield
    except OSError as error:
        raise translated(source, name(), error) from error


_SPECIAL = {
    stat.S_IFSOCK: "is a socket",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


def with_rules_of(
    source: Path,
    path: str,
    prefix: str,
    children: Iterable[os.DirEntry[str]],
    in_force: InForce,
) -> InForce:
    """Return the rules that are in force inside a folder: its own ignore files come first."""
    own, git = in_force
    for child in sorted(children, key=lambda child: child.name):
        # A link is no ignore file, as in git.
        if child.name in (GITIGNORE, CLOUDJOBIGNORE) and child.is_file(follow_symlinks=False):
            with reading(source, prefix + child.name):
                rules = ignore.parse_own(path, prefix, child.name)
            if child.name == CLOUDJOBIGNORE:
                own = (rules, *own)
            else:
                git = (rules, *git)
        elif child.name == ".git" and prefix:
            with reading(source, prefix + child.name):
                git = (ignore.of_repository(path, prefix), *git)
    return InForce(own, git)


def judge(name: str, child: os.DirEntry[str], is_folder: bool, in_force: InForce) -> Verdict:
    """Decide about one path: ``.cloudjobignore`` first, then defaults, ``.gitignore``, secrets.

    ``!keep.py`` there takes back what ``.gitignore`` says. Only a line that spells a name out
    takes back a default or a secret: ``!*.py`` must not bring caches and keys along.
    """
    base = child.name
    word = _last_word(in_force.own, name, base, is_folder)
    if word and (word.ignores or word.is_named):
        return Verdict(word.rule) if word.ignores else Verdict("", word.rule, True)
    default = _default_reason(child, is_folder)
    if default:
        return Verdict(default)
    git_word = None if word else _last_word(in_force.git, name, base, is_folder)
    if git_word and git_word.ignores:
        return Verdict(git_word.rule)
    reason = secret_names.reason(base, is_folder)
    if reason:
        return Verdict(reason)
    keeps = word or git_word
    return Verdict("", keeps.rule) if keeps else _GOES


_GOES = Verdict()


def _last_word(
    rules: tuple[Rules, ...], name: str, base: str, is_folder: bool
) -> ignore.Word | None:
    """Return what the deepest ignore file that mentions ``name`` says about it."""
    for each in rules:
        word = each.word(name, base, is_folder)
        if word is not None:
            return word
    return None


def _default_reason(child: os.DirEntry[str], is_folder: bool) -> str:
    if child.name in _DEFAULT_NAMES:
        return f"left out by default: {child.name}"
    if child.name.endswith(".pyc"):
        return "left out by default: *.pyc"
    # Through a link too: a virtual environment is of no use on another machine.
    if is_folder or child.is_symlink():
        marker = posixpath.join(child.path, "pyvenv.cfg")
        if os.path.isfile(marker):  # noqa: PTH113 (a Path raises where it may not look)
            return "left out by default: a virtual environment"
    return ""


def _check_folder(source: Path) -> None:
    with reading(source, "."):
        if source.is_dir():
            return
        what = "not a folder" if source.exists() else "no such folder"
    raise PackageError(f"pack {shown(source)}: {what}", hint="is --source right?")


def _check_refused(source: Path, refused: list[Refused]) -> None:
    if not refused:
        return
    refused.sort()
    more = len(refused) - _LISTED
    listed = [f"{shown(name)} {fault}" for name, fault in refused[:_LISTED]]
    has_links = any(" link to " in each.fault for each in refused)
    raise PackageError(
        f"pack {shown(source)}: {'; '.join(listed)}" + (f"; and {more} more" if more > 0 else ""),
        hint=f"leave it out with a line in {CLOUDJOBIGNORE}; "
        + ("--follow-links takes along what links lead to; " if has_links else "")
        + "data that lies elsewhere reaches a job with --input",
    )


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
