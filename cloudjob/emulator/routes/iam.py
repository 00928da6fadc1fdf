"""IAM: tokens by password, by key or by token; temporary keys; the project and the account."""

from __future__ import annotations

import secrets
from datetime import datetime, timezone
from typing import Any

from cloudjob.emulator.app import Answer, Endpoint, Request
from cloudjob.emulator.auth import rfc3339
from cloudjob.emulator.errors import ApiError
from cloudjob.emulator.models import Items, Model, parse
from cloudjob.emulator.service import Service

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


class _Word(Model):
    key: str = ""


class _AccessKey(Model):
    access: _Word = _Word()
    secret: _Word = _Word()


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
    if not any(_is_known(service, auth.identity, method) for method in auth.identity.methods):
        return _refused(401, "The username or password is wrong.")
    if auth.scope and not _is_own(service, auth.scope):
        return _refused(401, "The project or domain of the scope could not be found.")
    token, expires_s = service.access.new_token()
    return Answer(201, {"token": _token(service, expires_s)}, {"X-Subject-Token": token})


def _is_known(service: Service, identity: _Identity, method: str) -> bool:
    settings = service.settings
    if method == "password":
        user = identity.password.user
        is_password = secrets.compare_digest(
            user.password.encode(), service.account.password.encode()
        )
        return is_password and (user.name, user.domain.name) == (settings.user, settings.domain)
    if method == "hw_ak_sk":
        key = identity.hw_ak_sk
        return service.access.is_key(key.access.key, key.secret.key)
    return False


def _is_own(service: Service, scope: _Scope) -> bool:
    account, settings = service.account, service.settings
    if scope.project is None:
        known = (settings.domain, account.domain_id)
        return scope.domain.name in known or scope.domain.id in known
    return scope.project.name == settings.region or scope.project.id == account.project_id


def _token(service: Service, expires_s: float) -> dict[str, Any]:
    account, settings = service.account, service.settings
    domain = {"id": account.domain_id, "name": settings.domain}
    return {
        "expires_at": rfc3339(expires_s),
        "issued_at": rfc3339(datetime.now(timezone.utc).timestamp()),
        "methods": ["password"],
        "catalog": [],
        "project": {"id": account.project_id, "name": settings.region, "domain": domain},
        "roles": [{"id": "0", "name": "te_admin"}],
        "user": {"id": account.user_id, "name": settings.user, "domain": domain},
    }


def create_key(service: Service, request: Request) -> Any:
    """Return a temporary key in exchange for a token."""
    auth = _parsed(request)
    if isinstance(auth, Answer):
        return auth
    given = auth.identity.token
    service.access.check_token(given.id or request.headers.get("x-auth-token", ""))
    asked = given.duration_seconds or _SHORTEST_S
    if not _SHORTEST_S <= asked <= _LONGEST_S:
        return _refused(400, "duration_seconds must be between 900 and 86400.")
    access, secret, security, expires_s = service.access.new_key(asked)
    credential = {
        "access": access,
        "secret": secret,
        "securitytoken": security,
        "expires_at": rfc3339(expires_s),
    }
    return Answer(201, {"credential": credential})


# -- who we are -----------------------------------------------------------------------------------


def projects(service: Service, request: Request) -> Any:
    """Return the project, if it is the one that is asked for."""
    service.access.check_identity(request)
    account, settings = service.account, service.settings
    project = {
        "id": account.project_id,
        "name": settings.region,
        "domain_id": account.domain_id,
        "parent_id": account.domain_id,
        "is_domain": False,
        "enabled": True,
        "description": "",
        "links": {"self": ""},
    }
    is_asked = request.query.get("name", settings.region) == settings.region
    return {"projects": [project] if is_asked else [], "links": {"self": ""}}


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
