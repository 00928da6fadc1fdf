"""Creates the newest layer of a package: what the layers in the store do not contain."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.package import cache, merging
from cloudjob.package.cache import CachedEntry, CachedLayer, SourceCache
from cloudjob.package.layer_file import LayerFile
from cloudjob.package.messages import changed, shown
from cloudjob.package.reader import PIECE_BYTES, pieces
from cloudjob.package.secrets import Allows, Finding, Searcher
from cloudjob.package.tree import FILE, LINK, SourceEntry, Tree
from jobentry.contract.packages import Entry, Manifest

_LISTED = 10
# The overhead of a file in a layer: its row in the manifest, and two zip headers.
_ROW_BYTES = 256


class LayerInputs(NamedTuple):
    """What to pack.

    Args:
        source_cache: Digests of the source's files from the last pack.
        destination: The file of the new layer.
        allows: Whether the user permits a finding.
        now_ns: When the scan began.
    """

    tree: Tree
    source_cache: SourceCache
    destination: Path
    is_compressed: bool
    searcher: Searcher
    allows: Allows
    now_ns: int


class BuiltLayer(NamedTuple):
    """The package as it is now; ``is_new`` is true if a layer was written."""

    source_cache: SourceCache
    is_new: bool


def make(job: LayerInputs) -> BuiltLayer:
    """Write the changes as one layer, or the whole tree if the old layers are not worth keeping.

    Raises:
        ChangedError: A file has changed since the source was scanned.
        PackageError: A file cannot be read, the layer cannot be written, or there are secrets.
    """
    layer = _make(job)
    if layer is None:
        layer = _make(job._replace(source_cache=SourceCache()))
    assert layer is not None, "without old layers, none is replaced"
    return layer


def _make(job: LayerInputs) -> BuiltLayer | None:
    """Write one layer; return None if the whole tree should be packed again."""
    source_cache = job.source_cache
    with LayerFile(job.destination, is_compressed=job.is_compressed) as layer:
        change = _Change(job, layer)
        if not (change.names or change.removed):
            return BuiltLayer(source_cache._replace(entries=change.cache_entries()), is_new=False)
        kept = _kept(source_cache, change)
        if source_cache.layers and not kept:
            return None
        change.store_again(kept)
        manifest = Manifest(
            [entry for entry in change.entries if change.is_listed(entry, kept)],
            layer.contents,
            sorted(_removed(source_cache, change, kept)),
        )
        new = CachedLayer(layer.finish(manifest), tuple(manifest.removed), layer.content_bytes)
    return BuiltLayer(
        SourceCache((*source_cache.layers[:kept], new), change.cache_entries(kept)), is_new=True
    )


class _Change:
    """The difference from the last pack; new contents are in the layer."""

    def __init__(self, job: LayerInputs, layer: LayerFile) -> None:
        self._job, self._layer = job, layer
        self._before = before = {cached.entry.name: cached for cached in job.source_cache.entries}
        # SHA-256 of a content -> number of the layer that holds it.
        self.holders = {cached.entry.digest: cached.holder for cached in job.source_cache.entries}
        self._findings: list[Finding] = []
        self._read: dict[str, str] = {}
        for source_entry in job.tree.entries:
            if source_entry.kind == FILE and not self._is_known(source_entry):
                self._read[source_entry.name] = self._store(source_entry, self.holders)
        self._exempt = _checked(job, self._findings)
        self.entries = [self._entry(source_entry) for source_entry in job.tree.entries]
        self.names = {
            entry.name
            for entry in self.entries
            if entry.name not in before or before[entry.name].entry != entry
        }
        self.removed = before.keys() - {entry.name for entry in self.entries}
        self.new_bytes = layer.content_bytes + _ROW_BYTES * len(self.names)

    def store_again(self, kept: int) -> None:
        """Store the contents again that exist only in layers from number ``kept`` on.

        Raises:
            ChangedError: A file has changed since the source was scanned.
        """
        for source_entry, entry in zip(self._job.tree.entries, self.entries, strict=True):
            is_held = entry.kind == FILE and self.holders.get(entry.digest, -1) >= kept
            is_stored = entry.digest in self._layer.contents
            if is_held and not is_stored and self._store(source_entry, {}) != entry.digest:
                raise changed(self._job.tree.source, source_entry.name)

    def is_listed(self, entry: Entry, kept: int) -> bool:
        """Whether the manifest of the new layer has a row for this entry."""
        return entry.name in self.names or self._before[entry.name].layer >= kept

    def old_layer_of(self, entry: Entry) -> int | None:
        """Return the number of the old layer that lists an unchanged entry."""
        return None if entry.name in self.names else self._before[entry.name].layer

    def cache_entries(self, new: int | None = None) -> tuple[CachedEntry, ...]:
        """Return what to remember; ``new`` is the number of the new layer."""
        entries = []
        for source_entry, entry in zip(self._job.tree.entries, self.entries, strict=True):
            cached = self._before.get(entry.name)
            is_listed = new is not None and self.is_listed(entry, new)
            layer = cached.layer if cached and not is_listed else new
            holder = new if entry.digest in self._layer.contents else self.holders.get(entry.digest)
            status = cache.trusted(source_entry.file_stat, self._job.now_ns)
            entries.append(
                CachedEntry(
                    entry, layer or 0, holder or 0, status, self._scanned(source_entry, cached)
                )
            )
        return tuple(entries)

    def _is_known(self, source_entry: SourceEntry) -> bool:
        """Whether a file is unchanged, and the current rules found no secret in it."""
        cached = self._before.get(_text(source_entry.name))
        if cached is None or cached.file_stat is None or cached.file_stat != source_entry.file_stat:
            return False
        return cached.entry.kind == FILE and cached.scanned == self._job.searcher.tag(source_entry)

    def _store(self, source_entry: SourceEntry, held: Mapping[str, int]) -> str:
        """Read and search a file, store its content unless a layer has it; return its digest."""
        source, name, contents = (
            self._job.tree.source,
            _text(source_entry.name),
            self._layer.contents,
        )
        if source_entry.size_bytes <= PIECE_BYTES:
            data = b"".join(pieces(source, source_entry))
            digest = hashlib.sha256(data).hexdigest()
            self._findings += self._job.searcher.search(source_entry, data)
            if digest not in held and digest not in contents:
                self._layer.add(name, source_entry.mode, digest, data)
            return digest
        sha256 = hashlib.sha256()
        for piece in pieces(source, source_entry):
            sha256.update(piece)
        digest = sha256.hexdigest()
        if digest not in held and digest not in contents:
            reread = self._same_pieces(source_entry, digest)
            self._layer.add_pieces(name, source_entry.mode, digest, source_entry.size_bytes, reread)
        return digest

    def _same_pieces(self, source_entry: SourceEntry, digest: str) -> Iterator[bytes]:
        """Read a file again; ``stat`` does not show a change within one tick of the clock."""
        sha256 = hashlib.sha256()
        for piece in pieces(self._job.tree.source, source_entry):
            sha256.update(piece)
            yield piece
        if sha256.hexdigest() != digest:
            raise changed(self._job.tree.source, source_entry.name)

    def _entry(self, source_entry: SourceEntry) -> Entry:
        name = _text(source_entry.name)
        if source_entry.kind == LINK:
            return Entry(name, LINK, target=_text(source_entry.target))
        if source_entry.kind == FILE:
            digest = self._read.get(source_entry.name) or self._before[name].entry.digest
            return Entry(name, FILE, source_entry.mode, source_entry.size_bytes, digest)
        return Entry(name, source_entry.kind, source_entry.mode)

    def _scanned(self, source_entry: SourceEntry, cached: CachedEntry | None) -> str:
        if source_entry.name in self._exempt:
            return ""
        return (
            self._job.searcher.tag(source_entry)
            if cached is None or source_entry.name in self._read
            else cached.scanned
        )


def _kept(source_cache: SourceCache, change: _Change) -> int:
    """Return how many of the layers stay below the new one."""
    live_bytes = [0] * len(source_cache.layers)
    for digest, size_bytes in {each.digest: each.size_bytes for each in change.entries}.items():
        if digest and digest in change.holders:
            live_bytes[change.holders[digest]] += size_bytes
    dead_bytes = sum(each.content_bytes for each in source_cache.layers) - sum(live_bytes)
    for entry in change.entries:
        number = change.old_layer_of(entry)
        if number is not None:
            live_bytes[number] += _ROW_BYTES
    return len(live_bytes) - merging.merged(live_bytes, dead_bytes, change.new_bytes)


def _removed(source_cache: SourceCache, change: _Change, kept: int) -> set[str]:
    """Return the names to remove from the layers that stay; unknown names do no harm."""
    before = {name for each in source_cache.layers[kept:] for name in each.removed}
    return (before | change.removed) - {entry.name for entry in change.entries}


def _checked(job: LayerInputs, findings: Sequence[Finding]) -> frozenset[str]:
    """Return the names of files with findings that the user permits.

    Raises:
        PackageError: The user does not permit all findings.
    """
    refused = [finding for finding in findings if not job.allows(finding)]
    if refused:
        more = len(refused) - _LISTED
        listed = [f"{shown(path)}:{line}: {rule}" for path, line, rule in refused[:_LISTED]]
        raise PackageError(
            f"packing {shown(job.tree.source)}: may hold secrets: {'; '.join(listed)}"
            + (f"; and {more} more" if more > 0 else ""),
            hint="give the job its keys with --secret, and leave the file out with a line in "
            ".cloudjobignore; if a finding is not a secret, add the comment "
            "`cloudjob: allow-secret` to its line, or a line to .cloudjob-secrets-allow",
        )
    return frozenset(finding.path for finding in findings)


def _text(name: str) -> str:
    """Return a name as text that keeps its bytes, independent of the locale."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")
