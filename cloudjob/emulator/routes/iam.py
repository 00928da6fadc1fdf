"""IAM: tokens by password, by key or by token; temporary keys; the projects and the account."""

from __future__ import annotations

import secrets
import time
from typing import Any

from cloudjob.emulator.app import Answer, Endpoint, Request
from cloudjob.emulator.errors import ApiError
from cloudjob.emulator.models import Items, Model, parse
from cloudjob.emulator.service import Service
from cloudjob.emulator.state import User
from cloudjob.times import rfc3339

_SHORTEST_S, _LONGEST_S = 900, 86_400


class _Reference(Model):
    id: str = ""
    name: str = ""


class _User(Model):
    name: str = ""
    password: str = ""
    domain: _Reference = _Reference()


class _Password(Model):
    user: _User = _User()


class _Key(Model):
    key: str = ""


class _AccessKey(Model):
    access: _Key = _Key()
    secret: _Key = _Key()


class _Token(Model):
    id: str = ""
    duration_seconds: int = 0


class _Identity(Model):
    methods: Items[str] = []
    password: _Password = _Password()
    hw_ak_sk: _AccessKey = _AccessKey()
    token: _Token = _Token()


class _Scope(Model):
    project: _Reference | None = None
    domain: _Reference = _Reference()


class _Auth(Model):
    identity: _Identity
    scope: _Scope | None = None


class _Body(Model):
    auth: _Auth


def _parsed(request: Request) -> _Auth | Answer:
    body = request.json()
    try:
        return parse(_Body, body).auth
    except ApiError:
        return _refused(400, "Expecting to find identity in auth. The server could not comply.")


# -- tokens ---------------------------------------------------------------------------------------


def create_token(service: Service, request: Request) -> Any:
    """Return a token in the header ``X-Subject-Token``."""
    auth = _parsed(request)
    if isinstance(auth, Answer):
        return auth
    found = [_user(service, auth.identity, method) for method in auth.identity.methods]
    user = next(filter(None, found), None)
    if user is None:
        return _refused(401, "The username or password is wrong.")
    project = _project(service, auth.scope)
    if project is None:
        return _refused(401, "The project or domain of the scope could not be found.")
    token, expires_s = service.access.new_token(user, project)
    body = {"token": _token(service, user, project, expires_s)}
    return Answer(201, body, {"X-Subject-Token": token})


def _user(service: Service, identity: _Identity, method: str) -> User | None:
    """Return the user with this password or key; None if it is wrong."""
    account = service.account
    if method == "password":
        asked = identity.password.user
        found = account.user(asked.name)
        is_right = found and _is_same(asked.password, found.password)
        return found if is_right and asked.domain.name == service.settings.domain else None
    if method == "hw_ak_sk":
        key = identity.hw_ak_sk
        found = account.user_of_key(key.access.key)
        return found if found and _is_same(key.secret.key, found.keys.secret_key) else None
    return None


def _is_same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())


def _project(service: Service, scope: _Scope | None) -> str | None:
    """Return the id of the project of a scope, empty for the account; None if it is unknown."""
    account = service.account
    if scope is None:
        return account.project_id
    if scope.project is None:
        known = (service.settings.domain, account.domain_id)
        return "" if scope.domain.name in known or scope.domain.id in known else None
    if scope.project.id in account.projects.values():
        return scope.project.id
    return account.projects.get(scope.project.name)


def _token(service: Service, user: User, project: str, expires_s: float) -> dict[str, Any]:
    domain = {"id": service.account.domain_id, "name": service.settings.domain}
    names = {number: name for name, number in service.account.projects.items()}
    scope = {"project": {"id": project, "name": names[project], "domain": domain}}
    return {
        "expires_at": rfc3339(expires_s),
        "issued_at": rfc3339(time.time()),
        "methods": ["password"],
        "catalog": [],
        **(scope if project else {"domain": domain}),
        "roles": [{"id": "0", "name": "te_admin"}],
        "user": {"id": user.id, "name": user.name, "domain": domain},
    }


def create_key(service: Service, request: Request) -> Any:
    """Return a temporary key in exchange for a token."""
    auth = _parsed(request)
    if isinstance(auth, Answer):
        return auth
    given = auth.identity.token
    user, _ = service.access.check_token(given.id or request.headers.get("x-auth-token", ""))
    asked = given.duration_seconds or _SHORTEST_S
    if not _SHORTEST_S <= asked <= _LONGEST_S:
        return _refused(400, "duration_seconds must be between 900 and 86400.")
    key = service.access.new_key(user, asked)
    credential = {
        "access": key.access,
        "secret": key.secret,
        "securitytoken": key.token,
        "expires_at": rfc3339(key.expires_s),
    }
    return Answer(201, {"credential": credential})


# -- projects and the account ---------------------------------------------------------------------


def projects(service: Service, request: Request) -> Any:
    """Return all projects, or only the one that the query names."""
    service.access.check_identity(request)
    asked, domain_id = request.query.get("name", ""), service.account.domain_id
    found = [
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
        if asked in ("", name)
    ]
    return {"projects": found, "links": {"self": ""}}


def domains(service: Service, request: Request) -> Any:
    service.access.check_identity(request)
    domain = {
        "id": service.account.domain_id,
        "name": service.settings.domain,
        "enabled": True,
        "description": "",
        "links": {"self": ""},
    }
    return {"domains": [domain], "links": {"self": ""}}


def _refused(status: int, words: str) -> Answer:
    title = {400: "Bad Request", 401: "Unauthorized"}[status]
    return Answer(status, {"error": {"code": status, "message": words, "title": title}})


ENDPOINTS = (
    Endpoint("POST", "/v3/auth/tokens", create_token),
    Endpoint("POST", "/v3.0/OS-CREDENTIAL/securitytokens", create_key),
    Endpoint("GET", "/v3/projects", projects),
    Endpoint("GET", "/v3/auth/projects", projects),
    Endpoint("GET", "/v3/auth/domains", domains),
)
