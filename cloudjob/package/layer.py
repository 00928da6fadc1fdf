"""Makes the newest layer of a package: of a whole tree, or of what has changed in it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.package import cache, contents, layering, parts
from cloudjob.package.cache import Known, KnownLayer, Memory
from cloudjob.package.contents import ChangedError, Stored
from cloudjob.package.secrets import Allows, Finding, Searcher
from cloudjob.package.tree import FILE, Entry, Tree
from cloudjob.package.words import changed, shown
from jobentry.contract import packages
from jobentry.contract.packages import BELOW, RAW, ZLIB, Content, Index, Layer

_LISTED = 10


class Job(NamedTuple):
    """What is to be done.

    Args:
        memory: What is known of the tree from the last time.
        destination: The file of the new layer.
        allows: Whether the user lets a secret pass.
        now_ns: When the scan began.
    """

    tree: Tree
    memory: Memory
    destination: Path
    is_compressed: bool
    searcher: Searcher
    allows: Allows
    now_ns: int


class Made(NamedTuple):
    """What came of it: ``is_new`` says whether there is a new layer."""

    memory: Memory
    is_new: bool


# ---- the whole tree ------------------------------------------------------------------------------


def first(job: Job) -> Made:
    """Write all of the tree as one layer.

    Raises:
        ChangedError: A file is not what it was when the source was scanned.
        PackageError: A file cannot be read, the layer cannot be written, or there are secrets.
    """
    files = [entry for entry in job.tree.entries if entry.kind == FILE]
    read = parts.read(
        job.tree.source,
        files,
        job.destination,
        is_compressed=job.is_compressed,
        searcher=job.searcher,
    )
    try:
        exempt = _checked(job, read.findings)
        stored = {file.name: each for file, each in zip(files, read.stored, strict=True)}
        known = []
        for seen in job.tree.entries:
            each = stored.get(seen.name)
            entry = _entry(seen, each.digest if each else "")
            scanned = "" if seen.name in exempt else job.searcher.tag(seen)
            known.append(
                _known(job, seen, entry, (0, 0, each.stored_bytes if each else 0), scanned)
            )
        index = Index(
            tuple(each.entry for each in known), _listed(zip(files, read.stored, strict=True))
        )
        layer = _end(job, index, read.size_bytes)
    except BaseException:
        job.destination.unlink(missing_ok=True)
        raise
    return Made(Memory((KnownLayer(layer, (), read.size_bytes),), tuple(known)), is_new=True)


# ---- what has changed ----------------------------------------------------------------------------


class _Change(NamedTuple):
    """What differs from the last time.

    Args:
        before: What was known, by name.
        held: The same by content: where it lies.
        entries: The tree as it is now, beside what ``scan`` saw.
        fresh: What was read anew, by the name that ``scan`` saw.
        exempt: The names of files whose secrets the user lets pass.
        names: The names of entries that are new or different.
        removed: The names of entries that are gone.
    """

    before: Mapping[str, Known]
    held: Mapping[str, Known]
    entries: tuple[packages.Entry, ...]
    fresh: Mapping[str, Stored]
    exempt: frozenset[str]
    names: frozenset[str]
    removed: frozenset[str]


def update(job: Job) -> Made | None:
    """Write what has changed as one layer; None when the whole tree is to be packed again.

    Raises:
        ChangedError: A file is not what it was when the source was scanned.
        PackageError: A file cannot be read, the layer cannot be written, or there are secrets.
    """
    if _is_all_known(job):
        return Made(job.memory, is_new=False)
    before = {known.entry.name: known for known in job.memory.entries}
    unknown = [
        entry
        for entry in job.tree.entries
        if entry.kind == FILE and not _is_known(job, entry, before.get(_text(entry.name)))
    ]
    if not unknown:
        change = _change(job, before, {}, frozenset())
        if not (change.names or change.removed):
            return Made(Memory(job.memory.layers, _renewed(job, change)), is_new=False)
    sizes = {
        known.entry.digest: known.entry.size_bytes
        for known in before.values()
        if known.entry.kind == FILE
    }
    is_kept = False
    try:
        with parts.writing(job.destination) as file:
            read = contents.read(
                job.tree.source,
                unknown,
                file.write,
                is_compressed=job.is_compressed,
                searcher=job.searcher,
                known=sizes,
            )
            exempt = _checked(job, read.findings)
            fresh = {entry.name: each for entry, each in zip(unknown, read.stored, strict=True)}
            change = _change(job, before, fresh, exempt)
            if not (change.names or change.removed):
                return Made(Memory(job.memory.layers, _renewed(job, change)), is_new=False)
            count = _kept(job, change, read.size_bytes)
            if count == 0:
                return None
            made = _add(job, change, count, file, read.size_bytes)
        is_kept = True
    finally:
        if not is_kept:
            job.destination.unlink(missing_ok=True)
    return made


def _change(
    job: Job, before: Mapping[str, Known], fresh: Mapping[str, Stored], exempt: frozenset[str]
) -> _Change:
    entries, names = [], set()
    for seen in job.tree.entries:
        name = _text(seen.name)
        was = before.get(name)
        if seen.kind != FILE:
            entry = _entry(seen, "")
        elif seen.name in fresh:
            entry = _entry(seen, fresh[seen.name].digest)
        else:
            assert was is not None, "what was not read is known"
            entry = _entry(seen, was.entry.digest)
        entries.append(entry)
        if was is None or was.entry != entry:
            names.add(name)
    removed = before.keys() - {entry.name for entry in entries}
    held = {known.entry.digest: known for known in before.values() if known.entry.kind == FILE}
    return _Change(
        before, held, tuple(entries), fresh, exempt, frozenset(names), frozenset(removed)
    )


def _kept(job: Job, change: _Change, new_bytes: int) -> int:
    """Return how many of the layers stay below the new one."""
    live_bytes = [0] * len(job.memory.layers)
    for digest in {entry.digest for entry in change.entries if entry.kind == FILE}:
        if digest in change.held:
            live_bytes[change.held[digest].holder] += change.held[digest].stored_bytes
    dead_bytes = sum(each.content_bytes for each in job.memory.layers) - sum(live_bytes)
    return len(live_bytes) - layering.merged(live_bytes, dead_bytes, new_bytes)


def _add(job: Job, change: _Change, count: int, file: parts.Whole, size_bytes: int) -> Made:
    """Write the new layer, on top of the oldest ``count`` ones; the others are taken into it."""
    stored = {
        each.digest: (seen, each)
        for seen in job.tree.entries
        if (each := change.fresh.get(seen.name)) is not None and not each.is_known
    }
    again = _taken(job, change, stored, count)
    read = contents.read(job.tree.source, again, file.write, is_compressed=job.is_compressed)
    for seen, each in zip(again, read.stored, strict=True):
        if each.digest not in change.held:
            raise ChangedError(changed(job.tree.source, seen.name).message)
        stored[each.digest] = (seen, each._replace(offset=each.offset + size_bytes))
    known, spoken = [], []
    for seen, entry in zip(job.tree.entries, change.entries, strict=True):
        was = change.before.get(entry.name)
        layer = count if was is None or entry.name in change.names else min(was.layer, count)
        if layer == count:
            spoken.append(entry)
        holder, stored_bytes = 0, 0
        if entry.digest in stored:
            holder, stored_bytes = count, stored[entry.digest][1].stored_bytes
        elif entry.digest in change.held:
            holder, stored_bytes = (
                change.held[entry.digest].holder,
                change.held[entry.digest].stored_bytes,
            )
        scanned = _scanned(job, change, seen, was)
        known.append(_known(job, seen, entry, (layer, holder, stored_bytes), scanned))
    # What this layer speaks of and a lower one holds.
    below = {entry.digest: entry for entry in spoken if entry.digest and entry.digest not in stored}
    contents_below = tuple(
        Content(digest, entry.size_bytes, BELOW, 0, RAW) for digest, entry in below.items()
    )
    index = Index(
        tuple(spoken),
        _listed(stored.values()) + contents_below,
        tuple(sorted(_removed(job, change, count))),
    )
    content_bytes = size_bytes + read.size_bytes
    layer_made = _end(job, index, content_bytes)
    layers = (*job.memory.layers[:count], KnownLayer(layer_made, index.removed, content_bytes))
    return Made(Memory(layers, tuple(known)), is_new=True)


def _taken(job: Job, change: _Change, stored: Mapping[str, object], count: int) -> list[Entry]:
    """Return a file for each content that a layer holds which is taken into the new one."""
    found = {
        entry.digest: seen
        for seen, entry in zip(job.tree.entries, change.entries, strict=True)
        if entry.digest in change.held
        and change.held[entry.digest].holder >= count
        and entry.digest not in stored
    }
    return list(found.values())


def _removed(job: Job, change: _Change, count: int) -> set[str]:
    """Return the names to remove from the layers that stay; one that is not there does no harm."""
    before = {name for each in job.memory.layers[count:] for name in each.removed}
    return (before | change.removed) - {entry.name for entry in change.entries}


def _renewed(job: Job, change: _Change) -> tuple[Known, ...]:
    """Return what is known of a tree that has not changed, as ``stat`` sees it now."""
    renewed = []
    for seen, entry in zip(job.tree.entries, change.entries, strict=True):
        was = change.before[entry.name]
        place = (was.layer, was.holder, was.stored_bytes)
        renewed.append(_known(job, seen, entry, place, _scanned(job, change, seen, was)))
    return tuple(renewed)


def _scanned(job: Job, change: _Change, seen: Entry, was: Known | None) -> str:
    if seen.name in change.exempt:
        return ""
    if seen.name in change.fresh or was is None:
        return job.searcher.tag(seen)
    return was.scanned


def _is_all_known(job: Job) -> bool:
    """Whether nothing at all differs from the last time, so that nothing need be made anew."""
    if not _IS_UTF8 or len(job.tree.entries) != len(job.memory.entries):
        return False
    tag = job.searcher.tag
    for now, was in zip(job.tree.entries, job.memory.entries, strict=True):
        entry = was.entry
        if now.name != entry.name or now.kind != entry.kind or now.target != entry.target:
            return False
        if now.kind != packages.LINK and now.mode != entry.mode:
            return False
        if now.seen != was.seen or (now.seen is not None and was.scanned != tag(now)):
            return False
    return True


def _is_known(job: Job, seen: Entry, was: Known | None) -> bool:
    """Whether a file is as it was, and the rules of today found no secret in it."""
    if was is None or was.seen is None or was.seen != seen.seen:
        return False
    return was.entry.kind == FILE and was.scanned == job.searcher.tag(seen)


# ---- the pieces ----------------------------------------------------------------------------------


def _checked(job: Job, findings: Sequence[Finding]) -> frozenset[str]:
    """Return the names of files with secrets that the user lets pass.

    Raises:
        PackageError: There are others.
    """
    refused = [finding for finding in findings if not job.allows(finding)]
    if refused:
        more = len(refused) - _LISTED
        listed = [f"{shown(path)}:{line}: {rule}" for path, line, rule in refused[:_LISTED]]
        raise PackageError(
            f"pack {shown(job.tree.source)}: may hold secrets: {'; '.join(listed)}"
            + (f"; and {more} more" if more > 0 else ""),
            hint="give the job its keys with --secret, and leave the file out with a line in "
            ".cloudjobignore; what is no secret passes with the comment `cloudjob: allow-secret` "
            "on its line or a line in .cloudjob-secrets-allow",
        )
    return frozenset(finding.path for finding in findings)


def _known(
    job: Job, seen: Entry, entry: packages.Entry, place: tuple[int, int, int], scanned: str
) -> Known:
    status = cache.trusted(seen.seen, job.now_ns) if seen.seen else None
    layer, holder, stored_bytes = place
    return Known(entry, layer, holder, stored_bytes, status, scanned)


def _entry(seen: Entry, digest: str) -> packages.Entry:
    name = _text(seen.name)
    if seen.kind == packages.LINK:
        return packages.Entry(name, seen.kind, target=_text(seen.target))
    return packages.Entry(name, seen.kind, seen.mode, seen.size_bytes, digest)


_IS_UTF8 = sys.getfilesystemencoding() == "utf-8"


def _text(name: str) -> str:
    """Return a name as a package has it: its bytes, whatever the locale here is."""
    return name if _IS_UTF8 else os.fsencode(name).decode("utf-8", "surrogateescape")


def _listed(stored: Iterable[tuple[Entry, Stored]]) -> tuple[Content, ...]:
    """Return where the contents lie, each once."""
    found: dict[str, Content] = {}
    for seen, each in stored:
        if each.digest not in found:
            place = (each.offset, each.stored_bytes, each.encoding)
            found[each.digest] = Content(each.digest, seen.size_bytes, *place)
    return tuple(found.values())


def _end(job: Job, index: Index, content_bytes: int) -> Layer:
    """Write the index and what ends a layer; return what names it."""
    data = packages.dump_index(index)
    encoding = ZLIB if job.is_compressed else RAW
    with parts.appending(job.destination) as file:
        file.write(packages.encode_index(data, encoding, content_bytes))
    digest = hashlib.sha256(data).hexdigest()
    return Layer(f"layers/{digest}", digest, job.destination.stat().st_size)
