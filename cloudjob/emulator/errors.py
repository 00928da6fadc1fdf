"""What the service says against a request: HTTP status, code and words, as it documents them."""

from __future__ import annotations

from typing import Any

# code -> HTTP status, its words ("%s" takes the detail), and what the service advises.
# From the vendor's list of error codes; APIGW.* come from the gateway in front of it.
_ERRORS: dict[str, tuple[int, str, str]] = {
    "APIGW.0101": (404, "The API does not exist or has not been published in the environment", ""),
    "APIGW.0106": (403, "Orchestration error: %s", ""),
    "APIGW.0301": (401, "Incorrect IAM authentication information: %s", ""),
    "APIGW.0308": (
        429,
        "The throttling threshold has been reached: policy user over ratelimit,limit:%s",
        "",
    ),
    "ModelArts.0010": (500, "Internal error.", "Contact R&D and O&M personnel."),
    "ModelArts.0102": (400, "The workspace does not exist.", "Check the current workspace."),
    "ModelArts.0118": (
        400,
        "The expected %s exceeds the quota limit.",
        "Release idle resources, or apply for more quotas",
    ),
    "ModelArts.0210": (400, "Invalid project ID.", "Check the project ID."),
    "ModelArts.2751": (
        400,
        "Duplicate training job (name %s).",
        "Change training job name.",
    ),
    "ModelArts.2752": (
        400,
        "An algorithm with the same name and version already exists.",
        "Check the validity of the algorithm information in the request.",
    ),
    "ModelArts.2753": (
        400,
        "input and output channel information is not standardized. %s",
        "Check the validity of the input and output channel information in the request.",
    ),
    "ModelArts.2755": (
        400,
        "algorithm not found.",
        "Check whether the training project information in the request is valid.",
    ),
    "ModelArts.2757": (
        400,
        "code directory path error. %s",
        "Check whether the training project information in the request is valid.",
    ),
    "ModelArts.2758": (
        400,
        "code startup file path error. %s",
        "Check whether the training project information in the request is valid.",
    ),
    "ModelArts.2759": (
        400,
        "There are too many code files. A maximum of %s files can be uploaded.",
        "Please check the number of code files.",
    ),
    "ModelArts.2760": (
        400,
        "Insufficient quota, too many levels of code directories, supporting up to %s directories",
        "Please check the code directory depth.",
    ),
    "ModelArts.2761": (
        400,
        "Insufficient quota, the code file takes up too much storage space, supporting up to %s GB",
        "Please check the code directory depth.",
    ),
    "ModelArts.2763": (
        400,
        "The selected flavor is invalid. %s",
        "Check the validity of the flavor in the request.",
    ),
    "ModelArts.2764": (
        400,
        "Invalid query parameter (%s).",
        "Check the validity of the parameter in the request.",
    ),
    "ModelArts.2767": (400, "parameter key repeat. %s", "Please rename the parameter name."),
    "ModelArts.2775": (
        400,
        "Training job (ID: %s) not found.",
        "Check whether the training job information in the request is valid.",
    ),
    "ModelArts.2776": (204, "not ready for fetch log, wait for training to return data", ""),
    "ModelArts.2777": (204, "not ready for fetch metric, wait for training to return data", ""),
    "ModelArts.2780": (
        400,
        "AI engine(id:%s) not found.",
        "Check whether the engine informer in the request is valid.",
    ),
    "ModelArts.2781": (
        400,
        "Flavor (%s) not found.",
        "Check whether the flavor in the request is valid.",
    ),
    "ModelArts.2786": (
        404,
        "The project ID (%s) in the request does not match that in the token.",
        "Change the request token or change the project ID in the request.",
    ),
    "ModelArts.2787": (400, "Invalid JSON request body. %s", "Check the request body."),
    "ModelArts.2788": (400, "Invalid parameter(%s).", "Check the request parameter."),
    "ModelArts.2789": (
        400,
        "Unsupported filtering item. %s",
        "Check whether the filtering item is valid.",
    ),
    "ModelArts.2790": (
        400,
        "Unsupported sorting item. %s",
        "Check whether the sorting item is valid.",
    ),
    "ModelArts.2791": (400, "Invalid obs path: %s.", "Check the obs path."),
    "ModelArts.2793": (
        400,
        "The number of flavor instances (%s) exceeds the maximum.",
        "Check the flavor.",
    ),
    "ModelArts.2796": (
        409,
        "The job cannot be terminated. %s",
        "Check whether the job status is valid.",
    ),
    "ModelArts.2799": (429, "services too many requests", "Please try again later"),
}


class ApiError(ValueError):
    """The service refuses; ``code`` is one that it documents.

    As a ``ValueError`` it may be raised by a validator of pydantic's.

    Args:
        detail: What stands in the place of ``%s`` in the code's words.
    """

    def __init__(self, code: str, detail: object = "") -> None:
        self.code = code
        self.status, words, self.advice = _ERRORS[code]
        self.words = (words % detail if "%s" in words else words).strip()
        super().__init__(f"{code}: {self.words}")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body that says it: the gateway's form or the service's."""
    if error.code.startswith("APIGW."):
        return {"error_msg": error.words, "error_code": error.code, "request_id": request_id}
    return {
        "error_msg": error.words,
        "error_code": error.code,
        "error_solution": error.advice,
    }
