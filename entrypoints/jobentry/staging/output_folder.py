"""The folder of an output on this node: its files, and which of them may be incomplete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
import time
from typing import NamedTuple

from jobentry.contract import manifest
from jobentry.contract.manifest import Others
from jobentry.node.local_ranks import RankFailure
from jobentry.objects.base import CHUNK_BYTES, TEMPORARY, ObjectError, opened, reason_of
from jobentry.system import linux

# Seconds without a change after which a file counts as complete.
SETTLE_S = 2.0
# The errors of a symbolic link that leads nowhere or to itself.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NOT_REMOVED = "a script may empty the folder of an output, but not remove it"


class Stamp(NamedTuple):
    """The metadata by which a change of a file is detected."""

    size_bytes: int
    modified_ns: int
    inode: int


class _Others(NamedTuple):
    """What a scan has found so far besides files; see ``Others``."""

    links: dict[str, str]
    modes: dict[str, int]
    folders: dict[str, int]
    left_out: dict[str, str]


class OutputFolder:
    """The files of one output, by their paths relative to the folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        # The real names of files that are stored under another name.
        self.aliases: dict[str, str] = {}
        # What the last scan found besides the contents of files.
        self.others = Others()
        # Files that are not part of this output as long as they are unchanged.
        self.ignored: dict[str, Stamp] = {}
        # Files that were open for writing at the last check, with their stamps.
        self._open: dict[str, Stamp | None] = {}
        self._checked_at = 0.0

    def path_of(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, self.aliases.get(name, name))

    def stamp(self, name: str) -> Stamp | None:
        """Return the stamp of a file; None if it does not exist or is not a regular file."""
        with contextlib.suppress(OSError):
            return _stamp(self.path_of(name))
        return None

    def scan(self, problems: list[str]) -> dict[str, Stamp]:
        """Return the files, following links to files but not to folders; note everything else.

        Args:
            problems: Gets a message about every file and folder that cannot be read.

        Raises:
            ObjectError: The folder itself cannot be read, which must not look like an empty one.
        """
        try:
            os.listdir(self.path)
        except OSError as error:
            hint = _NOT_REMOVED if error.errno in _ABSENT else ""
            message = f"reading the folder {self.path}: {reason_of(error)}"
            raise ObjectError(message, hint) from error
        stamp_of: dict[str, Stamp] = {}
        others = _Others({}, {}, {}, {})
        # Not recursive, as Python's recursion limit is about a thousand folders.
        waiting = [""]
        while waiting:
            parent = waiting.pop()
            try:
                folders, names, reserved = _children(self.path_of(parent), is_top=not parent)
            except OSError as error:
                problems.append(f"{self.path_of(parent)}: {reason_of(error)}")
                continue
            others.left_out.update({parent + name: manifest.RESERVED for name in reserved})
            for name in (parent + name for name in names):
                try:
                    self._note(name, stamp_of, others)
                except OSError as error:
                    problems.append(f"{self.path_of(name)}: {reason_of(error)}")
            paths = [parent + name for name in folders]
            others.folders.update((name, _mode(self.path_of(name))) for name in paths)
            waiting += [name + "/" for name in paths]
        self.others = Others(*others)
        return stamp_of

    def _note(self, name: str, stamp_of: dict[str, Stamp], others: _Others) -> None:
        """Add a file to ``stamp_of``, and anything else to ``others``."""
        path = self.path_of(name)
        stamp = _stamp(path)
        is_link = os.path.islink(path)
        target = _target_inside(self.path, name) if is_link else ""
        if stamp is not None and stamp != self.ignored.get(name):
            stamp_of[name] = stamp
            others.modes[name] = _mode(path)
            others.left_out.update({name: manifest.COPIED} if is_link and not target else {})
        if target:
            others.links[name] = target
        elif stamp is None and os.path.lexists(path):
            others.left_out[name] = manifest.OUTSIDE if is_link else manifest.SPECIAL

    def note_open_files(self, *, is_new_round: bool = False) -> None:
        """Note which files are open for writing, besides those noted earlier in this round."""
        if is_new_round:
            self._open = {}
        with contextlib.suppress(OSError):
            checked_at = time.time()
            names = _open_for_writing(self.path)
            self._checked_at = checked_at
            self._open.update({name: self.stamp(name) for name in names})

    def open_files(self, seen: dict[str, Stamp]) -> set[str]:
        """Return the files that have not changed since they were last seen open for writing."""
        return {name for name, stamp in self._open.items() if seen.get(name, stamp) == stamp}

    def possibly_truncated(
        self, seen: dict[str, Stamp], rank_failure: RankFailure | None
    ) -> set[str]:
        """Return the files that may be incomplete because the ranks of this node failed.

        A script that exits may truncate only the file that it is writing. A script that is killed
        may have had any file open for a long time, unless a check has shown that it was closed.
        """
        if rank_failure is None:
            return set()
        since_s = rank_failure.at_s - SETTLE_S
        if rank_failure.is_kill:
            since_s = min(since_s, self._checked_at)
        recent = {name for name, stamp in seen.items() if stamp.modified_ns > since_s * 1e9}
        return self.open_files(seen) | {
            name for name in recent if not _is_renamed(self.path_of(name))
        }


