"""Sends a notification to a webhook, whose URL must not appear in any message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib import error as urls
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from cloudjob.errors import CloudJobError
from cloudjob.retries import Limits, retried
from cloudjob.store.parallel import call_with_timeout
from cloudjob.tracking.notice import NotSent, is_here

# Status codes of a service that is overloaded or restarting.
_BUSY = (429, 500, 502, 503, 504)


class _NoRedirects(HTTPRedirectHandler):
    """Treats a redirect as a failure: it could lead to any host, even over plain HTTP."""

    def redirect_request(self, *_: object) -> None:
        return None


def call(url: str, body: Mapping[str, Any], limits: Limits) -> None:
    """Send an object; retry while the webhook cannot have received it.

    Raises:
        NotSent: The webhook refused it, or did not answer, so that it may have arrived.
    """
    data = json.dumps({**body, "text": for_slack(body["text"])}).encode("ascii")

    def pause_s(error: CloudJobError, _tries: int) -> float | None:
        return 0.0 if isinstance(error, NotSent) and error.is_refused else None

    retried(lambda: _post(url, data, limits.answer_s), pause_s, limits)


def for_slack(text: str) -> str:
    """Escape a text for Slack, so that the output of a rank cannot mention a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _post(url: str, data: bytes, limit_s: float) -> None:
    handlers: list[Any] = [_NoRedirects]
    if is_here(urlsplit(url).hostname or ""):
        handlers.append(ProxyHandler({}))
    request = Request(url, data, {"Content-Type": "application/json", "User-Agent": "cloudjob"})

    def send() -> None:
        with build_opener(*handlers).open(request, timeout=limit_s):
            pass

    try:
        # A socket's timeout restarts with each byte.
        call_with_timeout(limit_s, send)
    except urls.HTTPError as error:
        error.close()
        more = "; redirects are not followed" if 300 <= error.code < 400 else ""
        message = f"it answered {error.code}{more}"
        raise NotSent(message, is_refused=error.code in _BUSY) from None
    except urls.URLError as error:
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise NotSent(reason, is_refused=True) from None
    except (OSError, HTTPException, ValueError) as error:
        # The text of the exception may contain the URL.
        raise NotSent(f"no answer ({type(error).__name__})") from None
