"""The container's hold on objects: ``file://``, ``http(s)://``, ``s3://`` and ``obs://``.

An object is read and written whole or not at all. What S3 needs to know, it takes from the
environment (``access.py``). Nothing of HTTP is imported before a URI asks for it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Iterator

from jobentry import private_environ
from jobentry.contract import names
from jobentry.objects import directory
from jobentry.objects.base import (
    Entry,
    ObjectDamaged,
    ObjectError,
    ObjectMissing,
    Tell,
    quiet,
    scheme_of,
    shown,
)
from jobentry.objects.directory import path_of, uri_of

__all__ = ["Entry", "ObjectDamaged", "ObjectError", "ObjectMissing", "path_of", "shown", "uri_of"]

_MODULES = {"http": "http", "https": "http", "s3": "s3", "obs": "s3"}


def check(uri: str) -> None:
    """Do nothing for a URI that can be used, as far as one can tell without asking anybody.

    Raises:
        ObjectError: It cannot.
    """
    _module(uri).check(uri)


def fetch(uri: str, path: str, *, sha256: str = "", tell: Tell = quiet) -> None:
    """Write the object to the file ``path``, whole or not at all.

    Args:
        sha256: The digest in hexadecimal that it must have, if that is known.
        tell: Called with the number of bytes whenever some have come.

    Raises:
        ObjectError: The object is not there, is another, or one of the two cannot be used.
    """
    _module(uri).fetch(uri, path, sha256, tell)


def read(uri: str) -> bytes:
    """Return the object's bytes.

    Raises:
        ObjectError: The object is not there or cannot be read.
    """
    data: bytes = _module(uri).read(uri)
    return data


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of the object from ``offset`` on, fewer where it ends before.

    Raises:
        ObjectError: The object is not there or cannot be read.
    """
    data: bytes = _module(uri).read_range(uri, offset, length)
    return data


def look(uri: str) -> Entry:
    """Return the facts of one object.

    Raises:
        ObjectMissing: There is none.
        ObjectError: Nobody can say.
    """
    found: Entry = _module(uri).look(uri)
    return found


def put(path: str, uri: str, *, tell: Tell = quiet) -> None:
    """Store the file at ``path`` as the object ``uri``; when this returns it outlives a crash.

    Raises:
        ObjectError: The file cannot be read or the object cannot be written.
    """
    _module(uri).put(path, uri, tell)


def write(data: bytes, uri: str) -> None:
    """Store ``data`` as the object ``uri``; when this returns it outlives a crash.

    Raises:
        ObjectError: The object cannot be written.
    """
    _module(uri).write(data, uri)


def copy(uri: str, target: str) -> None:
    """Make the object ``target`` the same as ``uri``, one of the same store.

    Raises:
        ObjectError: One of them cannot be used, or it is too large to be copied at once.
    """
    _module(uri).copy(uri, target)


def delete(uri: str) -> None:
    """Leave no object ``uri``, whether or not there was one.

    Raises:
        ObjectError: It cannot be deleted.
    """
    _module(uri).delete(uri)


def list(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``, their names relative to it.

    Raises:
        ObjectError: They cannot be listed.
    """
    found: Iterator[Entry] = _module(prefix).listed(prefix)
    return found


def is_folder(uri: str) -> bool:
    """Whether the URI is that of a folder, which only ``file://`` has, and which may be empty."""
    return scheme_of(uri) == "file" and os.path.isdir(path_of(uri))


def uri_below(uri: str, name: str) -> str:
    """Return the URI of the object ``name``, a path relative to the folder ``uri``."""
    from urllib.parse import quote_from_bytes

    return uri.rstrip("/") + "/" + quote_from_bytes(os.fsencode(name))


def _module(uri: str) -> Any:
    scheme = scheme_of(uri)
    if _MODULES.get(scheme) == "s3" and names.CLOUDJOB_SIGNED_URIS in private_environ.environ():
        signed = importlib.import_module("jobentry.objects.signed")
        if signed.knows(uri):
            return signed
    if scheme in _MODULES:
        return importlib.import_module("jobentry.objects." + _MODULES[scheme])
    if scheme not in ("file", ""):
        raise ObjectError(
            f"find object: {shown(uri)!r}: there is no store for {scheme}://",
            "allowed: file, http, https, s3, obs",
        )
    return directory
