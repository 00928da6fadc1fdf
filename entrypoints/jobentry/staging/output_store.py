"""The files of an output in the store, and the manifest that lists them.

If the object with a file's plain name is in the current manifest, a new version is first stored
under another key, so that the files of the current manifest stay as they are until the next
manifest is written.
"""

from __future__ import annotations

import contextlib
import hashlib
from functools import partial
from typing import Iterable, NamedTuple

from jobentry import objects
from jobentry.contract import manifest
from jobentry.contract.manifest import Contents, Manifest, Others, StoredFile
from jobentry.objects.base import Progress, in_parallel, opened, translated
from jobentry.staging.output_folder import Stamp, digest

# A larger file is uploaded in parts; smaller ones are read into memory.
SMALL_BYTES = 4 * 1024 * 1024
_READERS = 16


class Version(NamedTuple):
    """A version of a file in the store.

    Args:
        stamp: The stamp of the local file; None if an earlier run stored it and this one has no
            file of that name.
    """

    stored: StoredFile
    stamp: Stamp | None


class OutputStore:
    """The files of an output that this node has stored.

    Attributes:
        listed: The files in the last manifest.
        pending: The files that were stored since then.
        commits: How many manifests list files of this run.
        others: What the folder has besides the contents of files, for the next manifest.
    """

    def __init__(self, job: str, node: int, uri: str) -> None:
        self._job = job
        self._node = node
        self._uri = uri
        self.listed: dict[str, Version] = {}
        self.pending: dict[str, Version] = {}
        self.commits = 0
        self.others = Others()
        self._written = Others()
        # Keys of files that are no longer pending.
        self._replaced: set[str] = set()

    def uri(self, key: str) -> str:
        """Return the URI of an object of this output."""
        return objects.uri_below(self._uri, key)

    def read(self, node: int) -> Contents:
        """Return the manifest of a node; an empty one if it has none."""
        uri = self.uri(manifest.key(node))
        try:
            return manifest.load_valid(objects.read(uri))
        except objects.ObjectMissing:
            return Contents(Manifest(node=node))
        except manifest.ManifestError as error:
            raise objects.ObjectError(
                f"reading the manifest {uri}: {error}", "give the output its own URI"
            ) from error

    def read_all(self, nodes: Iterable[int]) -> list[Contents]:
        """Return the manifests of these nodes."""
        return in_parallel([partial(self.read, node) for node in nodes], _READERS)

    def nodes(self) -> set[int]:
        """Return the nodes that have a manifest."""
        names = (entry.name for entry in objects.list(self.uri(manifest.FOLDER) + "/node-"))
        return {manifest.node_of("node-" + name) for name in names} - {-1}

    def is_current(self, seen: dict[str, Stamp]) -> bool:
        """Whether the manifest lists exactly these files, all of them as complete."""
        stamps = {name: version.stamp for name, version in self.listed.items() if version.stamp}
        is_complete = not any(version.stored.is_incomplete for version in self.listed.values())
        is_whole = is_complete and self.others == self._written
        return seen == stamps and not self.pending and is_whole

    def changed(self, seen: dict[str, Stamp]) -> dict[str, Stamp]:
        """Return the files whose current version is not in the manifest."""
        return {
            name: stamp
            for name, stamp in seen.items()
            if name not in self.listed or self.listed[name].stamp != stamp
        }

    def store(self, name: str, path: str, stamp: Stamp, progress: Progress) -> None:
        """Store a file under a key that is in no manifest, unless the store has this version."""
        data = b""
        is_small = stamp.size_bytes <= SMALL_BYTES
        with translated("reading", path):
            if is_small:
                # Files of the kernel, to which a link may lead, have more than their size.
                with opened(path) as file:
                    data = file.read(stamp.size_bytes)
            sha256 = (
                hashlib.sha256(data).hexdigest() if is_small else digest(path, stamp.size_bytes)
            )
        before = self.listed[name].stored if name in self.listed else None
        key = name
        if before and (before.sha256, before.size_bytes) == (sha256, stamp.size_bytes):
            key = before.key
        else:
            if before and before.key == name:
                key = manifest.version_key(self._node, sha256)
            if is_small:
                objects.write(data, self.uri(key), below=self._uri)
                progress(len(data))
            else:
                objects.put(path, self.uri(key), below=self._uri, progress=progress)
        if name in self.pending:
            self._replaced.add(self.pending[name].stored.key)
        stored = StoredFile(name, key, stamp.size_bytes, sha256, stamp.modified_ns)
        self.pending[name] = Version(stored, stamp)

    def drop(self, name: str) -> None:
        """Forget a pending file; the next commit deletes its object."""
        self._replaced.add(self.pending.pop(name).stored.key)

    def commit(self, seen: dict[str, Stamp], held: set[str], incomplete: set[str]) -> None:
        """Write a manifest of the pending files, and remove the objects that it no longer lists.

        Args:
            seen: The files of the folder.
            held: The units that keep their state in the last manifest.
            incomplete: The files to mark as incomplete.
        """
        files = {
            name: version
            for name, version in self.listed.items()
            if version.stamp is None or name in seen or unit(name) in held
        }
        for name, version in self.pending.items():
            if version.stamp == seen.get(name) and unit(name) not in held:
                files[name] = version
        for name, (file, stamp) in files.items():
            if stamp is not None and seen.get(name) == stamp:
                files[name] = Version(file._replace(is_incomplete=name in incomplete), stamp)
        is_new = _stored_files(files) != _stored_files(self.listed)
        if is_new or self.others != self._written:
            self.write_manifest(files)
            self.commits += 1
        self.listed = files
        self._replaced |= {v.stored.key for name, v in self.pending.items() if name not in seen}
        self.pending = {
            name: version
            for name, version in self.pending.items()
            if name in seen and (name not in files or files[name].stamp != version.stamp)
        }
        self._delete_unlisted(self._replaced)
        self._replaced = set()

    def write_manifest(self, files: dict[str, Version]) -> None:
        """Write a manifest of exactly these files, and remove the objects that it replaces."""
        data = manifest.dump(Manifest(self._job, self._node, _stored_files(files)), self.others)
        objects.write(data, self.uri(manifest.key(self._node)), below=self._uri)
        self._written = self.others
        before, self.listed = self.listed, files
        # The old version under the plain name stays until the next one replaces it.
        gone = {
            version.stored.key for name, version in before.items() if version.stored.key != name
        }
        self._delete_unlisted(gone | (set(before) - set(files)))

    def _delete_unlisted(self, keys: set[str]) -> None:
        """Delete the objects of these keys that belong to no listed or pending file."""
        versions = (*self.listed.values(), *self.pending.values())
        for key in sorted(keys - {version.stored.key for version in versions}):
            # An object that cannot be removed only takes space.
            with contextlib.suppress(objects.ObjectError):
                objects.delete(self.uri(key), below=self._uri)

    def settle(self, paths: dict[str, str]) -> None:
        """Copy every file to its plain name, for readers that do not use manifests.

        Args:
            paths: The local files, to upload those that the store does not copy.
        """
        settled = dict(self.listed)
        for name, (file, stamp) in self.listed.items():
            if file.key != name and self._copy(file, paths.get(name, "")):
                settled[name] = Version(file._replace(key=name), stamp)
        if settled != self.listed:
            self.write_manifest(settled)

    def _copy(self, file: StoredFile, path: str) -> bool:
        try:
            objects.copy(self.uri(file.key), self.uri(file.name), below=self._uri)
        except objects.ObjectError:
            if not path:
                return False
            objects.put(path, self.uri(file.name), below=self._uri)
        return True


def unit(name: str) -> str:
    """Return the unit of a file: the first folder of its path, or the file itself."""
    return name.partition("/")[0]


def _stored_files(files: dict[str, Version]) -> tuple[StoredFile, ...]:
    return tuple(files[name].stored for name in sorted(files))
