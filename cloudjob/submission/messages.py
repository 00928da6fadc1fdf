"""The messages of a submit about its launcher, its ranks and its package."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from cloudjob.model.progress import Progress
from cloudjob.model.text import counted, size_text
from cloudjob.package import CodePackage
from cloudjob.package.claims import StoredLayers
from cloudjob.package.messages import shown
from cloudjob.package.tree import LINK, Rule
from cloudjob.submission.launcher_choice import Choice

_SHOWN_LEFT_OUT = 5
# The paths that are named on one line.
_NAMED = 3


def launcher(choice: Choice | None) -> Iterator[Progress]:
    """Report the launcher that was chosen, if the job named none."""
    if choice:
        yield Progress("note", f"launcher {choice.launcher}: {choice.why}")


def ranks(chosen: str) -> Iterator[Progress]:
    """Report the number of ranks that was chosen; nothing if it is obvious."""
    if chosen:
        yield Progress("note", chosen)


def left_out(package: CodePackage) -> Iterator[Progress]:
    """Report what a job may miss: each file that may hold a secret, and the others on one line."""
    ignored = [shown(item.path) for item in package.left_out if item.rule is Rule.IGNORE_FILE]
    if ignored:
        rest = f" and {len(ignored) - _NAMED} more" if len(ignored) > _NAMED else ""
        text = f"left out of the package by ignore rules: {', '.join(ignored[:_NAMED])}{rest}"
        yield Progress("note", f"{text}; `cloudjob package ls` shows all")
    yield from _links(package)
    found = [item for item in package.left_out if item.rule in (Rule.SECRET, Rule.STATE)]
    for path, reason, _ in found[:_SHOWN_LEFT_OUT]:
        yield Progress("note", f"left out of the package: {path}: {reason}")
    if len(found) > _SHOWN_LEFT_OUT:
        more = len(found) - _SHOWN_LEFT_OUT
        yield Progress("note", f"… and {more} more; `--dry-run --json` lists all")


def _links(package: CodePackage) -> Iterator[Progress]:
    """Report links in the package to files that are left out."""
    left_out = {item.path.rstrip("/") for item in package.left_out}
    lost = []
    for link in (known.entry for known in package.source_cache.entries):
        place = posixpath.join(posixpath.dirname(link.name), link.target)
        if link.kind == LINK and not left_out.isdisjoint(_with_parents(posixpath.normpath(place))):
            lost.append(f"{shown(link.name)} -> {shown(link.target)}")
    if lost:
        rest = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        listed = ", ".join(lost[:_NAMED])
        yield Progress("warning", f"links whose target is left out of the package: {listed}{rest}")


def _with_parents(path: str) -> Iterator[str]:
    while path not in ("", "/"):
        yield path
        path = posixpath.dirname(path)


def sent(package: CodePackage, kept: StoredLayers) -> Progress:
    """Report how much of the package was sent."""
    total = size_text(sum(layer.size_bytes for layer in kept.layers))
    layers = "1 layer new" if kept.sent_layers else "nothing new"
    message = (
        f"sent {size_text(kept.sent_bytes)} of {total}, {layers}: {counted(package.files, 'file')}"
    )
    return Progress("sent", message)
