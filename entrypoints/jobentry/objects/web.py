"""Objects of a web server: ``https://`` and ``http://``, presigned or public."""

from __future__ import annotations

import base64
import contextlib
import urllib.parse
from http.client import HTTPResponse
from typing import Callable, Iterator, TypeVar

from jobentry.objects import client, remote
from jobentry.objects.base import Entry, ObjectError, shown

Result = TypeVar("Result")

_REDIRECTS = frozenset((301, 302, 303, 307, 308))


class WebObject(remote.RemoteObject):
    """An object at a URL, to which no file can be uploaded.

    Args:
        refused_hint: What to try if the server refuses access; the client's own hint by default.
    """

    is_in_store = False

    def __init__(self, url: str, refused_hint: str = "") -> None:
        check(url)
        self.uri = shown(url)
        self._url = url
        self._refused_hint = refused_hint

    def request(
        self,
        call: remote.Call,
        read: Callable[[HTTPResponse], Result],
        limit_s: float | None = None,
    ) -> Result:
        """Send a request to the current URL of the object."""

        def make() -> client.Request:
            parts = urllib.parse.urlsplit(self._url)
            host = parts.netloc.rpartition("@")[2]
            url = urllib.parse.urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
            headers = {**dict(call.headers), **_basic_auth(parts)}
            return client.Request(call.method, url, headers, call.body)

        try:
            return client.send(make, read, f"{call.doing} {self.uri}", self._follow, limit_s)
        except client.Refused as error:
            if self._refused_hint and error.answer.status in (400, 401, 403):
                raise client.Refused(str(error), self._refused_hint, error.answer) from error
            raise

    def _follow(self, answer: client.Answer) -> bool:
        """Follow a redirect, which then also applies to later requests for this object."""
        location = answer.headers.get("location", "")
        if answer.status not in _REDIRECTS or not location:
            return False
        target = urllib.parse.urljoin(self._url, location)
        schemes = ("https",) if self._url.lower().startswith("https:") else ("https", "http")
        if urllib.parse.urlsplit(target).scheme not in schemes:
            raise ObjectError(
                f"looking for {self.uri}: it redirects to {shown(target)!r}, which is less safe",
                "give that URI, if you trust it",
            )
        check(target)
        self._url = target
        return True


def _basic_auth(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return the header that sends the user and the password of a URL, if it has any."""
    if parts.username is None:
        return {}
    text = urllib.parse.unquote(parts.username) + ":" + urllib.parse.unquote(parts.password or "")
    return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode("ascii")}


def check(uri: str) -> None:
    """Raise an ``ObjectError`` if this is not the URI of an object."""
    is_good = False
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(uri)
        is_good = bool(parts.hostname) and parts.port != 0 and uri.isascii() and uri.isprintable()
    if not is_good or " " in uri:
        raise ObjectError(
            f"looking for {shown(uri)!r}: not a URI of the form https://host/path",
            "percent-encode spaces and non-ASCII characters, such as a space as %20",
        )


def listed(prefix: str) -> Iterator[Entry]:
    """Raise an ``ObjectError``, as a web server does not list its objects."""
    raise ObjectError(
        f"listing {shown(prefix)}: a web server does not list its objects",
        "name single objects, or give an s3:// or obs:// URI",
    )


object_at = WebObject
