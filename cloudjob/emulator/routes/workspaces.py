"""Workspaces, of which only the default one exists."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import Items, Model, Order, PageQuery
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import EmulatedService

_WORKSPACES = "/v1/{project_id}/workspaces"
_WORKSPACE = _WORKSPACES + "/{workspace_id}"
_ID = "0"


class _Workspaces(PageQuery):
    limit: Annotated[int, Field(ge=1, le=1000)] = 1000
    name: str = ""
    order: Order = "desc"
    sort_by: Literal["name", "update_time", "status"] = "name"
    filter_accessible: bool = False


def workspaces(service: EmulatedService, request: Request) -> Any:
    query, default = request.parsed_query(_Workspaces), _default(service)
    listed = [default] if query.name in default["name"] and not query.offset else []
    return {"total_count": 1, "count": len(listed), "workspaces": listed}


def workspace(service: EmulatedService, request: Request) -> Any:
    _check(request)
    return {**_default(service), "grants": []}


def quotas(service: EmulatedService, request: Request) -> Any:
    """Return the quotas of the workspace: -1, because only the account's quotas apply."""
    _check(request)
    names = ("training_job.training_duration", "training_job.max_count")
    listed = [{"resource": name, "quota": -1, "min_quota": -1, "used_quota": -1} for name in names]
    return {"quotas": listed}


class _ActionRequest(Model):
    action_id: str = ""
    action: str = ""
    resource: str = ""


class _Actions(Model):
    requests: Items[_ActionRequest] = []


def validate(service: EmulatedService, request: Request) -> Any:
    """Return which of the requested actions are allowed."""
    _check(request)
    user = service.user(request)
    requested = request.body(_Actions).requests
    return {
        "results": [
            {**item.model_dump(), "verdict": "allow" if user.may(item.action) else "deny"}
            for item in requested
        ]
    }


def users(service: EmulatedService, request: Request) -> Any:
    return {"users": [{"user_name": user.name} for user in service.account.users]}


def refuse_change(service: EmulatedService, request: Request) -> Any:
    _check(request)
    raise ServiceRefusal("ModelArts.3566")


def _check(request: Request) -> None:
    if request.path_params["workspace_id"] != _ID:
        raise ServiceRefusal("ModelArts.0102")


def _default(service: EmulatedService) -> dict[str, Any]:
    return {
        "id": _ID,
        "name": "default",
        "description": "",
        "owner": service.settings.domain,
        "auth_type": "PUBLIC",
        "enterprise_project_id": "0",
        "enterprise_project_name": "default",
        "status": "NORMAL",
        "status_info": "",
        "create_time": 0,
        "update_time": 0,
    }


ENDPOINTS = (
    Endpoint("GET", _WORKSPACES, workspaces),
    Endpoint("GET", _WORKSPACES + "/users/list", users),
    Endpoint("GET", _WORKSPACE, workspace),
    Endpoint("PUT DELETE", _WORKSPACE, refuse_change),
    Endpoint("GET", _WORKSPACE + "/quotas", quotas),
    Endpoint("PUT", _WORKSPACE + "/quotas", refuse_change),
    Endpoint("POST", _WORKSPACE + "/auth", validate),
)
