"""Authorizations: the agencies with which ModelArts acts for the users of the account.

A new project has one for all users. Without it, jobs cannot be created.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import Model, PageQuery, StoredResource, now_ms
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, EmulatedService

_AUTHORIZATIONS = PROJECT + "/authorizations"
_ALL = "all-users"
_AGENCY = "modelarts_agency"


class _Authorization(Model):
    user_id: str = _ALL
    type: Literal["agency"] = "agency"
    content: str = _AGENCY


class _Stored(Model):
    user_id: str
    user_name: str
    type: str = "agency"
    content: str
    create_time: int = Field(default_factory=now_ms)


class _All(StoredResource):
    """All authorizations of a project."""

    kind = "authorization"
    auth: list[_Stored]


class _Authorizations(PageQuery):
    limit: Annotated[int, Field(ge=1, le=1000)] = 1000
    order: Literal["ASC", "DESC"] = "ASC"
    sort_by: Literal["user_name", "create_time"] = "user_name"
    user_id: str = ""


def authorizations(service: EmulatedService, request: Request) -> Any:
    """Return a sorted page of authorizations; ``offset`` is the page's number."""
    query = request.parsed_query(_Authorizations)
    current = [item for item in _current(service) if query.user_id in ("", item.user_id)]
    current.sort(key=lambda item: getattr(item, query.sort_by), reverse=query.order == "DESC")
    page = query.of(current)
    return {"total_count": len(current), "auth": [item.model_dump() for item in page]}


def create(service: EmulatedService, request: Request) -> Any:
    requested = request.body(_Authorization)
    user = requested.user_id or _ALL
    if any(item.user_id == user for item in _current(service)):
        raise ServiceRefusal("ModelArts.0424")
    _store(service, [*_current(service), _made(service, user, requested.content)])
    return True


def remove(service: EmulatedService, request: Request) -> Any:
    """Remove the authorization of one user or of all users."""
    user = request.query.get("user_id", "")
    current = _current(service)
    remaining = [item for item in current if user not in ("", _ALL) and item.user_id != user]
    if len(remaining) == len(current):
        raise ServiceRefusal("ModelArts.0429")
    _store(service, remaining)
    return True


class _Agency(Model):
    agency_name_suffix: str = ""


def create_agency(service: EmulatedService, request: Request) -> Any:
    """Create an agency; in the emulator it only has a name."""
    suffix = request.body(_Agency).agency_name_suffix
    return {"agency_name": f"{_AGENCY}_{suffix}" if suffix else _AGENCY}


def mode(service: EmulatedService, request: Request) -> Any:
    return {"domain_id": service.account.domain_id, "mode": "noncompulsory"}


def check(service: EmulatedService, user_id: str) -> None:
    """Check that ModelArts may act for a user.

    Raises:
        ServiceRefusal: ModelArts has no authorization for the user.
    """
    if not any(item.user_id in (_ALL, user_id) for item in _current(service)):
        raise ServiceRefusal("ModelArts.2785")


def _current(service: EmulatedService) -> list[_Stored]:
    stored = service.database.resource(_All, _All.kind)
    return stored.auth if stored else [_made(service, _ALL, _AGENCY)]


def _store(service: EmulatedService, authorizations_left: list[_Stored]) -> None:
    service.database.put_resource(_All.kind, _All.kind, _All(auth=authorizations_left))


def _made(service: EmulatedService, user_id: str, content: str) -> _Stored:
    names = {user.id: user.name for user in service.account.users}
    if user_id != _ALL and user_id not in names:
        raise ServiceRefusal("ModelArts.0429")
    return _Stored(user_id=user_id, user_name=names.get(user_id, _ALL), content=content)


ENDPOINTS = (
    Endpoint("GET", _AUTHORIZATIONS, authorizations),
    Endpoint("POST", _AUTHORIZATIONS, create),
    Endpoint("DELETE", _AUTHORIZATIONS, remove),
    Endpoint("POST", PROJECT + "/agency", create_agency),
    Endpoint("GET", "/v1/auth-mode", mode),
)
