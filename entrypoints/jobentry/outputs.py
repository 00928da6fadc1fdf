"""Outputs kept: while the ranks run, and at the end, so that what a reader is told of is whole.

A thread of low priority looks at the output folders every now and then. What has changed, and is
not being written right now, is stored; the manifest that names it comes last. A file whose plain
name holds the version of the last manifest goes under another key first, so that the set of the
last manifest stays as it was until the next one is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from typing import Callable, NamedTuple

from jobentry import objects
from jobentry.contract import env, manifest
from jobentry.contract.env import NodeEnv
from jobentry.contract.manifest import Kept, Manifest
from jobentry.contract.paths import NodePaths
from jobentry.objects.base import TEMPORARY, Stop, came_back, in_parallel, scheme_of, translated
from jobentry.output import say

# A file that has not changed for so long is taken for whole.
SETTLE_S = 2.0
# How often in a row a folder may be left alone because one of its files is being written.
_PATIENCE = 10
# The least time between two manifests of one pass.
_COMMIT_S = 5.0
_SMALL_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_THREADS = 4
_LOWEST_PRIORITY = 19


class OutputError(Exception):
    """An output cannot be used, or not kept.

    Args:
        hint: What to try.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class _Stamp(NamedTuple):
    """What differs when a file has been written to."""

    size_bytes: int
    modified_ns: int
    inode: int


class Outputs:
    """The outputs of one node: made ready, kept while the ranks run, and kept at the end."""

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self._node = node
        self._all = [_Output(node, name, uri, paths.output(name)) for name, uri in node.outputs]
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="outputs", daemon=True)
        self._faults: list[str] = []

    def prepare(self) -> None:
        """Make the folders, bring back what is asked for, and see that all can be kept.

        Raises:
            OutputError: An output cannot be kept: told now, and not after hours of training.
        """
        for output in self._all:
            try:
                output.prepare()
            except (objects.ObjectError, OSError) as error:
                hint = getattr(error, "hint", "")
                raise OutputError(f"preparing the output {output.name}: {error}", hint) from error

    def start(self) -> None:
        """Begin to keep what the ranks write."""
        if self._all:
            self._thread.start()

    def hurry(self) -> None:
        """Begin to keep all that is there: nobody writes any more."""
        self._has_ended.set()

    def finish(self, limit_s: float) -> str:
        """Keep all that is there now; return what could not be kept, in words, within the limit."""
        self._has_ended.set()
        if self._thread.ident is None:
            return ""
        self._thread.join(limit_s)
        problems = list(self._faults)
        if self._thread.is_alive():
            left = ", ".join(output.name for output in self._all if not output.is_kept)
            problems.append(
                f"uploading the output {left}: not done after {limit_s:g} s;"
                " what was kept before is whole"
            )
        for problem in problems:
            say(problem)
        return "; ".join(problems)

    def clashes(self) -> str:
        """Say which files several nodes have kept under one name; one of them alone is left."""
        problems = []
        for output in self._all:
            try:
                found = manifest.clashes(output.manifests(range(self._node.nodes)))
            except objects.ObjectError as error:
                say(f"comparing the outputs {output.name} of all nodes: {error}")
                continue
            for name, nodes in list(found.items())[:5]:
                listed = ", ".join(str(node) for node in nodes)
                problems.append(
                    f"uploading the output {output.name}: nodes {listed} all wrote {name!r},"
                    " and only one of these files is left"
                )
        for problem in problems:
            say(problem)
        if problems:
            say("hint: let each node write names of its own, VC_TASK_INDEX in them")
        return "; ".join(problems)

    def _follow(self) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: the training comes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        wait_s = self._node.output_sync_s or None
        while not self._has_ended.wait(wait_s):
            for output in self._all:
                output.keep_now(self._has_ended)
        for output in self._all:
            self._faults += output.keep_all()