def digest(path: str, size_bytes: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first ``size_bytes``."""
    sha256 = hashlib.sha256()
    remaining_bytes = sys.maxsize if size_bytes is None else size_bytes
    with opened(path) as file:
        while remaining_bytes > 0:
            chunk = file.read(min(remaining_bytes, CHUNK_BYTES))
            if not chunk:
                break
            sha256.update(chunk)
            remaining_bytes -= len(chunk)
    return sha256.hexdigest()


def _children(folder: str, *, is_top: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the folders in a folder, of everything else, and those that are ours."""
    folders: list[str] = []
    others: list[str] = []
    reserved: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            names = folders if is_folder else others
            is_ours = entry.name.startswith(TEMPORARY) or (is_top and entry.name == manifest.FOLDER)
            (reserved if is_ours else names).append(entry.name)
    return folders, others, reserved


def _stamp(path: str) -> Stamp | None:
    """Return the stamp of a file; None if it does not exist or is not a regular file.

    Raises:
        OSError: The file exists but cannot be accessed; its path may be too long.
    """
    try:
        facts = os.stat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    if not stat.S_ISREG(facts.st_mode):
        return None
    return Stamp(facts.st_size, facts.st_mtime_ns, facts.st_ino)


def _mode(path: str) -> int:
    """Return the permission bits of a file or a folder."""
    with contextlib.suppress(OSError):
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777
    return 0o755


def _target_inside(top: str, name: str) -> str:
    """Return where a link leads to, relative to its folder, if that is in ``top``; else empty.

    Scripts often make links with absolute paths, and a folder has several paths on a node.
    """
    target = os.readlink(os.path.join(top, name))
    if target != "/":
        target = target.rstrip("/")
    plain = "/".join(part for part in target.split("/") if part not in ("", ".")) or "."
    if not target.startswith("/") and manifest.is_link(name, plain):
        return plain
    folder = os.path.dirname(os.path.join(top, name))
    path = os.path.join(os.path.realpath(os.path.join(folder, os.path.dirname(target))), "")
    inside = _inside(top, os.path.normpath(path + os.path.basename(target)))
    if inside is None:
        return ""
    relative = os.path.relpath(inside or ".", os.path.dirname(name) or ".")
    return relative if manifest.is_link(name, relative) else ""


def _inside(top: str, path: str) -> str | None:
    """Return a path relative to the folder ``top``, which may have another name; else None."""
    facts = os.stat(top)
    rest: list[str] = []
    while True:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), facts):
                return "/".join(reversed(rest))
        path, name = os.path.split(path)
        if not name:
            return None
        rest.append(name)


def _is_renamed(path: str) -> bool:
    """Whether a file was renamed after its last write, as complete files often are."""
    with contextlib.suppress(OSError):
        facts = os.stat(path)
        return facts.st_ctime_ns > facts.st_mtime_ns
    return False


# -- files that are open for writing, from /proc --------------------------------------------------


def _open_for_writing(folder: str) -> set[str]:
    """Return the paths, relative to ``folder``, of files below it that are open for writing.

    Processes of other users, whose files this process may not list, are left out.
    """
    top = os.path.join(os.path.realpath(folder), "")
    return {
        path[len(top) :]
        for process in linux.processes()
        for number, path in linux.open_files(process)
        if path.startswith(top) and _is_writable("/proc/%d/fdinfo/%s" % (process, number))
    }


def _is_writable(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        # "pos: 0", then "flags: 0100001", in octal digits.
        flags = int(file.read().split(b"flags:")[1].split()[0], 8)
        # Not os.O_ACCMODE, which PyPy does not have.
        return bool(flags & (os.O_WRONLY | os.O_RDWR))
    return False
