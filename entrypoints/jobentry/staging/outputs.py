"""Upload outputs while the ranks run and at the end, so that manifests list only complete objects.

A low-priority thread scans the output folders at intervals. It stores files that have changed and
are not being written, then writes the manifest that lists them. If the object with a file's plain
name is in the current manifest, the new version is first stored under another key, so that the
files of the current manifest stay as they are until the next manifest is written.

A *unit* is a file directly in the output folder, or a folder there with everything below it. A unit
waits as a whole while one of its files changes, but not for other units. A file that a process has
open for writing, or that was being written when a rank of this node failed, is also stored, and
marked as incomplete in the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from functools import partial
from typing import NamedTuple

from jobentry import objects
from jobentry.contract import env, manifest
from jobentry.contract.env import NodeEnv
from jobentry.contract.manifest import Kept, Manifest
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.log import log_message
from jobentry.node.journal import Journal, Transfer
from jobentry.node.local_ranks import BadEnd
from jobentry.objects.base import TEMPORARY, came_back, in_parallel, scheme_of, translated
from jobentry.staging.open_files import open_for_writing

# Seconds without a change after which a file counts as complete.
SETTLE_S = 2.0
# Scans in a row for which a unit may wait because one of its files is being written.
_PATIENCE = 10
# The minimum time between two manifests of one scan.
_COMMIT_S = 5.0
# The errors of a symbolic link that leads nowhere or to itself.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_SMALL_BYTES = 4 * 1024 * 1024
# Suffix for a file that was being written at the end, if its name belongs to a complete version.
ASIDE = ".incomplete"
# Small files to store between two checks of the time.
_BATCH = 64
_CHUNK_BYTES = 1024 * 1024
_THREADS = 4
_LOWEST_PRIORITY = 19


class OutputError(EntryError):
    """An output cannot be prepared or uploaded."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)


class _Stamp(NamedTuple):
    """The metadata by which a change of a file is detected."""

    size_bytes: int
    modified_ns: int
    inode: int


class Outputs:
    """The outputs of one node: prepared, uploaded while the ranks run, and uploaded at the end."""

    def __init__(self, node: NodeEnv, paths: NodePaths, journal: Journal | None = None) -> None:
        self._node = node
        self._journal = journal or Journal()
        self._all = [_Output(node, name, uri, paths.output(name)) for name, uri in node.outputs]
        self._has_ended = threading.Event()
        self._bad_end: BadEnd | None = None
        self._thread = threading.Thread(target=self._follow, name="outputs", daemon=True)
        self._faults: list[str] = []

    def prepare(self) -> None:
        """Create the folders, restore earlier files if wanted, and check that uploads work.

        Raises:
            OutputError: An output cannot be uploaded; reported now, not after hours of training.
        """
        for output in self._all:
            try:
                output.prepare()
            except (objects.ObjectError, OSError) as error:
                hint = getattr(error, "hint", "")
                raise OutputError(f"preparing the output {output.name}: {error}", hint) from error

    def start(self) -> None:
        """Start uploading what the ranks write.

        Raises:
            OutputError: The thread cannot be started.
        """
        if not self._all:
            return
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise OutputError(
                f"starting the thread that stores outputs: {error}",
                "raise the limit on processes and threads (ulimit -u, or the container's pids)",
            ) from error

    def look_for_writers(self) -> None:
        """Note which files are being written, before their writers are killed."""
        for output in self._all:
            output.look_for_writers()

    def hurry(self, bad_end: BadEnd | None = None) -> None:
        """Start the final upload of all files, as the ranks have ended.

        Args:
            bad_end: How the ranks of this node failed, if they did: files that were being written
                then are incomplete.
        """
        if not self._has_ended.is_set():
            self._bad_end = bad_end
            self._has_ended.set()

    def finish(self, limit_s: float, bad_end: BadEnd | None = None) -> str:
        """Upload all files within ``limit_s``; return an error message or ``""``.

        Args:
            bad_end: As for ``hurry``.
        """
        self.hurry(bad_end)
        if self._thread.ident is None:
            return ""
        self._thread.join(limit_s)
        problems = list(self._faults)
        left = ", ".join(output.name for output in self._all if not output.is_kept)
        if self._thread.is_alive():
            problems.append(
                f"uploading the output {left}: not done after {limit_s:g} s;"
                " the files uploaded before are complete"
            )
        elif left and not problems:
            problems.append(f"uploading the output {left}: its thread ended before it was done")
        for problem in problems:
            log_message(problem)
        return "; ".join(problems)

    def clashes(self) -> str:
        """Return a message about files that several nodes stored under one name, or ``""``."""
        problems = []
        for output in self._all:
            try:
                found = manifest.clashes(output.manifests(range(self._node.nodes)))
            except objects.ObjectError as error:
                log_message(f"comparing the outputs {output.name} of all nodes: {error}")
                continue
            for name, nodes in list(found.items())[:5]:
                listed = ", ".join(str(node) for node in nodes)
                problems.append(
                    f"uploading the output {output.name}: nodes {listed} all wrote {name!r},"
                    " and only one of these files is left"
                )
        for problem in problems:
            log_message(problem)
        if problems:
            log_message(
                "hint: use file names that differ between nodes, for example with VC_TASK_INDEX"
            )
        return "; ".join(problems)

    def _follow(self) -> None:
        with contextlib.suppress(OSError):
            # Only for this thread, so that training has priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        wait_s = self._node.output_sync_s or None
        while not self._has_ended.wait(wait_s):
            for output in self._all:
                output.transfer, commits = Transfer("checkpoint"), output.commits
                output.keep_now(self._has_ended)
                if output.commits > commits:
                    self._journal.note(output.transfer)
        with self._journal.during("outputs") as transfer:
            for output in self._all:
                output.transfer = transfer
                self._faults += output.keep_all(self._bad_end)


