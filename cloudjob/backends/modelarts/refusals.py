"""What the service says when it refuses, in its own codes, and what to do about it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from cloudjob.errors import BackendError, JobNotFound, NotAuthorised

JOB_NOT_FOUND = "ModelArts.2775"
DUPLICATE_NAME = "ModelArts.2751"
# Answered with 204: what was asked for is not there yet.
NOT_READY = ("ModelArts.2776", "ModelArts.2777")

_HINTS = {
    DUPLICATE_NAME: "a job of this name is there already; `cloudjob list` shows yours",
    "ModelArts.2755": "does modelarts.body name an algorithm of this project?",
    "ModelArts.2757": "is the store a bucket of the same region, which ModelArts may read?",
    "ModelArts.2758": "is the store a bucket of the same region, which ModelArts may read?",
    "ModelArts.2759": "the code folder holds what cloudjob put there, and nothing else should",
    "ModelArts.2760": "the code folder holds what cloudjob put there, and nothing else should",
    "ModelArts.2761": "leave data out of the source (.cloudjobignore), and make it an --input",
    "ModelArts.2763": "`cloudjob doctor --backend modelarts` lists the flavors",
    "ModelArts.2780": "`cloudjob doctor --backend modelarts` lists the engines",
    "ModelArts.2781": "`cloudjob doctor --backend modelarts` lists the flavors",
    "ModelArts.2787": "is it modelarts.body? `cloudjob submit --dry-run` shows the whole request",
    "ModelArts.2788": "is it modelarts.body? `cloudjob submit --dry-run` shows the whole request",
    "ModelArts.2791": "places in OBS are obs://bucket/folder/, in the job's own region",
    "ModelArts.2793": "ask for fewer --nodes, or choose another --flavor",
    "ModelArts.0116": "wait for other jobs to end, or ask for a larger quota",
    "ModelArts.0118": "wait for other jobs to end, or ask for a larger quota",
    "ModelArts.0204": "set HUAWEICLOUD_SDK_PROJECT_ID, or leave it out and it is asked for",
    "ModelArts.0210": "set HUAWEICLOUD_SDK_PROJECT_ID, or leave it out and it is asked for",
    "APIGW.0301": "are the keys right, and is this machine's clock?",
    "APIGW.0308": "too many requests in this account; try again in a minute",
}
_STATUS_HINTS = {
    401: "are the keys right, and not over? `cloudjob doctor --backend modelarts` checks them",
    403: "ask for the permission `modelarts:trainJob:*`, and for access to the bucket",
    429: "too many requests in this account; try again in a minute",
}


class Refusal(NamedTuple):
    """What the service says.

    Args:
        status: Of HTTP.
        code: Its own, such as ``ModelArts.2775``; may be empty.
        request: Its number of the request, for its support.
    """

    status: int
    code: str
    message: str
    solution: str
    request: str


def read(status: int, body: bytes, request: str) -> Refusal:
    """Return what a body says, whichever of the service's forms it has."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    code, message, solution = _said(said)
    if not message:
        text = body.decode("utf-8", "replace").strip()
        message = " ".join(text.split())[:200] if not text.startswith("<") else ""
    return Refusal(status, code, message or f"HTTP {status}", solution, request)


def _said(said: Any) -> tuple[str, str, str]:
    if not isinstance(said, dict):
        return "", "", ""
    for code, message in (
        ("error_code", "error_msg"),
        ("errorCode", "errorMsg"),
        ("code", "message"),
        ("errCode", "errMsg"),
    ):
        if said.get(message) or said.get(code):
            solution = str(said.get("error_solution") or "")
            return str(said.get(code) or ""), str(said.get(message) or ""), solution
    # {"error": {"code": 401, "message": "..."}}, as IAM says it.
    inner = next((value for value in said.values() if isinstance(value, dict)), None)
    return _said(inner) if inner else ("", "", "")


class ServiceError(BackendError):
    """The service refused."""

    def __init__(self, message: str, refusal: Refusal, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.refusal = refusal


class Refused(ServiceError, NotAuthorised):
    """The service does not know who we are, or does not let us."""


class Gone(ServiceError, JobNotFound):
    """The service knows no such job."""

    exit_code = JobNotFound.exit_code


def error(doing: str, refusal: Refusal) -> ServiceError:
    """Return what is raised for a refusal."""
    kind = ServiceError
    if refusal.code == JOB_NOT_FOUND:
        kind = Gone
    elif refusal.status in (401, 403):
        kind = Refused
    details = [refusal.code, f"request {refusal.request}" if refusal.request else ""]
    known = ", ".join(text for text in details if text)
    text = f"{doing}: {_one_line(refusal.message)}" + (f" ({known})" if known else "")
    hint = _HINTS.get(refusal.code) or _STATUS_HINTS.get(refusal.status, "")
    return kind(text, refusal, hint=hint or _one_line(refusal.solution))


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
