"""Creates the newest layer of a package: what the layers in the store do not contain."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator, Sequence
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


def make(job: LayerInputs) -> tuple[SourceCache, bool]:
    """Write the changes as one layer, or the whole tree if the old layers are not worth keeping.

    Returns:
        The package as it is now, and whether a layer was written.

    Raises:
        ChangedError: A file has changed since the source was scanned.
        PackageError: A file cannot be read, the layer cannot be written, or there are secrets.
    """
    old = job.source_cache.layers
    with LayerFile(job.destination, is_compressed=job.is_compressed) as layer:
        entries = _entries(job, layer)
        names = {each.entry.name for each in entries}
        removed = {each.entry.name for each in job.source_cache.entries} - names
        if not removed and all(each.layer < len(old) for each in entries):
            return job.source_cache._replace(entries=entries), False
        kept = _kept(old, entries)
        if kept or not old:
            _store_again(job, layer, entries, kept)
            # Names that the layers below do not have do no harm.
            removed = removed.union(*(each.removed for each in old[kept:])) - names
            listed = [each.entry for each in entries if each.layer >= kept]
            manifest = Manifest(listed, layer.contents, sorted(removed))
            new = CachedLayer(layer.finish(manifest), tuple(manifest.removed), layer.content_bytes)
            numbered = tuple(
                each._replace(layer=min(each.layer, kept), holder=min(each.holder, kept))
                for each in entries
            )
            return SourceCache((*old[:kept], new), numbered), True
    return make(job._replace(source_cache=SourceCache()))


def _entries(job: LayerInputs, layer: LayerFile) -> tuple[CachedEntry, ...]:
    """Return the tree with its digests, and store the contents that no layer holds.

    The new layer has the number after all old ones.

    Raises:
        ChangedError: A file has changed since the source was scanned.
        PackageError: A file cannot be read, or the user does not permit all findings.
    """
    before = {each.entry.name: each for each in job.source_cache.entries}
    # SHA-256 of a content -> number of the layer that holds it.
    holders = {each.entry.digest: each.holder for each in job.source_cache.entries}
    new = len(job.source_cache.layers)
    entries: list[CachedEntry] = []
    findings: list[Finding] = []
    for source_entry in job.tree.entries:
        name, kind = _text(source_entry.name), source_entry.kind
        cached = before.get(name)
        scanned = job.searcher.tag(source_entry)
        entry = Entry(name, kind, 0 if kind == LINK else source_entry.mode)
        if kind == LINK:
            entry = entry._replace(target=_text(source_entry.target))
        elif kind == FILE:
            is_same = cached is not None and cached.file_stat == source_entry.file_stat
            if cached and is_same and cached.scanned == scanned:
                digest = cached.entry.digest
            else:
                digest, secrets = _store(job, layer, source_entry, holders)
                # The user may not permit them the next time.
                scanned = "" if secrets else scanned
                findings += secrets
            entry = entry._replace(size_bytes=source_entry.size_bytes, digest=digest)
        entries.append(
            CachedEntry(
                entry,
                cached.layer if cached and cached.entry == entry else new,
                holders.get(entry.digest, new) if kind == FILE else 0,
                cache.trusted(source_entry.file_stat, job.now_ns),
                scanned,
            )
        )
    _check(job, findings)
    return tuple(entries)


def _store_again(
    job: LayerInputs, layer: LayerFile, entries: Sequence[CachedEntry], kept: int
) -> None:
    """Store the contents again that exist only in layers from number ``kept`` on.

    Raises:
        ChangedError: A file has changed since the source was scanned.
    """
    for source_entry, (entry, _, holder, *_) in zip(job.tree.entries, entries, strict=True):
        is_missing = entry.kind == FILE and holder >= kept and entry.digest not in layer.contents
        if is_missing and _store(job, layer, source_entry, ())[0] != entry.digest:
            raise changed(job.tree.source, source_entry.name)


def _store(
    job: LayerInputs, layer: LayerFile, source_entry: SourceEntry, held: Container[str]
) -> tuple[str, list[Finding]]:
    """Read and search a file, and store its content unless a layer has it.

    Args:
        held: The digests of the contents that other layers hold.

    Returns:
        Its digest, and the secrets in it.
    """
    source, name = job.tree.source, _text(source_entry.name)
    if source_entry.size_bytes <= PIECE_BYTES:
        data = b"".join(pieces(source, source_entry))
        digest = hashlib.sha256(data).hexdigest()
        if digest not in held and digest not in layer.contents:
            layer.add(name, source_entry.mode, digest, data)
        return digest, job.searcher.search(source_entry, data)
    sha256 = hashlib.sha256()
    for piece in pieces(source, source_entry):
        sha256.update(piece)
    digest = sha256.hexdigest()
    if digest not in held and digest not in layer.contents:
        reread = _same_pieces(source, source_entry, digest)
        layer.add_pieces(name, source_entry.mode, digest, source_entry.size_bytes, reread)
    return digest, []


def _same_pieces(source: Path, source_entry: SourceEntry, digest: str) -> Iterator[bytes]:
    """Read a file again; ``stat`` does not show a change within one tick of the clock."""
    sha256 = hashlib.sha256()
    for piece in pieces(source, source_entry):
        sha256.update(piece)
        yield piece
    if sha256.hexdigest() != digest:
        raise changed(source, source_entry.name)


def _kept(old: Sequence[CachedLayer], entries: Sequence[CachedEntry]) -> int:
    """Return how many of the old layers stay below the new one."""
    live_bytes = [0] * (len(old) + 1)
    contents = {each.entry.digest: each for each in entries if each.entry.kind == FILE}
    for each in contents.values():
        live_bytes[each.holder] += each.entry.size_bytes
    dead_bytes = sum(each.content_bytes for each in old) - sum(live_bytes[:-1])
    for each in entries:
        live_bytes[each.layer] += _ROW_BYTES
    new_bytes = live_bytes.pop()
    return len(old) - merging.merged(live_bytes, dead_bytes, new_bytes)


def _check(job: LayerInputs, findings: Sequence[Finding]) -> None:
    """Refuse secrets.

    Raises:
        PackageError: The user does not permit all findings.
    """
    refused = [finding for finding in findings if not job.allows(finding)]
    if not refused:
        return
    more = len(refused) - _LISTED
    listed = [f"{shown(path)}:{line}: {rule}" for path, line, rule in refused[:_LISTED]]
    raise PackageError(
        f"packing {shown(job.tree.source)}: may hold secrets: {'; '.join(listed)}"
        + (f"; and {more} more" if more > 0 else ""),
        hint="give the job its keys with --secret, and leave the file out with a line in "
        ".cloudjobignore; if a finding is not a secret, add the comment "
        "`cloudjob: allow-secret` to its line, or a line to .cloudjob-secrets-allow",
    )


def _text(name: str) -> str:
    """Return a name as text that keeps its bytes, independent of the locale."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")