class _Output:
    """One output of this node.

    *Kept* files are in the last manifest; *stored* files are in the store but in no manifest yet.
    """

    def __init__(self, node: NodeEnv, name: str, uri: str, folder: str) -> None:
        self.name = name
        self.is_kept = False
        self._node = node
        self._uri = uri
        self._folder = folder
        self._kept: dict[str, Kept] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._stored: dict[str, tuple[_Stamp, Kept]] = {}
        # Files that an earlier run kept and this one has not written: they stay.
        self._earlier: set[str] = set()
        # Files that were restored from other nodes' manifests.
        self._foreign: dict[str, _Stamp] = {}
        self._patience: dict[str, int] = {}
        # Files that were open for writing at the last check, with their stamps.
        self._open: dict[str, _Stamp | None] = {}
        self._looked_at = 0.0
        # Output name -> local name, where the two differ.
        self._local: dict[str, str] = {}
        self._last_error = ""
        self.transfer = Transfer("")
        # How many manifests it has written since the ranks started.
        self.commits = 0

    # -- before the ranks -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the folder, restore earlier files if wanted, and write a first manifest."""
        objects.check(self._uri)
        if scheme_of(self._uri) in ("http", "https"):
            raise objects.ObjectError(
                f"{objects.shown(self._uri)}: outputs cannot be stored on a web server",
                "give a file://, s3:// or obs:// URI",
            )
        with translated("make folder", self._folder):
            os.makedirs(self._folder, exist_ok=True)
        own = self._read(self._node.node)
        self._kept = {file.name: file for file in own.files}
        self._earlier = set(self._kept)
        if self._node.restore_outputs != env.RESTORE_NONE:
            self._restore()
        self._write_manifest(self._kept)

    def manifests(self, nodes: range) -> list[Manifest]:
        """Return the manifests of these nodes; an empty one for a node without."""
        return list(in_parallel([partial(self._read, node) for node in nodes], 16))

    def _read(self, node: int) -> Manifest:
        uri = self._below(manifest.key(node))
        try:
            return manifest.load(objects.read(uri))
        except objects.ObjectMissing:
            return Manifest(node=node)
        except manifest.ManifestError as error:
            raise objects.ObjectError(
                f"read manifest: {uri}: {error}", "give the output its own URI"
            ) from error

    def _restore(self) -> None:
        """Restore the files of an earlier run; a file that exists locally stays."""
        found = [Manifest(node=self._node.node, files=tuple(self._kept.values()))]
        if self._node.restore_outputs == env.RESTORE_ALL:
            found += self._others()
        files: dict[str, tuple[int, Kept]] = {}
        for one in found:
            for file in one.files:
                # A script could take an incomplete file for a checkpoint.
                if not file.is_incomplete:
                    files.setdefault(file.name, (one.node, file))

        tasks = [partial(self._bring_back, *pair) for pair in files.values()]
        for _ in in_parallel(tasks, _THREADS):
            pass
        self._earlier = {name for name, file in self._kept.items() if file.is_incomplete}
        if files:
            total = sum(file.size_bytes for _, file in files.values())
            log_message(f"output {self.name}: {len(files)} files of {total} bytes restored")

    def _others(self) -> list[Manifest]:
        names = (entry.name for entry in objects.list(self._below(manifest.FOLDER) + "/node-"))
        nodes = {manifest.node_of("node-" + name) for name in names}
        return [self._read(node) for node in sorted(nodes - {self._node.node, -1})]

    def _bring_back(self, node: int, file: Kept) -> None:
        path = os.path.join(self._folder, file.name)
        if not os.path.lexists(path):
            objects.fetch(self._below(file.key), path, sha256=file.sha256)
            os.utime(path, ns=(file.modified_ns, file.modified_ns))
        stamp = _stamp(path)
        if stamp is None or stamp.size_bytes != file.size_bytes:
            return
        if node != self._node.node:
            self._foreign[file.name] = stamp
        elif stamp.modified_ns == file.modified_ns:
            self._stamps[file.name] = stamp

    # -- while the ranks run ----------------------------------------------------------------------

    def keep_now(self, has_ended: threading.Event) -> None:
        """Upload changed files that are not being written; errors are retried at the next scan."""
        try:
            self._keep_quiet(has_ended)
            self._last_error = ""
        # Any error (no memory, no thread) is retried at the next scan; only the last scan counts.
        except Exception as error:  # noqa: BLE001
            message = f"uploading the output {self.name} while the job runs: {_came_back(error)}"
            if message != self._last_error:
                log_message(message + "; trying again")
            self._last_error = message

    def _keep_quiet(self, has_ended: threading.Event) -> None:
        """Upload the units in which nothing changes for a while.

        Raises:
            OutputError: Some files could not be stored; the others were.
        """
        seen = self._scan([])
        if self._is_as_kept(seen) or has_ended.wait(SETTLE_S):
            return
        self._open = {}
        self.look_for_writers()
        again = self._scan([])
        busy = {name for name in {**seen, **again} if seen.get(name) != again.get(name)}
        held = self._held({_unit(name) for name in busy})
        quiet = {name: stamp for name, stamp in again.items() if name not in busy}
        batches = self._batches(quiet)
        incomplete = self._written_to(again)
        faults: list[str] = []
        committed_at = time.monotonic()
        while batches and not has_ended.is_set():
            names = batches.pop(0)
            found = self._store_all(names, again)
            held |= {_unit(name) for name in names if found and "/" in name}
            faults += found
            if _is_due(committed_at, batches, again):
                self._commit(again, held | _units(batches), incomplete)
                committed_at = time.monotonic()
        if not has_ended.is_set():
            self._commit(again, held, incomplete)
        if faults:
            raise OutputError("; ".join(faults))

    def look_for_writers(self) -> None:
        """Add the files that are open for writing to those noted before."""
        with contextlib.suppress(OSError):
            looked_at = time.time()
            names = open_for_writing(self._folder)
            self._looked_at = looked_at
            self._open.update({name: _stamp(self._path(name)) for name in names})

    def _is_as_kept(self, seen: dict[str, _Stamp]) -> bool:
        incomplete = any(file.is_incomplete for file in self._kept.values())
        return seen == self._stamps and not self._stored and not incomplete

    def _held(self, busy: set[str]) -> set[str]:
        """Return the units that wait; not forever, as a log is always being written."""
        self._patience = {unit: self._patience.get(unit, 0) + 1 for unit in busy}
        return {unit for unit, count in self._patience.items() if count <= _PATIENCE}

    def _batches(self, seen: dict[str, _Stamp]) -> list[list[str]]:
        """Return the files that have changed, in batches to store one after another.

        Each folder that is a unit is one batch. Small files that are units share batches.
        """
        folders: dict[str, list[str]] = {}
        small: list[str] = []
        large: list[list[str]] = []
        for name in sorted(seen):
            if self._stamps.get(name) == seen[name]:
                continue
            if "/" in name:
                folders.setdefault(_unit(name), []).append(name)
            elif seen[name].size_bytes <= _SMALL_BYTES:
                small.append(name)
            else:
                large.append([name])
        shared = [small[at : at + _BATCH] for at in range(0, len(small), _BATCH)]
        return [*shared, *folders.values(), *large]

    def _written_to(self, seen: dict[str, _Stamp]) -> set[str]:
        """Return the files that have not changed since they were last seen open for writing."""
        return {name for name, stamp in self._open.items() if seen.get(name, stamp) == stamp}

    def _store_all(self, names: list[str], seen: dict[str, _Stamp]) -> list[str]:
        """Store these files; return the error messages."""
        small = [name for name in names if seen[name].size_bytes <= _SMALL_BYTES]
        large = [name for name in names if seen[name].size_bytes > _SMALL_BYTES]

        tasks = [partial(self._store, name, seen[name]) for name in small]
        faults = list(in_parallel(tasks, _THREADS))
        # One after another: each is uploaded in parts, and several at once would need much memory.
        faults += [self._store(name, seen[name]) for name in large]
        return [fault for fault in faults if fault]

    def _store(self, name: str, stamp: _Stamp) -> str:
        """Store one file under a key that is in no manifest; return an error message or ``""``."""
        if name in self._stored and self._stored[name][0] == stamp:
            return ""
        path = self._path(name)
        try:
            kept = self._put(name, path, stamp)
        except (objects.ObjectError, OSError) as error:
            # It may have been a temporary file that has been renamed.
            return "" if _stamp(path) is None else _came_back(error)
        if _stamp(path) == stamp:
            self._forget(name, but=kept.key)
            self._stored[name] = (stamp, kept)
            return ""
        return f"read file: {path}: it changed while it was read"

    def _put(self, name: str, path: str, stamp: _Stamp) -> Kept:
        data = b""
        with translated("read file", path), open(path, "rb") as file:
            if stamp.size_bytes <= _SMALL_BYTES:
                data = file.read(_SMALL_BYTES + 1)
                sha256 = hashlib.sha256(data).hexdigest()
            else:
                sha256 = _digest(path)
        key = self._free_key(name, sha256)
        kept = Kept(name, key, stamp.size_bytes, sha256, stamp.modified_ns)
        before = self._kept.get(name)
        if before and (before.sha256, before.size_bytes) == (sha256, stamp.size_bytes):
            return before._replace(modified_ns=stamp.modified_ns)
        if stamp.size_bytes <= _SMALL_BYTES:
            objects.write(data, self._below(key))
            self.transfer.add(len(data))
        else:
            objects.put(path, self._below(key), progress=self.transfer.add)
        return kept

    def _free_key(self, name: str, sha256: str) -> str:
        before = self._kept.get(name)
        if before is None or before.key != name:
            return name
        return manifest.version_key(self._node.node, sha256)

    def _commit(self, seen: dict[str, _Stamp], held: set[str], incomplete: set[str]) -> None:
        """Write a manifest of the stored units that do not wait, and remove unlisted objects."""
        files = {
            name: kept
            for name, kept in self._kept.items()
            if name in self._earlier or name in seen or _unit(name) in held
        }
        taken = {}
        for name, (stamp, kept) in list(self._stored.items()):
            if name not in seen:
                self._forget(name)
            elif seen[name] == stamp and _unit(name) not in held:
                files[name], taken[name] = kept, stamp
        current = {
            name
            for name, stamp in {**self._stamps, **taken}.items()
            if name in files and seen.get(name) == stamp
        }
        marked = {name: files[name]._replace(is_incomplete=name in incomplete) for name in current}
        files.update(marked)
        if files != self._kept:
            self._write_manifest(files)
            self.commits += 1
        for name, stamp in taken.items():
            self._stamps[name] = stamp
            self._stored.pop(name)
            self._earlier.discard(name)
        for name in set(self._stamps) - set(files):
            del self._stamps[name]

    def _forget(self, name: str, but: str = "") -> None:
        """Remove a stored version of a file that is in no manifest."""
        pair = self._stored.pop(name, None)
        if pair is not None and pair[1].key != but and pair[1] != self._kept.get(name):
            self._delete(pair[1].key)

    def _write_manifest(self, files: dict[str, Kept]) -> None:
        ordered = tuple(files[name] for name in sorted(files))
        data = manifest.dump(Manifest(self._node.job, self._node.node, ordered))
        objects.write(data, self._below(manifest.key(self._node.node)))
        # The old version under the plain name stays until the next one replaces it.
        gone = {kept.key for name, kept in self._kept.items() if kept.key != name}
        gone |= set(self._kept) - set(files)
        named = {kept.key for kept in files.values()}
        named |= {kept.key for _, kept in self._stored.values()}
        self._kept = files
        for key in sorted(gone - named):
            self._delete(key)

    def _delete(self, key: str) -> None:
        # An object that cannot be removed only takes space.
        with contextlib.suppress(objects.ObjectError):
            objects.delete(self._below(key))

    # -- at the end -------------------------------------------------------------------------------

    def keep_all(self, bad_end: BadEnd | None = None) -> list[str]:
        """Upload all files after the ranks have ended; return the error messages.

        Args:
            bad_end: How the ranks of this node failed; None if they succeeded.
        """
        faults: list[str] = []
        try:
            self._keep_rest(bad_end, faults)
        # Any error (no memory, no thread) means that outputs were not uploaded.
        except Exception as error:  # noqa: BLE001
            faults.append(_came_back(error))
        self.is_kept = not faults
        return [f"uploading the output {self.name}: {fault}" for fault in faults]

    def _keep_rest(self, bad_end: BadEnd | None, faults: list[str]) -> None:
        seen = self._scan(faults)
        incomplete = self._incomplete(seen, bad_end)
        self._set_aside(seen, incomplete)
        batches = self._batches(seen)
        committed_at = time.monotonic()
        while batches:
            faults += self._store_all(batches.pop(0), seen)
            if _is_due(committed_at, batches, seen):
                self._commit(seen, _units(batches), incomplete)
                committed_at = time.monotonic()
        self._commit(seen, set(), incomplete)
        self._settle(seen)

    def _incomplete(self, seen: dict[str, _Stamp], bad_end: BadEnd | None) -> set[str]:
        """Return the files that may be incomplete because the ranks of this node failed.

        A script that exits may truncate only the file that it is writing. A script that is killed
        may have had any file open for a long time, unless a check has shown that it was closed.
        """
        if bad_end is None:
            return set()
        since_s = bad_end.at_s - SETTLE_S
        if bad_end.is_kill:
            since_s = min(since_s, self._looked_at)
        since_ns = int(since_s * 1e9)
        recent = {name for name, stamp in seen.items() if stamp.modified_ns > since_ns}
        return self._written_to(seen) | {
            name for name in recent if not _is_renamed(self._path(name))
        }

    def _set_aside(self, seen: dict[str, _Stamp], incomplete: set[str]) -> None:
        """Rename incomplete files that would replace a complete version in the manifest.

        A file that has only grown, such as a log, keeps its name.
        """
        for name in sorted(incomplete & set(self._kept)):
            kept, aside = self._kept[name], name + ASIDE
            is_older = _digest(self._path(name), kept.size_bytes) == kept.sha256
            if kept.is_incomplete or is_older or name not in seen or aside in seen:
                continue
            log_message(
                f"output {self.name}: {name} was being written at the end: the complete version"
                f" uploaded before stays, and this one is {aside}"
            )
            seen[aside] = seen.pop(name)
            self._local[aside] = name
            self._earlier.add(name)
            incomplete.add(aside)

    def _settle(self, seen: dict[str, _Stamp]) -> None:
        """Copy every file to its plain name, for readers that do not use manifests."""
        moved = {}
        for name, kept in self._kept.items():
            if kept.key != name and self._copy(kept, is_here=name in seen):
                moved[name] = kept._replace(key=name)
        if moved:
            self._write_manifest({**self._kept, **moved})

    def _copy(self, kept: Kept, *, is_here: bool) -> bool:
        try:
            objects.copy(self._below(kept.key), self._below(kept.name))
        except objects.ObjectError:
            if not is_here:
                return False
            objects.put(self._path(kept.name), self._below(kept.name))
        return True

    # -- the folder -------------------------------------------------------------------------------

    def _scan(self, faults: list[str]) -> dict[str, _Stamp]:
        """Return the files of the folder, following links to files but not to folders.

        Raises:
            OSError: The folder itself cannot be read, which must not look like an empty one.
        """
        os.listdir(self._folder)
        found = {}
        # Not recursive, as Python's recursion limit is about a thousand folders.
        waiting = [""]
        while waiting:
            parent = waiting.pop()
            try:
                folders, names = _children(self._path(parent))
            except OSError as error:
                faults.append(f"{self._path(parent)}: {came_back(error)}")
                continue
            for name in names:
                try:
                    stamp = _stamped(self._path(parent + name))
                except OSError as error:
                    faults.append(f"{self._path(parent + name)}: {came_back(error)}")
                    continue
                if stamp is not None:
                    found[parent + name] = stamp
            waiting += [parent + name + "/" for name in folders if parent + name != manifest.FOLDER]
        for name, stamp in self._foreign.items():
            if found.get(name) == stamp:
                del found[name]
        return found

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, self._local.get(name, name))

    def _below(self, key: str) -> str:
        return objects.uri_below(self._uri, key)


