"""Packs the source folder of a job into layers, zip files that jobs share through a store.

Start with ``pack.py``. ``scan`` decides which files to pack from names, ``stat`` and ignore files;
``layer`` reads the files that changed, searches them for secrets and writes one new layer;
``claims`` puts it into the store, and ``collection`` deletes the layers that no job needs.
"""

from __future__ import annotations

from cloudjob.package.cache import SourceCache
from cloudjob.package.pack import CodePackage, PackOptions, pack
from cloudjob.package.scan import explain, scan
from cloudjob.package.tree import LeftOut, Tree

__all__ = [
    "CodePackage",
    "LeftOut",
    "PackOptions",
    "SourceCache",
    "Tree",
    "explain",
    "pack",
    "scan",
]
