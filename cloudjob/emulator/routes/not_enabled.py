"""Services other than training: their requests are refused as not enabled for this account."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import JOBS, PROJECT, EmulatedService

_METHODS = "GET POST PUT PATCH DELETE"
_V1 = "/v1/{project_id}"
# Path at which a service's operations start -> the service's name in the error.
_SERVICES = {
    _V1 + "/workspaces": "workspace",
    _V1 + "/dev-servers": "Lite Server",
    _V1 + "/notebooks": "notebook",
    _V1 + "/authoring": "notebook",
    _V1 + "/images": "image management",
    _V1 + "/networks": "network",
    _V1 + "/pools": "resource pool management",
    _V1 + "/nodeconfigtemplates": "resource pool management",
    _V1 + "/plugintemplates": "resource pool management",
    _V1 + "/orders": "resource pool management",
    _V1 + "/scheduled-events": "resource pool management",
    _V1 + "/datasets": "data management",
    PROJECT + "/datasets": "data management",
    "/v1/auth-mode": "authorization mode",
    PROJECT + "/pools": "resource pool management",
    PROJECT + "/services": "inference",
    PROJECT + "/modelarts-service-v2": "inference",
    PROJECT + "/intranet-connection": "inference",
    PROJECT + "/workflows": "workflow",
    PROJECT + "/gallery-algorithm-publication": "gallery",
}
# Operations on training jobs that the emulator does not support.
_OPERATIONS = (
    JOBS + "/{job_id}/ft-artifacts",
    JOBS + "/{job_id}/ft-detail",
    JOBS + "/{job_id}/ft-metrics",
    JOBS + "/{job_id}/autosearch-parameter-analysis",
    JOBS + "/{job_id}/autosearch-trials",
    JOBS + "/{job_id}/autosearch-trial-earlystop",
    JOBS + "/autosearch/yaml-templates",
    # Only an administrator may change these, and the emulator has no administrator.
    PROJECT + "/training-quotas",
)


def templates(service: EmulatedService, request: Request) -> Any:
    return {"yaml_templates": []}


def _not_enabled(name: str) -> Callable[[EmulatedService, Request], Any]:
    def refuse(service: EmulatedService, request: Request) -> Any:
        raise ServiceRefusal("ModelArts.3518", name)

    return refuse


def _unsupported(service: EmulatedService, request: Request) -> Any:
    if "job_id" in request.path_params:
        service.job(request)
    name = request.path.split("/", 3)[3]
    raise ServiceRefusal("ModelArts.2858", f"{request.method} {name}")


# These endpoints come after those of all other modules, because their paths match those, too.
ENDPOINTS = (
    Endpoint("GET", JOBS + "/autosearch/yaml-templates", templates),
    *(Endpoint(_METHODS, path + "{rest:path}", _unsupported) for path in _OPERATIONS),
    *(
        Endpoint(_METHODS, path + "{rest:path}", _not_enabled(name))
        for path, name in _SERVICES.items()
    ),
)