def _unit(name: str) -> str:
    """Return the unit of a file: the first folder of its path, or the file itself."""
    return name.partition("/")[0]


def _is_due(committed_at: float, batches: list[list[str]], seen: dict[str, _Stamp]) -> bool:
    """Whether to write a manifest now: some time has passed, or a large file comes next."""
    following = batches[0] if batches else []
    is_late = time.monotonic() - committed_at > _COMMIT_S
    return is_late or any(seen[name].size_bytes > _SMALL_BYTES for name in following)


def _units(batches: list[list[str]]) -> set[str]:
    return {_unit(name) for names in batches for name in names}


def _children(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the folders in a folder, and the names of everything else in it."""
    folders, others = [], []
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif not entry.name.startswith(TEMPORARY):
                others.append(entry.name)
    return folders, others


def _is_renamed(path: str) -> bool:
    """Whether a file was renamed after its last write, as complete files often are."""
    try:
        facts = os.stat(path)
    except OSError:
        return False
    return facts.st_ctime_ns > facts.st_mtime_ns


def _stamp(path: str) -> _Stamp | None:
    """Return the stamp of a file; None if it does not exist or is not a regular file."""
    try:
        return _stamped(path)
    except OSError:
        return None


def _stamped(path: str) -> _Stamp | None:
    """Return the stamp of a file; None if it does not exist or is not a regular file.

    Raises:
        OSError: The file exists but cannot be accessed; its path may be too long.
    """
    import stat

    try:
        facts = os.stat(path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    if not stat.S_ISREG(facts.st_mode):
        return None
    return _Stamp(facts.st_size, facts.st_mtime_ns, facts.st_ino)


def _digest(path: str, size_bytes: int | None = None) -> str:
    """Return the digest of a file, or of its first ``size_bytes``."""
    sha256 = hashlib.sha256()
    left = os.stat(path).st_size if size_bytes is None else size_bytes
    with open(path, "rb") as file:
        while left > 0:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                break
            sha256.update(chunk)
            left -= len(chunk)
    return sha256.hexdigest()


def _came_back(error: Exception) -> str:
    if not isinstance(error, (objects.ObjectError, OutputError, OSError)):
        return f"{type(error).__name__}: {error}"
    hint = getattr(error, "hint", "")
    return f"{error} ({hint})" if hint else str(error)
