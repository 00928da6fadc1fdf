"""Decides what goes into a package, from names, ``stat`` and ignore files alone.

``scan`` is for packing; ``explain`` reports which rule decides about one path.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.model.rules import name_on_nodes
from cloudjob.package import ignore, secrets
from cloudjob.package.ignore import GITIGNORE, IgnoreDecision, IgnoreRules
from cloudjob.package.messages import CLOUDJOBIGNORE, reading, reason_of, shown, source_error
from cloudjob.package.tree import (
    FILE,
    FOLDER,
    LINK,
    FileStat,
    LeftOut,
    Rule,
    SourceEntry,
    Tree,
)

# Never needed by a job; left out regardless of ignore files.
_DEFAULT_NAMES = frozenset(
    {
        ".cloudjob", ".git", ".hg", ".svn", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache",
        ".ruff_cache", ".ipynb_checkpoints", "node_modules", ".tox", ".nox", ".DS_Store",
    }
)  # fmt: skip
_LISTED = 10
_STATE_REASON = "the state of cloudjob on this machine: CLOUDJOB_HOME"
_SPECIAL = {
    stat.S_IFSOCK: "is a socket",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


class RefusedPath(NamedTuple):
    """A path that cannot be sent to another machine, and why.

    Args:
        may_follow: Whether it is a link whose target could be sent instead.
    """

    name: str
    problem: str
    may_follow: bool = False


class ScanResult(NamedTuple):
    """Everything in a source folder."""

    entries: list[SourceEntry]
    left_out: list[LeftOut]
    refused: list[RefusedPath]


def scan(
    source: Path,
    *,
    besides: Path | None = None,
    home: Path | None = None,
    follow_links: bool = False,
) -> Tree:
    """Decide which paths of ``source`` to pack, reading only ``stat`` and ignore files.

    Args:
        source: The user's folder.
        besides: A path that is never part of the package, even if it is in the source.
        home: ``$CLOUDJOB_HOME``, which is never part of the package either.
        follow_links: Pack what links outside the source point to, instead of refusing them.

    Raises:
        PackageError: A folder cannot be read, or something cannot be sent to another machine.
    """
    tree = _walk(source, besides=besides, home=home, follow_links=follow_links)
    if tree.refused:
        raise _refused_error(source, sorted(tree.refused))
    # Bytes, not characters: the order must not depend on how a machine decodes names.
    tree.entries.sort(key=lambda entry: os.fsencode(entry.name))
    return Tree(source, tuple(tree.entries), tuple(sorted(tree.left_out)))


class Explanation(NamedTuple):
    """The decision about one path.

    Args:
        path: Relative to the source; a folder's ends with ``/``.
        is_packed: Whether it is in the package.
        rule: The line, as ``FILE:LINE: TEXT``, or the default that decided.
        decided_at: The parent folder that is left out as a whole; else ``path`` itself.
    """

    path: str
    is_packed: bool
    rule: str
    decided_at: str


def explain(
    source: Path, path: str, *, home: Path | None = None, follow_links: bool = False
) -> Explanation:
    """Return the decision about ``path``, relative to the source or absolute.

    Raises:
        PackageError: There is no such path in the source, or the source cannot be read.
    """
    name = _name(source, path)
    tree = _walk(source, home=home, follow_links=follow_links)
    for entry in tree.entries:
        if entry.name == name:
            listed = name + "/" if entry.kind == FOLDER else name
            return Explanation(listed, True, entry.kept_by or "no rule leaves it out", listed)
    for refused in tree.refused:
        if refused.name == name:
            return Explanation(name, False, f"refused: it {refused.problem}", name)
    for out in tree.left_out:
        if covers(out.path, name):
            return Explanation(name, False, out.reason, out.path)
    raise PackageError(
        f"looking for {shown(path)}: no such file in {shown(source)}",
        hint="the path is relative to --source",
    )


def _name(source: Path, path: str) -> str:
    """Return a path as the package would name it."""
    normal = posixpath.normpath(path)
    if posixpath.isabs(normal):
        # The last segment may be a link: explain the link, not its target.
        above = os.path.realpath(posixpath.dirname(normal))
        normal = os.path.relpath(
            posixpath.join(above, posixpath.basename(normal)), os.path.realpath(source)
        )
    if normal == "." or normal.split("/", 1)[0] == "..":
        raise PackageError(
            f"looking for {shown(path)}: not in the source {shown(source)}",
            hint="the path is relative to --source",
        )
    return normal


def covers(left_out: str, name: str) -> bool:
    """Whether the left-out path is ``name`` or one of its parent folders."""
    return left_out.rstrip("/") == name or (left_out.endswith("/") and name.startswith(left_out))


def _walk(
    source: Path, *, besides: Path | None = None, home: Path | None, follow_links: bool
) -> ScanResult:
    """Return everything in ``source``, including refused paths.

    Raises:
        PackageError: A folder cannot be read.
    """
    with reading(source, "."):
        if not source.is_dir():
            what = "not a folder" if source.exists() else "no such folder"
            raise PackageError(f"packing {shown(source)}: {what}", hint="is --source right?")
        if _place(source) == _place(home):
            raise PackageError(
                f"packing {shown(source)}: it contains {_STATE_REASON}", hint="is --source right?"
            )
        root = os.path.realpath(source)
        settings = ignore.git_settings(root)
        outer = ignore.outer_rules(root, settings)
    skipped = "" if besides is None else os.path.relpath(os.path.realpath(besides), root)
    walker = _Walker(source, root, skipped, _place(home), follow_links)
    waiting = [_Folder("", root, _ActiveRules((), outer, settings.folds_case))]
    while waiting:
        waiting += walker.list_folder(waiting.pop())
    return walker.found


# Device and inode of a folder.
_Place = tuple[int, int]


def _place(folder: Path | None) -> _Place | None:
    if folder is None or not folder.exists():
        return None
    status = folder.stat()
    return status.st_dev, status.st_ino


class _ActiveRules(NamedTuple):
    """The ignore files that apply in one folder, deepest first.

    Args:
        folds_case: Whether the repository there ignores the case of names.
    """

    own: tuple[IgnoreRules, ...]
    git: tuple[IgnoreRules, ...]
    folds_case: bool = False


class _Folder(NamedTuple):
    """A folder to scan.

    Args:
        prefix: Its name and ``/``; empty for the source.
        path: The path where it is read.
        followed: The folders that were entered through links, outermost first.
        ignored_by: The rule of git that ignores it: only what git tracks in it is packed.
    """

    prefix: str
    path: str
    active_rules: _ActiveRules
    followed: tuple[_Place, ...] = ()
    ignored_by: str = ""


class _Verdict(NamedTuple):
    """Whether a path is packed, and why.

    Args:
        reason: Why it is left out; empty if it is packed.
        rule: The kind of that reason.
        kept_by: The line that keeps it, when there is one.
        is_named: Whether that line names the path in full.
        ignored_by: The rule of git that does not apply, because git tracks the path.
    """

    reason: str = ""
    rule: Rule = Rule.IGNORE_FILE
    kept_by: str = ""
    is_named: bool = False
    ignored_by: str = ""


class _Walker:
    def __init__(
        self,
        source: Path,
        root: str,
        skipped: str,
        home: _Place | None,
        follow_links: bool,
    ) -> None:
        self._source = source
        self._root = root
        self._skipped = skipped
        self._home = home
        self._follow_links = follow_links
        # What git tracks although its rules ignore it, and the folders on the way there.
        self._tracked: set[str] = set()
        self._add_tracked("", root)
        self.found = ScanResult([], [], [])

    def list_folder(self, folder: _Folder) -> list[_Folder]:
        """Decide about everything in a folder; return its subfolders to scan."""
        prefix = folder.prefix
        with reading(self._source, prefix or "."), os.scandir(folder.path) as listed:
            children = list(listed)
        if prefix and any(child.name == ".git" for child in children):
            folder = self._in_repository(folder)
        active_rules = self._rules_inside(folder, children)
        inner: list[_Folder] = []
        for child in children:
            name = prefix + name_on_nodes(child.name)
            if name != self._skipped:
                try:
                    inner += self._visit(name, child, folder._replace(active_rules=active_rules))
                except OSError as error:
                    raise source_error(self._source, name, error) from error
        return inner

    def _in_repository(self, folder: _Folder) -> _Folder:
        """Return a folder with the rules of its own repository instead of those around it."""
        prefix, path = folder.prefix, folder.path
        with reading(self._source, prefix + ".git"):
            if not ignore.is_repository(path):
                return folder
            settings = ignore.git_settings(path)
            git = ignore.outer_rules(path, settings, prefix)
        self._add_tracked(prefix, path)
        active_rules = _ActiveRules(folder.active_rules.own, git, settings.folds_case)
        return folder._replace(active_rules=active_rules, ignored_by="")

    def _rules_inside(self, folder: _Folder, children: list[os.DirEntry[str]]) -> _ActiveRules:
        """Return the rules that apply inside a folder; its own ignore files come first."""
        rules_of_ours, git, folds_case = folder.active_rules
        prefix, path = folder.prefix, folder.path
        for child in sorted(children, key=lambda child: child.name):
            # As in git, a symbolic link does not count as an ignore file.
            if child.name in (GITIGNORE, CLOUDJOBIGNORE) and child.is_file(follow_symlinks=False):
                with reading(self._source, prefix + child.name):
                    text = Path(path, child.name).read_bytes()
                    rules = IgnoreRules(
                        prefix + child.name, text, prefix=prefix, folds_case=folds_case
                    )
                if child.name == CLOUDJOBIGNORE:
                    rules_of_ours = (rules, *rules_of_ours)
                else:
                    git = (rules, *git)
        return _ActiveRules(rules_of_ours, git, folds_case)

    def _add_tracked(self, prefix: str, folder: str) -> None:
        for name in ignore.tracked_files(folder):
            path = prefix + name
            while path != prefix.rstrip("/") and path not in self._tracked:
                self._tracked.add(path)
                path = posixpath.dirname(path)

    def _visit(self, name: str, child: os.DirEntry[str], folder: _Folder) -> Iterable[_Folder]:
        """Decide about one child; return it as a folder to scan if it is one."""
        is_folder = child.is_dir(follow_symlinks=False)
        verdict = self._decide(name, child, is_folder, folder)
        if verdict.reason:
            self.found.left_out.append(
                LeftOut(name + "/" * is_folder, verdict.reason, verdict.rule)
            )
            return ()
        if child.is_symlink():
            return self._add_link(name, child, verdict, folder)
        status = child.stat(follow_symlinks=False)
        if is_folder:
            return self._add_folder(name, child.path, status, verdict, folder)
        self._add_file(name, status, verdict, child.path if folder.followed else "", child.path)
        return ()

    def _add_folder(
        self, name: str, path: str, status: os.stat_result, verdict: _Verdict, folder: _Folder
    ) -> Iterable[_Folder]:
        if (status.st_dev, status.st_ino) == self._home:
            self.found.left_out.append(LeftOut(name + "/", _STATE_REASON, Rule.STATE))
            return ()
        mode = status.st_mode & 0o777
        self.found.entries.append(SourceEntry(name, FOLDER, mode, kept_by=verdict.kept_by))
        return (folder._replace(prefix=name + "/", path=path, ignored_by=verdict.ignored_by),)

    def _add_file(
        self, name: str, status: os.stat_result, verdict: _Verdict, real: str, path: str
    ) -> None:
        """Add a regular file that is not a private key."""
        if not stat.S_ISREG(status.st_mode):
            kind = _SPECIAL.get(stat.S_IFMT(status.st_mode), "is not a file")
            self.found.refused.append(RefusedPath(name, kind))
            return
        if name.endswith(secrets.KEY_SUFFIXES) and not verdict.is_named:
            reason = secrets.key_reason(path, status.st_size)
            if reason:
                self.found.left_out.append(LeftOut(name, reason, Rule.SECRET))
                return
        file_stat = FileStat(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        mode, is_named = status.st_mode & 0o777, verdict.is_named
        self.found.entries.append(
            SourceEntry(name, FILE, mode, file_stat, "", is_named, real, verdict.kept_by)
        )

    def _add_link(
        self, name: str, child: os.DirEntry[str], verdict: _Verdict, folder: _Folder
    ) -> Iterable[_Folder]:
        """Keep a link to a target inside the source; refuse or follow any other.

        Both its real target and its text must stay inside the source: the other machine may lack
        the folders through which a text leaves the source and returns to it.
        """
        target = os.readlink(child.path)  # noqa: PTH115 (a Path would normalise the target)
        real = os.path.realpath(child.path)
        if folder.followed or not _is_inside(real, self._root):
            if self._follow_links:
                return self._follow(name, real, target, verdict, folder)
            problem = f"is a link to {shown(target)}, outside the source"
            self.found.refused.append(RefusedPath(name, problem, may_follow=True))
            return ()
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if posixpath.isabs(target) or resolved.split("/", 1)[0] == "..":
            target = os.path.relpath(real, posixpath.dirname(child.path))
        self.found.entries.append(
            SourceEntry(name, LINK, 0o777, target=target, kept_by=verdict.kept_by)
        )
        return ()

    def _follow(
        self, name: str, real: str, target: str, verdict: _Verdict, folder: _Folder
    ) -> Iterable[_Folder]:
        try:
            status = Path(real).stat()
        except OSError as error:
            problem = f"is a link to {shown(target)}: {reason_of(error)}"
            self.found.refused.append(RefusedPath(name, problem))
            return ()
        if not stat.S_ISDIR(status.st_mode):
            self._add_file(name, status, verdict, real, real)
            return ()
        identity = (status.st_dev, status.st_ino)
        if identity in folder.followed or _is_inside(self._root, real):
            problem = f"is a link to {shown(target)}, a folder that contains the link"
            self.found.refused.append(RefusedPath(name, problem))
            return ()
        followed = (*folder.followed, identity)
        return self._add_folder(name, real, status, verdict, folder._replace(followed=followed))

    def _decide(
        self, name: str, child: os.DirEntry[str], is_folder: bool, folder: _Folder
    ) -> _Verdict:
        """Decide about a path: ``.cloudjobignore`` first, then defaults, git's rules, secrets.

        ``!keep.py`` there overrides ``.gitignore``. Only a line that names a path in full overrides
        a default or a secret: ``!*.py`` must not include caches and keys.
        """
        decision = _last_decision(folder.active_rules.own, name, is_folder)
        if decision and (decision.ignores or decision.is_named):
            if decision.ignores:
                return _Verdict(decision.rule)
            return _Verdict(kept_by=decision.rule, is_named=True)
        default = _default_reason(child, is_folder)
        if default:
            return _Verdict(default, Rule.DEFAULT)
        git = _PACKED if decision else self._git_verdict(name, is_folder, folder)
        if git.reason:
            return git
        reason = secrets.name_reason(child.name, is_folder)
        if reason:
            return _Verdict(reason, Rule.SECRET)
        return _Verdict(kept_by=decision.rule) if decision else git

    def _git_verdict(self, name: str, is_folder: bool, folder: _Folder) -> _Verdict:
        """Decide by the rules of git, which never apply to a file that git tracks."""
        decision = _last_decision(folder.active_rules.git, name, is_folder)
        rule = decision.rule if decision and decision.ignores else folder.ignored_by
        if not rule:
            return _Verdict(kept_by=decision.rule) if decision else _PACKED
        if name not in self._tracked:
            return _Verdict(rule)
        return _Verdict(kept_by=f"git tracks it, although {rule}", ignored_by=rule)


_PACKED = _Verdict()


def _last_decision(
    rules: tuple[IgnoreRules, ...], name: str, is_folder: bool
) -> IgnoreDecision | None:
    """Return the decision of the deepest ignore file that has a line for ``name``."""
    for each in rules:
        decision = each.decide(name, is_folder)
        if decision is not None:
            return decision
    return None


def _default_reason(child: os.DirEntry[str], is_folder: bool) -> str:
    if child.name in _DEFAULT_NAMES:
        return f"cloudjob's default: {child.name}"
    if child.name.endswith(".pyc"):
        return "cloudjob's default: *.pyc"
    # Also through a link: a virtual environment is of no use on another machine.
    if is_folder or child.is_symlink():
        marker = posixpath.join(child.path, "pyvenv.cfg")
        if os.path.isfile(marker):  # noqa: PTH113 (a Path raises where it may not look)
            return "cloudjob's default: a virtual environment"
    return ""


def _refused_error(source: Path, refused: list[RefusedPath]) -> PackageError:
    more = len(refused) - _LISTED
    listed = [f"{shown(each.name)} {each.problem}" for each in refused[:_LISTED]]
    may_follow = any(each.may_follow for each in refused)
    return PackageError(
        f"packing {shown(source)}: {'; '.join(listed)}"
        + (f"; and {more} more" if more > 0 else ""),
        hint=f"leave it out with a line in {CLOUDJOBIGNORE}; "
        + ("--follow-links packs what links point to; " if may_follow else "")
        + "pass data from elsewhere with --input",
    )


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
