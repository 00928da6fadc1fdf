"""Objects of any web server: ``https://`` and ``http://``, presigned or open to all."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any, Callable, Iterator, TypeVar

from jobentry.objects import remote, web
from jobentry.objects.base import Entry, ObjectError, Tell, quiet, shown, translated

Result = TypeVar("Result")

_MOST_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))


def check(uri: str) -> None:
    """Raise an ``ObjectError`` for what cannot be a URI."""
    try:
        parts = urllib.parse.urlsplit(uri)
        is_good = bool(parts.hostname) and parts.port != 0 and uri.isascii() and uri.isprintable()
    except ValueError:
        is_good = False
    if not is_good or " " in uri:
        raise ObjectError(
            f"find object: {shown(uri)!r}: not a URI of the form https://host/path",
            "encode what is no plain letter as %20 and the like",
        )


def fetch(uri: str, path: str, sha256: str = "", tell: Tell = quiet) -> None:
    """Write the object to the file ``path``, whole or not at all."""
    _following(uri, lambda source: remote.fetch(source, path, sha256, tell))


def read(uri: str) -> bytes:
    """Return the object's bytes."""
    return _following(uri, remote.read)


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Return ``length`` of the object's bytes, fewer where it ends before."""
    return _following(uri, lambda source: remote.read_range(source, offset, length))


def look(uri: str) -> Entry:
    """Return the facts of one object."""
    return _following(uri, remote.look)._replace(uri=uri)


def put(path: str, uri: str, tell: Tell = quiet) -> None:
    """Send the file at ``path`` with PUT, as a presigned URL asks for."""
    with translated("read file", path):
        size = os.stat(path).st_size
    _send("PUT", uri, "put object", web.FileBody(path, size))
    tell(size)


def write(data: bytes, uri: str) -> None:
    """Send ``data`` with PUT."""
    _send("PUT", uri, "write object", data)


def copy(uri: str, target: str) -> None:
    """Make the object ``target`` the same as ``uri``."""
    write(read(uri), target)


def delete(uri: str) -> None:
    """Ask for its end with DELETE."""
    _send("DELETE", uri, "delete object", b"")


def listed(prefix: str) -> Iterator[Entry]:
    """Refuse: a web server has no lists."""
    raise ObjectError(
        f"list objects: {shown(prefix)}: a web server does not say what it has",
        "name single objects, or give an s3:// or obs:// URI",
    )


def _send(method: str, uri: str, doing: str, body: bytes | web.FileBody) -> None:
    asked = remote.Asked(doing, dict, method, body)
    tries = web.Tries(web.patience())
    _following(uri, lambda source: source.exchange(asked, lambda answer: None, tries))


def _following(uri: str, act: Callable[[remote.Source], Result]) -> Result:
    """Do ``act`` to the object, wherever the server says that it is now."""
    place = uri
    for _ in range(_MOST_REDIRECTS):
        check(place)
        try:
            return act(_source(place, shown(uri)))
        except web.Refused as error:
            target = error.answer.headers.get("location", "")
            if error.answer.status not in _REDIRECTS or not target:
                raise
            target = urllib.parse.urljoin(place, target)
            schemes = ("https",) if place.lower().startswith("https:") else ("https", "http")
            if urllib.parse.urlsplit(target).scheme not in schemes:
                text = f"{error}: to {shown(target)!r}, which is not as safe"
                raise ObjectError(text, "give the URI that it leads to, if you trust it") from error
            place = target
    raise ObjectError(f"find object: {shown(uri)}: more than {_MOST_REDIRECTS} redirects")


def _source(uri: str, name: str) -> remote.Source:
    parts = urllib.parse.urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    target = (parts.path or "/") + ("?" + parts.query if parts.query else "")

    def exchange(asked: remote.Asked, take: web.Read[Any], tries: web.Tries) -> Any:
        def wire() -> web.Wire:
            said = {"Host": host, **asked.headers(), **web.login(parts, "Authorization")}
            return web.Wire(asked.method, f"{parts.scheme}://{host}", target, said, asked.body)

        return web.exchange(wire, take, asked.doing, name, tries)

    return remote.Source(name, exchange, is_store=False)
