"""Upload outputs while the ranks run and at the end, so that manifests list only complete objects.

A low-priority thread scans the output folders (``output_folder``) at intervals. It stores files
that have changed and are not being written, then writes the manifest that lists them
(``output_store``).

A *unit* is a file directly in the output folder, or a folder there with everything below it. A unit
waits as a whole while one of its files changes, but not for other units. A file that a process has
open for writing, or that was being written when a rank of this node failed, is also stored, and
marked as incomplete in the manifest.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from functools import partial

from jobentry import objects
from jobentry.contract import env, manifest, messages
from jobentry.contract.env import NodeEnv
from jobentry.contract.lists import some
from jobentry.contract.manifest import Contents, Others, StoredFile
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.log import log_message
from jobentry.node.journal import Journal, Transfer
from jobentry.node.local_ranks import RankFailure
from jobentry.objects.base import in_parallel, reason_of, scheme_of, translated
from jobentry.staging import output_folder
from jobentry.staging.output_folder import OutputFolder, Stamp, digest
from jobentry.staging.output_store import SMALL_BYTES, OutputStore, Version, unit
from jobentry.system.trees import folder_below, set_modified

# Scans in a row for which a unit may wait because one of its files is being written.
_PATIENCE = 10
# The minimum time between two manifests of one scan.
_COMMIT_S = 5.0
# Suffix for a file that was being written at the end, if its name belongs to a complete version.
INCOMPLETE_SUFFIX = ".incomplete"
# Small files to store between two checks of the time.
_BATCH = 64
# How many names a message lists.
_SHOWN = 5
_THREADS = 4
_LOWEST_PRIORITY = 19
# The stamp of a restored file that is no longer what was stored: it differs from any file's.
_OTHER = Stamp(-1, -1, -1)


class Outputs:
    """The outputs of one node: prepared, uploaded while the ranks run, and uploaded at the end."""

    def __init__(self, node: NodeEnv, paths: NodePaths, journal: Journal | None = None) -> None:
        self._node = node
        self._journal = journal or Journal()
        self._all = [_Output(node, name, uri, paths.output(name)) for name, uri in node.outputs]
        self._has_ended = threading.Event()
        self._rank_failure: RankFailure | None = None
        self._thread = threading.Thread(target=self._follow, name="outputs", daemon=True)
        self._problems: list[str] = []

    def prepare(self) -> None:
        """Create the folders, restore earlier files if wanted, and check that uploads work.

        Raises:
            EntryError: An output cannot be uploaded; reported now, not after hours of training.
        """
        for output in self._all:
            try:
                output.prepare()
            except (objects.ObjectError, OSError) as error:
                hint = getattr(error, "hint", "")
                text = f"preparing the output {output.name}: {_text(error)}"
                raise EntryError(text, hint=hint) from error

    def start(self) -> None:
        """Start uploading what the ranks write.

        Raises:
            EntryError: The thread cannot be started.
        """
        if not self._all:
            return
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise EntryError(
                f"starting the thread that stores outputs: {error}",
                hint="raise the limit on threads (ulimit -u, or the pids of the container)",
            ) from error

    def note_open_files(self) -> None:
        """Note which files are being written, before their writers are killed."""
        for output in self._all:
            output.folder.note_open_files()

    def start_final_upload(self, rank_failure: RankFailure | None = None) -> None:
        """Start the final upload of all files, as the ranks have ended.

        Args:
            rank_failure: How the ranks of this node failed, if they did: files that were being
                written then are incomplete.
        """
        if not self._has_ended.is_set():
            self._rank_failure = rank_failure
            self._has_ended.set()

    def finish(self, limit_s: float, rank_failure: RankFailure | None = None) -> str:
        """Upload all files within ``limit_s``; return an error message or ``""``.

        Args:
            rank_failure: As for ``start_final_upload``.
        """
        self.start_final_upload(rank_failure)
        if self._thread.ident is None:
            return ""
        self._thread.join(limit_s)
        problems = list(self._problems)
        unfinished = ", ".join(output.name for output in self._all if not output.is_uploaded)
        if self._thread.is_alive():
            problems.append(
                f"uploading the output {unfinished}: not done after {limit_s:g} s;"
                " the files uploaded before are complete"
            )
        elif unfinished and not problems:
            problems.append(
                f"uploading the output {unfinished}: its thread ended before it was done"
            )
        for problem in problems:
            log_message(problem)
        return "; ".join(problems)

    def clashes(self) -> str:
        """Return a message about files that several nodes stored under one name, or ``""``."""
        problems = []
        for output in self._all:
            try:
                read = output.store.read_all(range(self._node.nodes))
                names_of_clashes = manifest.clashes(one.manifest for one in read)
            except objects.ObjectError as error:
                log_message(f"comparing the outputs {output.name} of all nodes: {error}")
                continue
            for name, nodes in list(names_of_clashes.items())[:5]:
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
                output.transfer, commits = Transfer("checkpoint"), output.store.commits
                output.upload_settled(self._has_ended)
                if output.store.commits > commits:
                    self._journal.add_transfer(output.transfer)
        with self._journal.during("outputs") as transfer:
            for output in self._all:
                output.transfer = transfer
                self._problems += output.upload_all(self._rank_failure)


class _Output:
    """One output of this node: decides when each file of its folder is stored and listed."""

    def __init__(self, node: NodeEnv, name: str, uri: str, folder: str) -> None:
        self.name = name
        self.is_uploaded = False
        self.transfer = Transfer("")
        self.folder = OutputFolder(folder)
        self.store = OutputStore(node.job, node.node, uri)
        self._node = node
        self._uri = uri
        # How many scans in a row each unit has waited.
        self._scans_waited: dict[str, int] = {}
        self._last_error = ""
        self._earlier = Others()

    # -- before the ranks -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the folder, restore earlier files if wanted, and write a first manifest."""
        objects.check(self._uri)
        if scheme_of(self._uri) in ("http", "https"):
            raise objects.ObjectError(
                f"{objects.shown(self._uri)}: outputs cannot be stored on a web server",
                "give a file://, s3:// or obs:// URI",
            )
        with translated("creating the folder", self.folder.path):
            os.makedirs(self.folder.path, exist_ok=True)
        contents = self.store.read(self._node.node)
        for problem in contents.refused:
            log_message(f"output {self.name}: its manifest of an earlier run: {problem}")
        self.store.listed = {file.name: Version(file, None) for file in contents.manifest.files}
        self.store.others = contents.others
        if self._node.restore_outputs == env.RESTORE_NONE:
            self._earlier = contents.others._replace(left_out={})
        if self._node.restore_outputs != env.RESTORE_NONE:
            self._restore(contents)
        self.store.write_manifest(self.store.listed)

    def _restore(self, contents: Contents) -> None:
        """Restore the files of an earlier run; a file that exists locally stays."""
        contents_of_nodes = [
            contents._replace(manifest=contents.manifest._replace(node=self._node.node))
        ]
        if self._node.restore_outputs == env.RESTORE_ALL:
            contents_of_nodes += self.store.read_all(sorted(self.store.nodes() - {self._node.node}))
        files: dict[str, tuple[int, StoredFile]] = {}
        modes: dict[str, int] = {}
        for one in contents_of_nodes:
            modes = {**one.others.modes, **modes}
            for file in one.manifest.files:
                # A script could mistake an incomplete file for a checkpoint.
                if not file.is_incomplete:
                    files.setdefault(file.name, (one.manifest.node, file))
        in_parallel(
            [partial(self._restore_file, *files[name], modes.get(name, 0)) for name in files],
            _THREADS,
        )
        for one in contents_of_nodes:
            self._restore_others(one.others)
        if files:
            total = sum(file.size_bytes for _, file in files.values())
            log_message(f"output {self.name}: restored {total} bytes (files: {len(files)})")

    def _restore_others(self, others: Others) -> None:
        """Make the folders and links of an earlier run where there is nothing else.

        Others may write to the store, so nothing is made behind a link: it could lead anywhere.
        """
        top = self.folder.path
        for name, mode in sorted(others.folders.items(), reverse=True):
            with contextlib.suppress(OSError), folder_below(
                top, name, makes=True, mode=0o777
            ) as folder:
                os.chmod(f"/proc/self/fd/{folder}", mode | stat.S_IRWXU)
        for name, target in others.links.items():
            above, _, last = name.rpartition("/")
            with contextlib.suppress(OSError), folder_below(
                top, above, makes=True, mode=0o777
            ) as folder:
                os.symlink(target, last, dir_fd=folder)

    def _restore_file(self, node: int, file: StoredFile, mode: int) -> None:
        path = self.folder.path_of(file.name)
        if not os.path.lexists(path):
            objects.fetch(self.store.uri(file.key), path, sha256=file.sha256)
            if mode:
                os.chmod(path, mode)
            set_modified(path, file.modified_ns)
        stamp = self.folder.stamp(file.name)
        is_same_size = stamp is not None and stamp.size_bytes == file.size_bytes
        if node != self._node.node:
            if stamp is not None and is_same_size:
                self.folder.ignored[file.name] = stamp
        elif stamp is not None and is_same_size and stamp.modified_ns == file.modified_ns:
            self.store.listed[file.name] = Version(file, stamp)
        else:
            self.store.listed[file.name] = Version(file, _OTHER)

    # -- while the ranks run ----------------------------------------------------------------------

    def upload_settled(self, has_ended: threading.Event) -> None:
        """Upload changed files that are not being written; errors are retried at the next scan."""
        try:
            self._upload_settled(has_ended)
            self._last_error = ""
        # Any error (no memory, no thread) is retried at the next scan; only the last scan counts.
        except Exception as error:  # noqa: BLE001
            message = f"uploading the output {self.name} while the job runs: {_described(error)}"
            if message != self._last_error:
                log_message(messages.retry(message))
            self._last_error = message

    def _upload_settled(self, has_ended: threading.Event) -> None:
        """Upload the units in which nothing has changed for a while.

        Raises:
            EntryError: Some files could not be stored; the others were.
        """
        before = self._scan([])
        if self.store.is_current(before) or has_ended.wait(output_folder.SETTLE_S):
            return
        self.folder.note_open_files(is_new_round=True)
        seen = self._scan([])
        busy = {name for name in {**before, **seen} if before.get(name) != seen.get(name)}
        problems = self._upload(
            seen, busy, self._held(busy), self.folder.open_files(seen), has_ended
        )
        if problems:
            raise EntryError("; ".join(problems))

    def _scan(self, problems: list[str]) -> dict[str, Stamp]:
        """Return the files of the folder; the next manifest describes what else it has."""
        seen = self.folder.scan(problems)
        # What an earlier run stored stays until something replaces it.
        earlier = {name: self._earlier.links[name] for name in self._earlier.links.keys() - seen}
        now = self.folder.others
        self.store.others = now._replace(
            links={**earlier, **now.links},
            modes={**self._earlier.modes, **now.modes},
            folders={**self._earlier.folders, **now.folders},
        )
        return seen

    def _report_left_out(self) -> None:
        left_out = self.folder.others.left_out
        for reason, text in manifest.REASONS.items():
            names = sorted(ascii(name) for name in left_out if left_out[name] == reason)
            if names:
                log_message(f"output {self.name}: left out {some(names, _SHOWN)}: {text}")

    def _held(self, busy: set[str]) -> set[str]:
        """Return the units that wait, but not forever, as a log is always being written."""
        self._scans_waited = {u: self._scans_waited.get(u, 0) + 1 for u in map(unit, busy)}
        return {u for u, count in self._scans_waited.items() if count <= _PATIENCE}

    def _upload(
        self,
        seen: dict[str, Stamp],
        busy: set[str],
        held: set[str],
        incomplete: set[str],
        has_ended: threading.Event | None = None,
    ) -> list[str]:
        """Store what has changed, batch by batch, and write manifests; return the error messages.

        Args:
            seen: The files of the folder.
            busy: Those that are not stored, because they are changing.
            held: The units that keep their state in the last manifest.
            incomplete: The files to mark as incomplete.
            has_ended: Ends this upload when it is set; the final upload follows, and has no such
                event.
        """
        quiet = {name: stamp for name, stamp in seen.items() if name not in busy}
        batches = _batches(self.store.changed(quiet))
        problems: list[str] = []
        committed_at = time.monotonic()
        while batches:
            names = batches.pop(0)
            problems_of_batch = self._store_all(names, seen)
            problems += problems_of_batch
            if has_ended is not None:
                held |= {unit(name) for name in names if problems_of_batch and "/" in name}
                if has_ended.is_set():
                    return problems
            if _is_due(committed_at, batches, seen):
                later = {unit(name) for names in batches for name in names}
                self.store.commit(seen, held | later, incomplete)
                committed_at = time.monotonic()
        self.store.commit(seen, held, incomplete)
        return problems

    def _store_all(self, names: list[str], seen: dict[str, Stamp]) -> list[str]:
        """Store these files; return the error messages."""
        small = [name for name in names if seen[name].size_bytes <= SMALL_BYTES]
        large = [name for name in names if seen[name].size_bytes > SMALL_BYTES]
        problems = in_parallel([partial(self._store, name, seen[name]) for name in small], _THREADS)
        # One after another: each is uploaded in parts, and several at once would need much memory.
        problems += [self._store(name, seen[name]) for name in large]
        return [problem for problem in problems if problem]

    def _store(self, name: str, stamp: Stamp) -> str:
        """Store one file if it is not pending; return an error message or ``""``."""
        if name in self.store.pending and self.store.pending[name].stamp == stamp:
            return ""
        path = self.folder.path_of(name)
        try:
            self.store.store(name, path, stamp, self.transfer.add)
        except (objects.ObjectError, OSError) as error:
            # It may have been a temporary file that has been renamed.
            return "" if self.folder.stamp(name) is None else _described(error)
        if self.folder.stamp(name) == stamp:
            return ""
        self.store.drop(name)
        return f"reading {path}: it changed while it was read"

    # -- at the end -------------------------------------------------------------------------------

    def upload_all(self, rank_failure: RankFailure | None = None) -> list[str]:
        """Upload all files after the ranks have ended; return the error messages.

        Args:
            rank_failure: How the ranks of this node failed; None if they succeeded.
        """
        problems: list[str] = []
        try:
            seen = self._scan(problems)
            self._report_left_out()
            incomplete = self.folder.possibly_truncated(seen, rank_failure)
            self._set_aside(seen, incomplete)
            problems += self._upload(seen, set(), set(), incomplete)
            self.store.settle({name: self.folder.path_of(name) for name in seen})
        # Any error (no memory, no thread) means that outputs were not uploaded.
        except Exception as error:  # noqa: BLE001
            problems.append(_described(error))
        self.is_uploaded = not problems
        return [f"uploading the output {self.name}: {problem}" for problem in problems]

    def _set_aside(self, seen: dict[str, Stamp], incomplete: set[str]) -> None:
        """Rename incomplete files that would replace a complete version in the manifest.

        A file that has only grown, such as a log, keeps its name.
        """
        for name in sorted(incomplete & set(self.store.listed) & set(seen)):
            listed, aside = self.store.listed[name], name + INCOMPLETE_SUFFIX
            if listed.stored.is_incomplete or aside in seen:
                continue
            if digest(self.folder.path_of(name), listed.stored.size_bytes) == listed.stored.sha256:
                continue
            log_message(
                f"output {self.name}: {name} was being written at the end: the complete version"
                f" uploaded before stays, and this one is {aside}"
            )
            seen[aside] = seen.pop(name)
            self.folder.aliases[aside] = name
            self.store.listed[name] = listed._replace(stamp=None)
            incomplete.add(aside)


