"""Says of any path whether it goes into the package, and what decided."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.package import ignore, secret_names
from cloudjob.package.messages import reading, shown
from cloudjob.package.scan import InForce, Verdict, judge, with_rules_of


class Explained(NamedTuple):
    """What decided about one path.

    Args:
        path: Relative to the source; a folder's ends with ``/``.
        goes: Whether it is in the package.
        rule: The line, as ``FILE:LINE: TEXT``, or the default that decided.
        decided_at: The folder above that is left out as a whole; else ``path`` itself.
    """

    path: str
    goes: bool
    rule: str
    decided_at: str


def explain(source: Path, path: str, *, follow_links: bool = False) -> Explained:
    """Return what decided about ``path``, relative to the source or absolute.

    Raises:
        PackageError: There is no such path in the source, or the source cannot be read.
    """
    name = _name(source, path)
    for step in _steps(source, name):
        if step.verdict.reason:
            reason = step.verdict.reason
            return Explained(name, False, reason, _as_listed(step))
        if step.name == name:
            fault = _fault(source, step, follow_links)
            rule = fault or step.verdict.kept_by or "no rule leaves it out"
            return Explained(_as_listed(step), not fault, rule, _as_listed(step))
    raise PackageError(
        f"explain {shown(path)}: no such file in {shown(source)}",
        hint="the path is relative to --source",
    )


class _Step(NamedTuple):
    """A path on the way down, and what the rules say about it."""

    name: str
    child: os.DirEntry[str]
    verdict: Verdict


def _steps(source: Path, name: str) -> Iterator[_Step]:
    """Yield each folder on the way down to ``name``, and it, as far as they are there."""
    root = os.path.realpath(source)
    with reading(source, "."):
        in_force = InForce((), tuple(reversed(ignore.outer(root))))
    folder, prefix = root, ""
    for segment in name.split("/"):
        with reading(source, prefix or "."), os.scandir(folder) as found:
            children = {child.name: child for child in found}
        if segment not in children:
            return
        child = children[segment]
        in_force = with_rules_of(source, folder, prefix, children.values(), in_force)
        verdict = judge(prefix + segment, child, child.is_dir(follow_symlinks=False), in_force)
        yield _Step(prefix + segment, child, verdict)
        if not child.is_dir():
            return
        folder, prefix = child.path, f"{prefix}{segment}/"


def _fault(source: Path, step: _Step, follow_links: bool) -> str:
    """Return why what the rules let pass does not go all the same, or ""."""
    root = os.path.realpath(source)
    with reading(source, step.name):
        status = step.child.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            real = os.path.realpath(step.child.path)
            if (real + "/").startswith(root + "/") or follow_links:
                return ""
            return f"refused: a link that leads out of the source, to {shown(real)}"
        if stat.S_ISREG(status.st_mode):
            if secret_names.may_be_key(step.name) and not step.verdict.is_named:
                return secret_names.key_reason(step.child.path, status.st_size)
            return ""
    return "" if stat.S_ISDIR(status.st_mode) else "refused: neither a file, a folder nor a link"


def _as_listed(step: _Step) -> str:
    return step.name + "/" * step.child.is_dir(follow_symlinks=False)


def _name(source: Path, path: str) -> str:
    """Return a path as the package would have it."""
    given = posixpath.normpath(path)
    if posixpath.isabs(given):
        # Its last segment may be a link that is to be explained itself.
        above = os.path.realpath(posixpath.dirname(given))
        given = os.path.relpath(
            posixpath.join(above, posixpath.basename(given)), os.path.realpath(source)
        )
    if given == "." or given.split("/", 1)[0] == "..":
        raise PackageError(
            f"explain {shown(path)}: not in the source {shown(source)}",
            hint="the path is relative to --source",
        )
    return given
