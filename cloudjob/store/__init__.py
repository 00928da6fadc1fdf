"""Where objects lie between the laptop and the container: one protocol, one module a scheme."""

from __future__ import annotations

import difflib
import importlib
import urllib.parse
from collections.abc import Mapping

from cloudjob.errors import StoreError
from cloudjob.spec import STORE_SECTIONS
from cloudjob.store.base import PATIENCE_S, ObjectStore

__all__ = ["ObjectStore", "beside", "full_uri", "open_store"]

# Imported only when used, so that a local job never waits for a cloud's client library.
_MODULES = {
    "file": "cloudjob.store.directory",
    "s3": "cloudjob.store.s3",
    "obs": "cloudjob.store.s3",
}


def full_uri(uri: str, sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return ``uri`` with what the section of its scheme adds: all that is needed to open it again.

    The URI's own options win; keys are never among them.
    """
    scheme = uri.partition("://")[0]
    if scheme not in STORE_SECTIONS or scheme not in sections:
        return uri
    from cloudjob.store.s3.place import with_options

    return with_options(uri, sections[scheme])


def beside(uri: str, store_uri: str) -> str:
    """Return ``uri`` with the options of a job's store, where both are reached in the same way."""
    scheme, _, rest = store_uri.partition("://")
    options = dict(urllib.parse.parse_qsl(rest.partition("?")[2]))
    return full_uri(uri, {scheme: options})


def open_store(
    uri: str, environ: Mapping[str, str] | None = None, *, patience_s: float = PATIENCE_S
) -> ObjectStore:
    """Return the store whose root is ``uri``; nothing is reached or made before it is used.

    Args:
        environ: Where keys may come from, by default the process's own environment.
        patience_s: For how long a request is tried while the store cannot be reached.

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
    module = importlib.import_module(_MODULES[scheme])
    store: ObjectStore = module.from_uri(uri, environ, patience_s=patience_s)
    return store