def _batches(changed: dict[str, Stamp]) -> list[list[str]]:
    """Return the names of the files in batches to store one after another.

    Each folder that is a unit is one batch. Small files that are units share batches.
    """
    folders: dict[str, list[str]] = {}
    small: list[str] = []
    large: list[list[str]] = []
    for name, stamp in sorted(changed.items()):
        if "/" in name:
            folders.setdefault(unit(name), []).append(name)
        elif stamp.size_bytes <= SMALL_BYTES:
            small.append(name)
        else:
            large.append([name])
    shared = [small[at : at + _BATCH] for at in range(0, len(small), _BATCH)]
    return [*shared, *folders.values(), *large]


def _is_due(committed_at: float, batches: list[list[str]], seen: dict[str, Stamp]) -> bool:
    """Whether to write a manifest before the next batch, as that is due or the batch is large."""
    is_late = time.monotonic() - committed_at > _COMMIT_S
    following = batches[0] if batches else []
    return is_late or any(seen[name].size_bytes > SMALL_BYTES for name in following)


def _described(error: Exception) -> str:
    hint = getattr(error, "hint", "")
    return f"{_text(error)} ({hint})" if hint else _text(error)


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        # A descriptor may be in the place of a path.
        where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
        return ": ".join(filter(None, (where, reason_of(error))))
    if isinstance(error, (objects.ObjectError, EntryError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
