"""Object stores: ``base`` is the protocol; ``directory`` and ``s3`` implement it by URI scheme."""

from __future__ import annotations

import importlib
import os
import urllib.parse
from collections.abc import Mapping

from cloudjob.errors import StoreError
from cloudjob.store.base import RETRY_S, ObjectStore
from jobentry.contract.stores import SCHEMES, STORE_SCHEMES, STORE_SECTIONS


def full_uri(uri: str, sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return ``uri`` with the options of its scheme's section, so that it is complete.

    The URI's own options take precedence. Credentials are never among the options.
    """
    scheme = uri.partition("://")[0]
    if scheme not in STORE_SECTIONS or scheme not in sections:
        return uri
    from cloudjob.store.s3.bucket_uri import with_options

    return with_options(uri, sections[scheme])


def with_store_options(uri: str, store_uri: str) -> str:
    """Return ``uri`` with the options of the job's store, if both have the same scheme."""
    scheme, _, rest = store_uri.partition("://")
    options = dict(urllib.parse.parse_qsl(rest.partition("?")[2]))
    return full_uri(uri, {scheme: options})


def job_store(store_of_job: str, default: str, sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return the URI of a job's store.

    Args:
        store_of_job: The store that the job names; missing options come from its section, then from
            ``default``. Empty if the job names none.
        default: The store of the job's platform.
    """
    return with_store_options(full_uri(store_of_job or default, sections), default)


def environment(keys: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process and, where they are unset or empty, those of a platform.

    Args:
        keys: The credentials of a platform's own store.
    """
    return {**keys, **{name: value for name, value in os.environ.items() if value}}


def open_store(
    uri: str, environ: Mapping[str, str] | None = None, *, retry_s: float = RETRY_S
) -> ObjectStore:
    """Return the store whose root is ``uri``; no I/O happens before its first use.

    Args:
        environ: Variables that may hold credentials, by default the process's environment.
        retry_s: Seconds to retry a request while the store cannot be reached.

    Raises:
        StoreError: The scheme is unknown, or the rest of the URI is invalid.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise StoreError(
            f"opening the store {uri!r}: not a URI", hint="for a folder write file:///its/path"
        )
    if scheme not in STORE_SCHEMES:
        import difflib

        near = difflib.get_close_matches(scheme, STORE_SCHEMES, 1)
        raise StoreError(
            f"opening the store {uri!r}: no store for the scheme {scheme!r}",
            hint=f"did you mean {near[0]}://?" if near else f"allowed: {', '.join(STORE_SCHEMES)}",
        )
    # Imported only when used, so that a local job does not wait for the import of a cloud's SDK.
    module = importlib.import_module(f"cloudjob.store.{SCHEMES[scheme].store}")
    store: ObjectStore = module.from_uri(uri, environ, retry_s=retry_s)
    return store
