"""The node's access to objects: ``file://``, ``http(s)://``, ``s3://`` and ``obs://``.

An object appears completely or not at all; when a write returns, the object survives a crash. Every
function raises ``ObjectError`` on failure. The environment configures the access to S3 and OBS
(``access``). The HTTP client is imported when the first URI needs it.

Start reading at ``client`` (the one retry loop), ``remote`` (downloads) and ``s3``.
"""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from typing import Any, Iterator

from jobentry.contract import names
from jobentry.contract.stores import SCHEMES
from jobentry.objects.base import (
    Entry,
    ObjectDamaged,
    ObjectError,
    ObjectMissing,
    Progress,
    no_progress,
    scheme_of,
    shown,
)
from jobentry.objects.directory import path_of, uri_of
from jobentry.secrets import private_environ

__all__ = ["Entry", "ObjectDamaged", "ObjectError", "ObjectMissing", "path_of", "shown", "uri_of"]


def check(uri: str) -> None:
    """Check a URI and the settings for its store without asking a server."""
    if uri not in _signed_addresses():
        _module(uri).check(uri)


def fetch(uri: str, path: str, *, sha256: str = "", progress: Progress = no_progress) -> None:
    """Write the object to the file ``path``, which must have the digest ``sha256`` if given."""
    _object(uri).fetch(path, sha256, progress)


def read(uri: str) -> bytes:
    """Return the object's bytes."""
    data: bytes = _object(uri).read()
    return data


def signed_uri(key: str) -> str:
    """Return the URI of the object whose key this is, if it has a signed URL; else an empty one."""
    return next((uri for uri in _signed_addresses() if uri.endswith("/" + key)), "")


def peek(uri: str, limit_bytes: int) -> bytes:
    """Return the first bytes of an object on a server, or fail within seconds."""
    data: bytes = _object(uri).peek(limit_bytes)
    return data


def stat(uri: str) -> Entry:
    """Return the metadata of one object; raise ``ObjectMissing`` if it does not exist."""
    entry: Entry = _object(uri).stat()
    return entry._replace(uri=uri)


def put(path: str, uri: str, *, below: str = "", progress: Progress = no_progress) -> None:
    """Store the file at ``path`` as the object ``uri``, which must not be a web server's.

    Args:
        below: A folder above the object. If it is one of ``file://``, no link below it is followed,
            as others may write there, too; by default it is the object's own folder.
    """
    _object(uri, below).put(path, progress)


def write(data: bytes, uri: str, *, below: str = "") -> None:
    """Store ``data`` as the object ``uri``; ``below`` as for ``put``."""
    _object(uri, below).write(data)


def copy(uri: str, target: str, *, below: str = "") -> None:
    """Copy an object within one store; S3 refuses to copy more than 5 GiB; ``below`` as above."""
    _object(uri, below).copy_to(_object(target, below))


def delete(uri: str, *, below: str = "") -> None:
    """Delete an object if there is one; ``below`` as for ``put``."""
    _object(uri, below).delete()


def list(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``, with names relative to it."""
    entries: Iterator[Entry] = _module(prefix).listed(prefix)
    return entries


def is_folder(uri: str) -> bool:
    """Whether the URI names a folder, which only ``file://`` has, and which may be empty."""
    return _is_file(uri) and os.path.isdir(path_of(uri))


def uri_below(uri: str, name: str) -> str:
    """Return the URI of the object ``name``, a path relative to the folder ``uri``."""
    from urllib.parse import quote_from_bytes

    return uri.rstrip("/") + "/" + quote_from_bytes(os.fsencode(name))


def _is_file(uri: str) -> bool:
    return scheme_of(uri) == "file"


def _module(uri: str) -> Any:
    scheme = scheme_of(uri) or "file"
    if scheme not in SCHEMES:
        raise ObjectError(
            f"looking for {shown(uri)!r}: there is no store for {scheme}://",
            "allowed: {}".format(", ".join(SCHEMES)),
        )
    return import_module(f"jobentry.objects.{SCHEMES[scheme].objects}")


def _object(uri: str, below: str = "") -> Any:
    """Return the object at a URI; one with a signed URL is a web object."""
    address = _signed_addresses().get(uri, "")
    if not address:
        module = _module(uri)
        return module.object_at(uri, below) if below and _is_file(uri) else module.object_at(uri)
    from jobentry.objects.web import WebObject

    match = re.search(r"X-Amz-Date=(\w+).*X-Amz-Expires=(\d+)", address)
    when = " at %s for %s seconds" % match.groups() if match else ""
    return WebObject(
        address,
        f"the submit signed this address{when}: has that time passed? Submit again, with a larger"
        " presigned_h or without it",
    )


def _signed_addresses() -> dict[str, str]:
    """Return the signed URLs that replace a store's keys, by the URIs of the objects."""
    text = private_environ.environ().get(names.CLOUDJOB_SIGNED_URIS, "")
    addresses: dict[str, str] = json.loads(text) if text else {}
    return addresses
