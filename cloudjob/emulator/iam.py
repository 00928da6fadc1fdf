"""IAM: tokens by password, by key or by token; temporary keys; the project and the account."""

from __future__ import annotations

import secrets
from datetime import datetime, timezone
from typing import Any

from cloudjob.emulator.app import Answer, Request, Routes
from cloudjob.emulator.auth import Access
from cloudjob.emulator.settings import Settings

_SHORTEST_S, _LONGEST_S = 900, 86_400


class Iam:
    """Answers what clients ask of IAM."""

    def __init__(self, access: Access, settings: Settings) -> None:
        self._access = access
        self._settings = settings

    def add_to(self, routes: Routes) -> None:
        """Add what is answered here."""
        routes.add("POST", "/v3/auth/tokens", self.create_token)
        routes.add("POST", "/v3.0/OS-CREDENTIAL/securitytokens", self.create_key)
        routes.add("GET", "/v3/projects", self.projects)
        routes.add("GET", "/v3/auth/projects", self.projects)
        routes.add("GET", "/v3/auth/domains", self.domains)

    # -- tokens -------------------------------------------------------------------------------

    def create_token(self, request: Request) -> Answer:
        """``POST /v3/auth/tokens``: the token comes in the header ``X-Subject-Token``."""
        auth = request.json().get("auth")
        identity = _at(auth, "identity")
        if not isinstance(identity, dict):
            return _refused(400, "Expecting to find identity in auth. The server could not comply.")
        if not any(self._is_known(identity, method) for method in _methods(identity)):
            return _refused(401, "The username or password is wrong.")
        scope = _at(auth, "scope")
        if not self._is_own(scope):
            return _refused(401, "The project or domain of the scope could not be found.")
        token, expires_s = self._access.new_token()
        return Answer(201, {"token": self._token(expires_s)}, {"X-Subject-Token": token})

    def _is_known(self, identity: dict[str, Any], method: str) -> bool:
        account = self._access.account
        given = identity.get(method)
        if method == "password":
            user = _at(given, "user")
            name, domain = _at(user, "name"), _at(_at(user, "domain"), "name")
            return (
                name == self._settings.user
                and domain == self._settings.domain
                and secrets.compare_digest(
                    str(_at(user, "password")).encode(), account.password.encode()
                )
            )
        if method == "hw_ak_sk":
            key = str(_at(_at(given, "access"), "key"))
            return self._access.is_key(key, str(_at(_at(given, "secret"), "key")))
        return False

    def _is_own(self, scope: Any) -> bool:
        account, settings = self._access.account, self._settings
        if scope is None:
            return True
        project, domain = _at(scope, "project"), _at(scope, "domain")
        if project is None:
            known = (settings.domain, account.domain_id)
            return _at(domain, "name") in known or _at(domain, "id") in known
        name, number = _at(project, "name"), _at(project, "id")
        return bool(name == settings.region or number == account.project_id)

    def _token(self, expires_s: float) -> dict[str, Any]:
        account, settings = self._access.account, self._settings
        domain = {"id": account.domain_id, "name": settings.domain}
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {
            "expires_at": _rfc3339(expires_s),
            "issued_at": now,
            "methods": ["password"],
            "catalog": [],
            "project": {"id": account.project_id, "name": settings.region, "domain": domain},
            "roles": [{"id": "0", "name": "te_admin"}],
            "user": {"id": account.user_id, "name": settings.user, "domain": domain},
        }

    def create_key(self, request: Request) -> Answer:
        """``POST /v3.0/OS-CREDENTIAL/securitytokens``: a key for a while, for a token."""
        identity = _at(_at(request.json(), "auth"), "identity")
        given = _at(identity, "token")
        token = str(_at(given, "id") or request.headers.get("x-auth-token", ""))
        self._access.check_token(token)
        asked = _at(given, "duration_seconds") or _SHORTEST_S
        if not isinstance(asked, int) or not _SHORTEST_S <= asked <= _LONGEST_S:
            return _refused(400, "duration_seconds must be between 900 and 86400.")
        access, secret, security, expires_s = self._access.new_key(asked)
        credential = {
            "access": access,
            "secret": secret,
            "securitytoken": security,
            "expires_at": _rfc3339(expires_s),
        }
        return Answer(201, {"credential": credential})

    # -- who we are ---------------------------------------------------------------------------

    def projects(self, request: Request) -> Answer:
        """``GET /v3/projects?name=REGION``."""
        self._check(request)
        account, settings = self._access.account, self._settings
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
        return Answer(200, {"projects": [project] if is_asked else [], "links": {"self": ""}})

    def domains(self, request: Request) -> Answer:
        """``GET /v3/auth/domains``."""
        self._check(request)
        domain = {
            "id": self._access.account.domain_id,
            "name": self._settings.domain,
            "enabled": True,
            "description": "",
            "links": {"self": ""},
        }
        return Answer(200, {"domains": [domain], "links": {"self": ""}})

    def _check(self, request: Request) -> None:
        token = request.headers.get("x-auth-token")
        if token:
            self._access.check_token(token)
        else:
            self._access.check_signature(request)


def _methods(identity: dict[str, Any]) -> list[str]:
    methods = identity.get("methods")
    return [str(item) for item in methods] if isinstance(methods, list) else []


def _at(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _refused(status: int, words: str) -> Answer:
    title = {400: "Bad Request", 401: "Unauthorized"}[status]
    return Answer(status, {"error": {"code": status, "message": words, "title": title}})


def _rfc3339(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
