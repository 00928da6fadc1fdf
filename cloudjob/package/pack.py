"""Packs a source folder: the contents that the store lacks become one new layer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from cloudjob.package import check, layer, secrets
from cloudjob.package.cache import SourceCache
from cloudjob.package.layer import LayerInputs
from cloudjob.package.messages import ChangedError, reading
from cloudjob.package.scan import scan
from cloudjob.package.secrets import Searcher
from cloudjob.package.tree import FILE, LeftOut
from jobentry.contract.packages import Layer, tree_digest

# Each line is a path pattern as in .gitignore; a [rule] in front limits the line to that rule.
ALLOW_FILE = ".cloudjob-secrets-allow"

# An editor may be saving a file at this moment; if it keeps changing, the error names it.
_ATTEMPTS = 3
_PAUSE_S = 0.2


class CodePackage(NamedTuple):
    """The user's source, ready to be sent.

    Args:
        digest: ``sha256:`` and the digest of the tree.
        size_bytes: The total size of its files.
        layers: From the oldest to the newest.
        left_out: The paths of the source that are not in the package, and why.
        new: The file of the newest layer; None if nothing has changed.
        source_cache: The cache for the next pack, valid once the layers are in the store.
        is_cached: Whether ``source_cache`` is the one that was passed in.
    """

    digest: str
    size_bytes: int
    files: int
    layers: tuple[Layer, ...]
    left_out: tuple[LeftOut, ...]
    new: Path | None
    source_cache: SourceCache
    is_cached: bool = False


class PackOptions(NamedTuple):
    """How a source is packed.

    Args:
        is_compressed: Deflate contents that shrink.
        follow_links: Pack what links outside the source point to, instead of refusing them.
        home: ``$CLOUDJOB_HOME``: never packed; the compiled rules for secrets are kept there.
    """

    is_compressed: bool = False
    follow_links: bool = False
    home: Path | None = None


def pack(
    source: Path,
    destination: Path,
    *,
    script: str | None,
    limit_bytes: int,
    options: PackOptions = PackOptions(),  # noqa: B008 (a value)
    source_cache: SourceCache = SourceCache(),  # noqa: B008 (a value)
) -> CodePackage:
    """Write what has changed in ``source`` since the last pack as one layer to ``destination``.

    Raises:
        PackageError: The source cannot be read, is too large, keeps changing, contains secrets or
            links that point outside it, or lacks ``script``, if one is named.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        now_ns = time.time_ns()
        tree = scan(
            source, besides=destination, home=options.home, follow_links=options.follow_links
        )
        if script is not None:
            check.script(tree, script)
        check.size(tree, limit_bytes)
        searcher = Searcher(options.home and options.home / "packages")
        text = b""
        if any(entry.name == ALLOW_FILE and entry.kind == FILE for entry in tree.entries):
            with reading(source, ALLOW_FILE):
                text = (source / ALLOW_FILE).read_bytes()
        job = LayerInputs(
            tree,
            source_cache,
            destination,
            options.is_compressed,
            searcher,
            secrets.allowed(text),
            now_ns,
        )
        try:
            built, is_new = layer.make(job)
            entries = [cached.entry for cached in built.entries]
            built = built._replace(digest=built.digest or tree_digest(entries))
            return CodePackage(
                digest=built.digest,
                size_bytes=sum(entry.size_bytes for entry in entries),
                files=sum(entry.kind == FILE for entry in entries),
                layers=tuple(each.layer for each in built.layers),
                left_out=tree.left_out,
                new=destination if is_new else None,
                source_cache=built,
                is_cached=built == source_cache,
            )
        except ChangedError:
            if attempt == _ATTEMPTS:
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")
