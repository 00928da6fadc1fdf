"""The errors of the API server, each with a hint."""

from __future__ import annotations

import json
from typing import Any

from cloudjob.errors import BackendError, JobNotFound, NotAuthorised, Unreachable

UNAUTHORISED, FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 401, 403, 404, 409, 410
TOO_MANY_REQUESTS = 429
# Statuses that are retried: nothing was done, or the request is idempotent.
TRANSIENT_STATUSES = (TOO_MANY_REQUESTS, 500, 502, 503, 504)


class ApiError(BackendError):
    """The API server has refused a request.

    Args:
        status: The HTTP status.
        reason: The API's reason, such as ``AlreadyExists``.
    """

    def __init__(self, message: str, *, hint: str = "", status: int, reason: str) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason
        # Seconds that the server asks to wait; 0 if it does not.
        self.retry_after_s = 0.0


class AccessDenied(ApiError, NotAuthorised):
    """The API server rejects the credentials, or does not allow the operation."""


class Unavailable(ApiError, Unreachable):
    """The API server cannot answer at the moment."""


class ObjectNotFound(ApiError, JobNotFound):
    """There is no such object."""

    @property
    def is_of_path(self) -> bool:
        """Whether the server does not serve such objects: they were never there, or it starts."""
        return not self.reason


# Part of the message -> hint; the first match counts.
_HINTS = (
    (
        "exceeded quota",
        "`kubectl describe quota` shows what is left; request less, or ask for a larger quota",
    ),
    ("no matches for kind", "is the operator installed? kubernetes.engine selects another one"),
    ("is being deleted", "wait until it is deleted, or set another kubernetes.namespace"),
    ("namespaces", "set kubernetes.namespace to another one"),
    ("Request entity too large", "send fewer secrets, or shorter ones"),
)
_UNAUTHORISED = "are the credentials of this context still valid? try `kubectl get pods`"
_FORBIDDEN = (
    "`kubectl auth can-i --list` lists what you may do, and "
    "`cloudjob docs kubernetes-permissions` what is needed"
)


def api_error(doing: str, status: int, body: bytes, *, is_made: bool = False) -> ApiError:
    """Return the error for an answer with a status of 400 or more.

    Args:
        is_made: Whether the request creates something, so that 404 does not mean a missing job.
    """
    text, reason = _message_and_reason(body)
    message = f"{doing}: {text or f'HTTP {status}'}"
    if status == UNAUTHORISED:
        return AccessDenied(message, hint=_UNAUTHORISED, status=status, reason=reason)
    if status in TRANSIENT_STATUSES:
        return Unavailable(message, status=status, reason=reason)
    hint = next((hint for part, hint in _HINTS if part in text), "")
    if status == FORBIDDEN and "exceeded quota" not in text:
        return AccessDenied(message, hint=_FORBIDDEN, status=status, reason=reason)
    if status == NOT_FOUND and not is_made:
        return ObjectNotFound(message, hint=hint, status=status, reason=reason)
    return ApiError(message, hint=hint, status=status, reason=reason)


def _message_and_reason(body: bytes) -> tuple[str, str]:
    """Return the message and reason of a ``Status``, or the first line of any other answer."""
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip().partition("\n")[0][:500], ""
    if not isinstance(answer, dict):
        return "", ""
    text = " ".join(str(answer.get("message") or "").split())
    return text, str(answer.get("reason") or "")
