"""The user's source folder becomes a package: exactly the right files, and only what has changed.

``scan`` decides what goes in from names, ``stat`` and ignore files alone; ``pack`` reads what is
not known from the last time and writes it as one layer; ``explain`` says of any path what decided.
"""

from __future__ import annotations

from cloudjob.package.cache import Memory
from cloudjob.package.pack import CodePackage, Options, pack
from cloudjob.package.scan import scan
from cloudjob.package.tree import LeftOut, Tree

__all__ = ["CodePackage", "LeftOut", "Memory", "Options", "Tree", "pack", "scan"]
