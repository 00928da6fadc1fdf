"""Where objects lie between the laptop and the container: one protocol, one module a scheme."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

from cloudjob.errors import StoreError
from cloudjob.store.base import ObjectStore

__all__ = ["ObjectStore", "open_store"]

# Imported only when used, so that a local job never waits for a cloud's client library.
_MODULES = {
    "file": "cloudjob.store.directory",
    "s3": "cloudjob.store.s3",
    "obs": "cloudjob.store.s3",
}


def open_store(uri: str, environ: Mapping[str, str] | None = None) -> ObjectStore:
    """Return the store whose root is ``uri``; nothing is reached or made before it is used.

    Args:
        environ: Where keys may come from, by default the process's own environment.

    Raises:
        StoreError: No store has this scheme, or the rest of the URI means nothing to it.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise StoreError(f"open store {uri!r}: not a URI", hint="a folder is file:///its/path")
    if scheme not in _MODULES:
        near = difflib.get_close_matches(scheme, _MODULES, 1)
        raise StoreError(
            f"open store {uri!r}: no store for the scheme {scheme!r}",
            hint=f"did you mean {near[0]}://?" if near else f"allowed: {', '.join(_MODULES)}",
        )
    store: ObjectStore = importlib.import_module(_MODULES[scheme]).from_uri(uri, environ)
    return store
