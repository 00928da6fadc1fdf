"""The errors of the service: HTTP status, code and text, as it documents them."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any

# From the vendor's list of error codes; APIGW.* come from the gateway in front of the service.
# In a message, "%s" is replaced by the detail.
with files("cloudjob.emulator").joinpath("errors.csv").open(encoding="ascii") as _file:
    _ERRORS = {row["code"]: row for row in csv.DictReader(_file)}


class ServiceRefusal(ValueError):
    """The service refuses a request; ``code`` is one of its documented error codes.

    This is a ``ValueError`` so that validators of pydantic may raise it.

    Args:
        detail: Replaces ``%s`` in the code's message.
    """

    def __init__(self, code: str, detail: object = "") -> None:
        row = _ERRORS[code]
        self.code = code
        self.status, self.advice = int(row["status"]), row["advice"]
        message = row["message"]
        self.message = (message % detail if "%s" in message else message).strip()
        super().__init__(f"{code}: {self.message}")


# status -> the gateway's message for a request that does not reach the service.
_GATEWAY_MESSAGES = {
    400: "Bad request.",
    408: "Request timeout.",
    413: "Request entity too large.",
    414: "Request URI too large.",
    431: "Request headers too large.",
    501: "Not implemented.",
}


def gateway_error(status: int, request_id: str) -> dict[str, Any]:
    """Return the response body for a request that the gateway refuses."""
    message = _GATEWAY_MESSAGES.get(status, _GATEWAY_MESSAGES[400])
    return {"error_msg": message, "error_code": "APIGW.0201", "request_id": request_id}


def error_body(error: ServiceRefusal, request_id: str) -> dict[str, Any]:
    """Return the response body for an error, in the format of the gateway or of the service."""
    if error.code.startswith("APIGW."):
        return {"error_msg": error.message, "error_code": error.code, "request_id": request_id}
    return {
        "error_msg": error.message,
        "error_code": error.code,
        "error_solution": error.advice,
    }
