"""IAM: tokens for a password, a key or a token; temporary keys; the projects and the account."""

from __future__ import annotations

import secrets
import time
from typing import Any

from pydantic import AliasPath, Field

from cloudjob.emulator.app import Answer, Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import Items, Model, parse
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import EmulatedService
from cloudjob.emulator.state import User
from cloudjob.model.times import rfc3339

_MIN_S, _MAX_S = 900, 86_400


def _at(*keys: str, default: Any = "") -> Any:
    """Return a field with the value at these keys below ``auth``."""
    return Field(default, validation_alias=AliasPath("auth", *keys))


class _Auth(Model):
    """The body of a request for a token or a temporary key."""

    identity: dict[str, Any] = Field(validation_alias=AliasPath("auth", "identity"))
    methods: Items[str] = _at("identity", "methods", default=[])
    user: str = _at("identity", "password", "user", "name")
    password: str = _at("identity", "password", "user", "password")
    user_domain: str = _at("identity", "password", "user", "domain", "name")
    access_key: str = _at("identity", "hw_ak_sk", "access", "key")
    secret_key: str = _at("identity", "hw_ak_sk", "secret", "key")
    token: str = _at("identity", "token", "id")
    duration_s: int = _at("identity", "token", "duration_seconds", default=0)
    scope: dict[str, Any] | None = _at("scope", default=None)
    project: dict[str, Any] | None = _at("scope", "project", default=None)
    project_id: str = _at("scope", "project", "id")
    project_name: str = _at("scope", "project", "name")
    domain_id: str = _at("scope", "domain", "id")
    domain_name: str = _at("scope", "domain", "name")


def _parsed(request: Request) -> _Auth | Answer:
    body = request.json()
    try:
        return parse(_Auth, _without_nulls(body))
    except ServiceRefusal:
        return _refused(400, "Expecting to find identity in auth. The server could not comply.")


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}


# -- tokens ---------------------------------------------------------------------------------------


def create_token(service: EmulatedService, request: Request) -> Any:
    """Return a token in the header ``X-Subject-Token``."""
    auth = _parsed(request)
    if isinstance(auth, Answer):
        return auth
    users = [_user(service, auth, method) for method in auth.methods]
    user = next(filter(None, users), None)
    if user is None:
        return _refused(401, "The username or password is wrong.")
    project = _project(service, auth)
    if project is None:
        return _refused(401, "The project or domain of the scope could not be found.")
    token, expires_s = service.access.new_token(user, project)
    body = {"token": _token(service, user, project, expires_s)}
    return Answer(201, body, {"X-Subject-Token": token})


def _user(service: EmulatedService, auth: _Auth, method: str) -> User | None:
    """Return the user with this password or key; None if the credentials are wrong."""
    account = service.account
    if method == "password":
        user = account.user(auth.user)
        is_right = user and _is_same(auth.password, user.password)
        return user if is_right and auth.user_domain == service.settings.domain else None
    if method == "hw_ak_sk":
        user = account.user_of_key(auth.access_key)
        return user if user and _is_same(auth.secret_key, user.keys.secret_key) else None
    return None


def _is_same(sent: str, expected: str) -> bool:
    return secrets.compare_digest(sent.encode(), expected.encode())


def _project(service: EmulatedService, auth: _Auth) -> str | None:
    """Return the id of the scope's project, empty for the account; None for an unknown project."""
    account = service.account
    if auth.scope is None:
        return account.project_id
    if auth.project is None:
        our_domains = (service.settings.domain, account.domain_id)
        return "" if auth.domain_name in our_domains or auth.domain_id in our_domains else None
    if auth.project_id in account.projects.values():
        return auth.project_id
    return account.projects.get(auth.project_name)


def _token(service: EmulatedService, user: User, project: str, expires_s: float) -> dict[str, Any]:
    domain = {"id": service.account.domain_id, "name": service.settings.domain}
    names = {number: name for name, number in service.account.projects.items()}
    of_project = {"id": project, "name": names.get(project, ""), "domain": domain}
    return {
        "expires_at": rfc3339(expires_s),
        "issued_at": rfc3339(time.time()),
        "methods": ["password"],
        "catalog": [],
        **({"project": of_project} if project else {"domain": domain}),
        "roles": [{"id": "0", "name": "te_admin"}],
        "user": {"id": user.id, "name": user.name, "domain": domain},
    }


def create_key(service: EmulatedService, request: Request) -> Any:
    """Return a temporary key in exchange for a token."""
    auth = _parsed(request)
    if isinstance(auth, Answer):
        return auth
    user, _ = service.access.check_token(auth.token or request.headers.get("x-auth-token", ""))
    duration_s = auth.duration_s or _MIN_S
    if not _MIN_S <= duration_s <= _MAX_S:
        return _refused(400, "duration_seconds must be between 900 and 86400.")
    key = service.access.new_key(user.name, duration_s)
    credential = {
        "access": key.access,
        "secret": key.secret,
        "securitytoken": key.token,
        "expires_at": rfc3339(key.expires_s),
    }
    return Answer(201, {"credential": credential})


# -- projects and the account ---------------------------------------------------------------------


def projects(service: EmulatedService, request: Request) -> Any:
    """Return all projects, or only the one that the query names."""
    service.access.check_identity(request)
    requested, domain_id = request.query.get("name", ""), service.account.domain_id
    project_list = [
        {
            "id": number,
            "name": name,
            "domain_id": domain_id,
            "parent_id": domain_id,
            "is_domain": False,
            "enabled": True,
            "description": "",
            "links": {"self": ""},
        }
        for name, number in service.account.projects.items()
        if requested in ("", name)
    ]
    return {"projects": project_list, "links": {"self": ""}}


def domains(service: EmulatedService, request: Request) -> Any:
    service.access.check_identity(request)
    domain = {
        "id": service.account.domain_id,
        "name": service.settings.domain,
        "enabled": True,
        "description": "",
        "links": {"self": ""},
    }
    return {"domains": [domain], "links": {"self": ""}}


def _refused(status: int, message: str) -> Answer:
    title = {400: "Bad Request", 401: "Unauthorized"}[status]
    return Answer(status, {"error": {"code": status, "message": message, "title": title}})


ENDPOINTS = (
    Endpoint("POST", "/v3/auth/tokens", create_token),
    Endpoint("POST", "/v3.0/OS-CREDENTIAL/securitytokens", create_key),
    Endpoint("GET", "/v3/projects", projects),
    Endpoint("GET", "/v3/auth/projects", projects),
    Endpoint("GET", "/v3/auth/domains", domains),
)
