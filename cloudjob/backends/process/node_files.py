"""What the nodes of a job see of this machine's files, where they have folders of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from cloudjob.backends.encoding import file_path
from cloudjob.backends.process import isolation
from cloudjob.backends.process.isolation import Mount
from cloudjob.model.submission import Submission


class Files(NamedTuple):
    """What a node sees of this machine's files below the folders that are private to nodes.

    Args:
        moved: The files and folders that have another path on the node, with that path.
        mounts: The folders that the entry writes to, with their paths on the node.
        named: What the job names: a node has its own version of it.
        shown: What the node can only read, with its path there.
    """

    moved: Mapping[str, str] = MappingProxyType({})
    mounts: tuple[Mount, ...] = ()
    named: tuple[str, ...] = ()
    shown: tuple[Mount, ...] = ()

    def on_node(self, path: str) -> str:
        """Return the path of a file on the node."""
        for folder, there in self.moved.items():
            if _is_in(path, (folder,)):
                return there + path[len(folder) :]
        return path


def files_of(submission: Submission, places: Iterable[str], home: Path) -> Files:
    """Return what the nodes of a job see of this machine's files.

    Args:
        places: What they need of its programs.
        home: The folder of cloudjob's state.
    """
    spec = submission.spec
    record = file_path(submission.record_uri)
    outputs = filter(None, (file_path(uri) for _, uri in submission.outputs))
    record_folders = [str(Path(record).parent)] if record else []
    written = {path: os.path.realpath(path) for path in (str(home), *record_folders, *outputs)}
    objects = map(file_path, (submission.code.uri, *submission.code.layers, *spec.inputs.values()))
    read = {path: os.path.realpath(path) for path in objects if path and not _is_in(path, written)}
    # A node can only read what secrets name, and no message names it.
    keys = isolation.paths_named_in((*submission.access.values(), *spec.secrets.values()))
    texts = (spec.source, spec.script, *spec.args, *spec.env.values())
    named = isolation.paths_named_in(texts)
    # The current folder may be one of Python's, too.
    readable = tuple(mount for mount in shown_of((*places, *keys)) if mount[0] not in named)
    return Files(
        moved={
            path: isolation.path_on_node(real)
            for path, real in (written | read).items()
            if isolation.is_private(path) or isolation.is_private(real)
        },
        mounts=_mounts(written.values()),
        named=besides(readable, named),
        # An input may have links to folders beside it, so the entry sees these, too.
        shown=(*readable, *_mounts(map(_top, read.values()))),
    )


def shown_of(paths: Iterable[str]) -> tuple[Mount, ...]:
    """Return those of these paths, and of their real paths, that private folders would hide."""
    both = (item for path in paths if path for item in (path, os.path.realpath(path)))
    return tuple((path, path) for path in dict.fromkeys(both) if isolation.is_private(path))


def besides(mounts: Iterable[Mount], named: Iterable[str]) -> tuple[str, ...]:
    """Return what a job names, without what a node can read already."""
    readable = [path for path, _ in mounts]
    return tuple(path for path in named if not _is_in(path, readable))


def places_of(path: str, *programs: str) -> tuple[str, ...]:
    """Return what nodes need of this machine's programs: folders of PATH, and those of Python."""
    candidates = [item for item in (*path.split(os.pathsep), *sys.path) if item.startswith("/")]
    candidates += (item for program in programs for item in _prefixes(program))
    # Programs find their libraries and data beside their own folder.
    beside = (str(Path(item).parent) for item in candidates if Path(item).name in ("bin", "sbin"))
    return tuple(dict.fromkeys((*candidates, *beside)))


def changes_of(paths: Iterable[str], folder: str) -> tuple[tuple[str, str], ...]:
    """Return folders of this machine, each with the folder for a node's changes of it.

    Args:
        folder: The start of the paths of the folders that hold the changes.
    """
    return tuple((path, f"{folder}-{n}") for n, path in enumerate(paths))


def _mounts(paths: Iterable[str]) -> tuple[Mount, ...]:
    return tuple(
        (real, isolation.path_on_node(real))
        for real in dict.fromkeys(paths)
        if isolation.is_private(real)
    )


def _top(path: str) -> str:
    """Return the entry of a private folder that a path leads through, else the path itself."""
    folder = next((root for root in isolation.OWN if path.startswith(f"{root}/")), "")
    name = path[len(folder) + 1 :].partition("/")[0]
    return f"{folder}/{name}" if folder else path


def _prefixes(program: str) -> Iterator[str]:
    for name in (program, os.path.realpath(program)):
        prefix = str(Path(name).parents[1])
        # A program may be directly in a private folder; that folder itself is the node's.
        yield prefix if isolation.is_private(prefix) else name


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)
