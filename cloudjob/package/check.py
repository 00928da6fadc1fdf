"""Checks the script and the size before any file of the source is read."""

from __future__ import annotations

import heapq
import os
import posixpath
import re
import unicodedata
from collections import Counter

from cloudjob.errors import PackageError
from cloudjob.model.text import different_sizes, size_text
from cloudjob.package.messages import CLOUDJOBIGNORE, reading, shown
from cloudjob.package.scan import covers
from cloudjob.package.tree import FILE, FOLDER, Tree

_LISTED = 10
_RELATIVE = "the script's path is relative to --source"


def script(tree: Tree, path: str) -> None:
    """Check that the job will find its script.

    Raises:
        PackageError: The script is left out, is not a file, or does not exist.
    """
    doing = f"packing {shown(tree.source)}: script {shown(path)}"
    name = posixpath.normpath(path)
    if posixpath.isabs(path) or name.split("/", 1)[0] == "..":
        raise PackageError(f"{doing}: outside the source", hint=_RELATIVE)
    with reading(tree.source, name):
        full = tree.source / name
        real = os.path.relpath(os.path.realpath(full), os.path.realpath(tree.source))
        for out, reason, _ in tree.left_out:
            if covers(out, name) or covers(out, real):
                why = reason if out in (name, real) else f"in {shown(out)}, {reason}"
                hint = f"a line !{shown(out)} in {CLOUDJOBIGNORE} keeps it"
                raise PackageError(f"{doing}: {why}", hint=hint)
        if full.is_dir():
            raise PackageError(f"{doing}: a folder", hint="name a file in it")
        if not full.is_file():
            raise PackageError(f"{doing}: no such file", hint=_nearest(tree, name))
        full.open("rb").close()
    names = {entry.name for entry in tree.entries}
    if name in names:
        return
    same = sorted(other for other in names if _folded(other) == _folded(name))
    if same:
        hint = "file names on nodes are case-sensitive, unlike on this machine"
        raise PackageError(f"{doing}: the file's name is {shown(same[0])}", hint=hint)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def size(tree: Tree, limit_bytes: int) -> None:
    """Refuse a source over the limit, by the sizes that ``stat`` returned.

    Raises:
        PackageError: The source is over the limit; the message lists the ten largest paths, each as
            the line of an ignore file that leaves it out.
    """
    total = sum(entry.size_bytes for entry in tree.entries)
    if total <= limit_bytes:
        return
    sizes: Counter[str] = Counter()
    for entry in tree.entries:
        if entry.kind == FILE:
            sizes[entry.name] += entry.size_bytes
            top, slash, _ = entry.name.partition("/")
            if slash:
                sizes[top + "/"] += entry.size_bytes
    largest = heapq.nsmallest(_LISTED, sizes.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{shown(ignore_line(path))} {size_text(size)}" for path, size in largest)
    size_now, limit = different_sizes(total, limit_bytes)
    raise PackageError(
        f"packing {shown(tree.source)}: {size_now} is over the limit of {limit}; largest: {listed}",
        hint=f"to leave one of them out, copy its name to {CLOUDJOBIGNORE}; pass data "
        "with --input; --source-limit-mb sets another limit",
    )


def ignore_line(path: str) -> str:
    """Return the line for an ignore file that matches exactly this path of the source."""
    text = re.sub(r"([*?\[\\])", r"\\\1", path)
    return "/" + re.sub(r" $", r"\\ ", text)


def _nearest(tree: Tree, name: str) -> str:
    import difflib

    names = [entry.name for entry in tree.entries if entry.kind != FOLDER]
    base = posixpath.basename(name)
    by_base = {posixpath.basename(other): other for other in reversed(names)}
    near = [by_base[base]] if base in by_base else difflib.get_close_matches(name, names, 1)
    near = near or [by_base[match] for match in difflib.get_close_matches(base, by_base, 1)]
    return f"did you mean {shown(near[0])}?" if near else _RELATIVE