class _Output:
    """One output of this node, and what of it is kept.

    What is *kept* stands in the last manifest; what is *stored* is in the store, and in no manifest
    yet.
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
        # What an earlier run kept and this one has not: it stays.
        self._earlier: set[str] = set()
        # What other nodes had kept, and was brought here.
        self._foreign: dict[str, _Stamp] = {}
        self._patience: dict[str, int] = {}
        self._last_words = ""

    # -- before the ranks -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the folder, bring back what is asked for, and write a first manifest."""
        objects.check(self._uri)
        if scheme_of(self._uri) in ("http", "https"):
            raise objects.ObjectError(
                f"{objects.shown(self._uri)}: a folder cannot be kept on a web server",
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
        """Return the manifests of these nodes, as far as they are there."""

        def task(node: int) -> Callable[[], Manifest]:
            return lambda: self._read(node)

        return list(in_parallel([task(node) for node in nodes], 16, Stop()))

    def _read(self, node: int) -> Manifest:
        uri = self._below(manifest.key(node))
        try:
            return manifest.load(objects.read(uri))
        except objects.ObjectMissing:
            return Manifest(node=node)
        except manifest.ManifestError as error:
            raise objects.ObjectError(
                f"read manifest: {uri}: {error}", "give the output a URI of its own"
            ) from error

    def _restore(self) -> None:
        """Bring back what was kept, each file as it was; a file that is there already stays."""
        found = [Manifest(node=self._node.node, files=tuple(self._kept.values()))]
        if self._node.restore_outputs == env.RESTORE_ALL:
            found += self._others()
        files: dict[str, tuple[int, Kept]] = {}
        for one in found:
            for file in one.files:
                files.setdefault(file.name, (one.node, file))

        def task(node: int, file: Kept) -> Callable[[], None]:
            return lambda: self._bring_back(node, file)

        for _ in in_parallel([task(*pair) for pair in files.values()], _THREADS, Stop()):
            pass
        self._earlier.clear()
        if files:
            total = sum(file.size_bytes for _, file in files.values())
            say(f"output {self.name}: {len(files)} files of {total} bytes are back")

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
        """Keep what has changed and is quiet; what goes wrong is tried again the next time."""
        try:
            seen = self._scan([])
            if self._is_as_kept(seen):
                return
            if has_ended.wait(SETTLE_S):
                return
            again = self._scan([])
            busy = {name for name in {**seen, **again} if seen.get(name) != again.get(name)}
            held = self._held({_unit(name) for name in busy})
            faults: list[str] = []
            for unit, names in self._changed(again).items():
                if has_ended.is_set():
                    return
                found = self._store_all([name for name in names if name not in busy], again)
                held |= {unit} if found else set()
                faults += found
            self._commit(again, held)
            if faults:
                raise OutputError("; ".join(faults))
            self._last_words = ""
        except (objects.ObjectError, OutputError, OSError) as error:
            words = f"keeping the output {self.name} meanwhile: {error}"
            if words != self._last_words:
                say(words + "; it is tried again")
            self._last_words = words

    def _is_as_kept(self, seen: dict[str, _Stamp]) -> bool:
        return seen == self._stamps and not self._stored

    def _held(self, busy: set[str]) -> set[str]:
        """Return the folders that are left alone; not for ever: a log is always being written."""
        self._patience = {unit: self._patience.get(unit, 0) + 1 for unit in busy}
        return {unit for unit, count in self._patience.items() if count <= _PATIENCE}

    def _changed(self, seen: dict[str, _Stamp]) -> dict[str, list[str]]:
        """Return the files that have changed, by the folder that is kept as a whole."""
        found: dict[str, list[str]] = {}
        for name in sorted(seen):
            if self._stamps.get(name) != seen[name]:
                found.setdefault(_unit(name), []).append(name)
        return found

    def _store_all(self, names: list[str], seen: dict[str, _Stamp]) -> list[str]:
        """Store these files; return what could not be stored, in words."""
        small = [name for name in names if seen[name].size_bytes <= _SMALL_BYTES]
        large = [name for name in names if seen[name].size_bytes > _SMALL_BYTES]

        def task(name: str) -> Callable[[], str]:
            return lambda: self._store(name, seen[name])

        faults = list(in_parallel([task(name) for name in small], _THREADS, Stop()))
        # One after the other: each goes in parts, and several together would take much memory.
        faults += [self._store(name, seen[name]) for name in large]
        return [fault for fault in faults if fault]

    def _store(self, name: str, stamp: _Stamp) -> str:
        """Store one file under a key that no manifest names; return what went wrong, in words."""
        if name in self._stored and self._stored[name][0] == stamp:
            return ""
        path = os.path.join(self._folder, name)
        try:
            kept = self._put(name, path, stamp)
        except (objects.ObjectError, OSError) as error:
            # It may have been a temporary file, renamed meanwhile.
            return "" if _stamp(path) is None else _with_hint(error)
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
                sha256 = _digest(file.fileno())
        key = self._free_key(name, sha256)
        kept = Kept(name, key, stamp.size_bytes, sha256, stamp.modified_ns)
        before = self._kept.get(name)
        if before and (before.sha256, before.size_bytes) == (sha256, stamp.size_bytes):
            return before._replace(modified_ns=stamp.modified_ns)
        if stamp.size_bytes <= _SMALL_BYTES:
            objects.write(data, self._below(key))
        else:
            objects.put(path, self._below(key))
        return kept

    def _free_key(self, name: str, sha256: str) -> str:
        before = self._kept.get(name)
        if before is None or before.key != name:
            return name
        return manifest.version_key(self._node.node, sha256)

    def _commit(self, seen: dict[str, _Stamp], held: set[str]) -> None:
        """Write a manifest of what is stored and quiet, and remove what it no longer names."""
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
        if files != self._kept:
            self._write_manifest(files)
        for name, stamp in taken.items():
            self._stamps[name] = stamp
            self._stored.pop(name)
            self._earlier.discard(name)
        for name in set(self._stamps) - set(files):
            del self._stamps[name]

    def _forget(self, name: str, but: str = "") -> None:
        """Remove what was stored of a file and never named."""
        pair = self._stored.pop(name, None)
        if pair is not None and pair[1].key != but and pair[1] != self._kept.get(name):
            self._delete(pair[1].key)

    def _write_manifest(self, files: dict[str, Kept]) -> None:
        ordered = tuple(files[name] for name in sorted(files))
        data = manifest.dump(Manifest(self._node.job, self._node.node, ordered))
        objects.write(data, self._below(manifest.key(self._node.node)))
        # The old version under a plain name stays until the next one takes its place.
        gone = {kept.key for name, kept in self._kept.items() if kept.key != name}
        gone |= set(self._kept) - set(files)
        named = {kept.key for kept in files.values()}
        named |= {kept.key for _, kept in self._stored.values()}
        self._kept = files
        for key in sorted(gone - named):
            self._delete(key)

    def _delete(self, key: str) -> None:
        # What stays only takes room.
        with contextlib.suppress(objects.ObjectError):
            objects.delete(self._below(key))

    # -- at the end -------------------------------------------------------------------------------

    def keep_all(self) -> list[str]:
        """Keep everything, as nobody writes any more; return what could not be kept, in words."""
        faults: list[str] = []
        try:
            seen = self._scan(faults)
            changed = self._changed(seen)
            committed_at = time.monotonic()
            for unit in list(changed):
                faults += self._store_all(changed.pop(unit), seen)
                if time.monotonic() - committed_at > _COMMIT_S:
                    # Time may be short: what is whole is named at once.
                    self._commit(seen, set(changed))
                    committed_at = time.monotonic()
            self._commit(seen, set())
            self._settle(seen)
        except (objects.ObjectError, OSError) as error:
            faults.append(_with_hint(error))
        self.is_kept = not faults
        return [f"uploading the output {self.name}: {fault}" for fault in faults]

    def _settle(self, seen: dict[str, _Stamp]) -> None:
        """Give every file its plain name, for readers who know nothing of manifests."""
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
            objects.put(os.path.join(self._folder, kept.name), self._below(kept.name))
        return True

    # -- the folder -------------------------------------------------------------------------------

    def _scan(self, faults: list[str]) -> dict[str, _Stamp]:
        """Return the files of the folder; a link to a file is that file, links to folders are not.

        Raises:
            OSError: The folder itself is not to be read: not the same as an empty one.
        """
        os.listdir(self._folder)

        def note(error: OSError) -> None:
            faults.append(f"{error.filename}: {came_back(error)}")

        found = {}
        for parent, folders, names in os.walk(self._folder, onerror=note):
            if parent == self._folder and manifest.FOLDER in folders:
                folders.remove(manifest.FOLDER)
            for name in names:
                path = os.path.join(parent, name)
                stamp = None if name.startswith(TEMPORARY) else _stamp(path)
                if stamp is not None:
                    found[os.path.relpath(path, self._folder)] = stamp
        for name, stamp in self._foreign.items():
            if found.get(name) == stamp:
                del found[name]
        return found

    def _below(self, key: str) -> str:
        return objects.uri_below(self._uri, key)


def _unit(name: str) -> str:
    """Return what is kept as a whole with this file: the first folder of its path, or none."""
    return name.partition("/")[0] if "/" in name else ""


def _stamp(path: str) -> _Stamp | None:
    """Return the stamp of a file; None when there is none, or another thing."""
    import stat

    try:
        facts = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    return _Stamp(facts.st_size, facts.st_mtime_ns, facts.st_ino)


def _digest(descriptor: int) -> str:
    sha256 = hashlib.sha256()
    for chunk in iter(lambda: os.read(descriptor, _CHUNK_BYTES), b""):
        sha256.update(chunk)
    return sha256.hexdigest()


def _with_hint(error: Exception) -> str:
    hint = getattr(error, "hint", "")
    return f"{error} ({hint})" if hint else str(error)
