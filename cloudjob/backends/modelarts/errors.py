"""Turns the service's error answers into errors with a hint."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from requests import Response
from urllib3 import Retry
from urllib3.exceptions import InvalidHeader

from cloudjob.errors import BackendError, JobNotFound, NotAuthorised

JOB_NOT_FOUND = "ModelArts.2775"
DUPLICATE_NAME = "ModelArts.2751"

_BUCKET = "is the store a bucket of the same region that ModelArts may read?"
_FOLDER = "the code folder must hold only what cloudjob put there"
_FLAVORS = "`cloudjob doctor --backend modelarts` lists the flavors"
_BODY = "check modelarts.body; `cloudjob submit --show-request` prints the request"
_QUOTA = "wait for other jobs to end, or ask for a larger quota"
_PROJECT = "set HUAWEICLOUD_SDK_PROJECT_ID, or unset it so that cloudjob asks for the project"
_RATE = "too many requests in this account; try again in a minute"
_HINTS = {
    DUPLICATE_NAME: "a job of this name exists already; `cloudjob list` shows yours",
    "ModelArts.2755": "does modelarts.body name an algorithm of this project?",
    "ModelArts.2757": _BUCKET,
    "ModelArts.2758": _BUCKET,
    "ModelArts.2759": _FOLDER,
    "ModelArts.2760": _FOLDER,
    "ModelArts.2761": "exclude data from the source (.cloudjobignore), and pass it with --input",
    "ModelArts.2763": _FLAVORS,
    "ModelArts.2780": "`cloudjob doctor --backend modelarts` lists the engines",
    "ModelArts.2781": _FLAVORS,
    "ModelArts.2787": _BODY,
    "ModelArts.2788": _BODY,
    "ModelArts.2791": "paths in OBS have the form obs://bucket/folder/, in the region of the job",
    "ModelArts.2793": "ask for fewer --nodes, or choose another --flavor",
    "ModelArts.0116": _QUOTA,
    "ModelArts.0118": _QUOTA,
    "ModelArts.0204": _PROJECT,
    "ModelArts.0210": _PROJECT,
    "APIGW.0301": "are the keys and this machine's clock right?",
    "APIGW.0308": _RATE,
}
_STATUS_HINTS = {
    401: "are the keys right and still valid? `cloudjob doctor --backend modelarts` checks them",
    403: "ask for the permission `modelarts:trainJob:*`, and for access to the bucket",
    429: _RATE,
}
# The keys of code and message in answers of the service, its gateway and IAM.
_FIELDS = (
    ("error_code", "error_msg"),
    ("errorCode", "errorMsg"),
    ("code", "message"),
    ("errCode", "errMsg"),
)


class ServiceError(BackendError):
    """The service refused a request.

    Args:
        status: The HTTP status.
        code: The service's error code, such as ``ModelArts.2775``; may be empty.
        retry_after_s: Seconds that the service asks to wait; 0 if it does not.
    """

    def __init__(
        self, message: str, *, hint: str, status: int, code: str, retry_after_s: float
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class ServiceDenied(ServiceError, NotAuthorised):
    """The service rejects the credentials, or does not allow the operation."""


class ServiceJobNotFound(ServiceError, JobNotFound):
    """The service has no such job."""

    exit_code = JobNotFound.exit_code


def service_error(doing: str, answer: Response) -> ServiceError:
    """Return the error for an answer with an HTTP status of 400 or more."""
    status = answer.status_code
    code, message, advice = _fields(answer.content)
    kind = ServiceError
    if code == JOB_NOT_FOUND:
        kind = ServiceJobNotFound
    elif status in (401, 403):
        kind = ServiceDenied
    request = answer.headers.get("X-Request-Id", "")
    details = ", ".join(text for text in (code, f"request {request}" if request else "") if text)
    text = _one_line(message) or f"HTTP {status}"
    return kind(
        f"{doing}: {text} ({details})" if details else f"{doing}: {text}",
        hint=_HINTS.get(code) or _STATUS_HINTS.get(status) or _one_line(advice),
        status=status,
        code=code,
        retry_after_s=_retry_after_s(answer),
    )


def _retry_after_s(answer: Response) -> float:
    with contextlib.suppress(InvalidHeader):
        return Retry().parse_retry_after(answer.headers.get("Retry-After", ""))
    return 0.0


def _fields(body: bytes) -> tuple[str, str, str]:
    """Return code, message and advice of an answer; empty if it has none."""
    try:
        return _fields_of(json.loads(body))
    except ValueError:
        text = body.decode("utf-8", "replace").strip()
        return "", "" if text.startswith("<") else text[:200], ""


def _fields_of(answer: Any) -> tuple[str, str, str]:
    if not isinstance(answer, dict):
        return "", "", ""
    for code, message in _FIELDS:
        if answer.get(message) or answer.get(code):
            advice = str(answer.get("error_solution") or "")
            return str(answer.get(code) or ""), str(answer.get(message) or ""), advice
    # {"error": {"code": 401, "message": "..."}}, as IAM writes it.
    inner = next((value for value in answer.values() if isinstance(value, dict)), None)
    return _fields_of(inner)


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
