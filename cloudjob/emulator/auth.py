"""Authentication and rate limits: tokens, keys, signatures, and the project in the path."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

from cloudjob.emulator.database import Database, StoredToken, TemporaryKey
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import Account, User
from cloudjob.model.times import rfc3339
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

if TYPE_CHECKING:
    from cloudjob.emulator.request import Request

SKEW_S = 15 * 60
# How many wrong signatures in a row a key may have before it is locked.
_TRIES = 5
_API_SIGNATURE = re.compile(
    r"SDK-HMAC-SHA256 +Access=([^, ]+), *SignedHeaders=([^, ]+), *Signature=([0-9a-f]{64})\Z"
)


class Credential(NamedTuple):
    """What an access key proves; a permanent one has no token."""

    user: User
    secret: str
    token: str = ""
    expires_s: float = math.inf


def credential(account: Account, database: Database, access: str) -> Credential | None:
    """Return whose access key this is; None if nobody has it, or its user no longer exists."""
    owner = account.user_of_key(access)
    if owner:
        return Credential(owner, owner.keys.secret_key)
    key = database.key(access)
    user = account.user(key.user) if key else None
    return Credential(user, key.secret, key.token, key.expires_s) if key and user else None


class Gateway:
    """Accepts requests, or refuses them as the service's gateway does.

    Args:
        clock: The time of the service, in seconds since the epoch.
    """

    def __init__(
        self, account: Account, settings: Settings, database: Database, clock: Callable[[], float]
    ) -> None:
        self.account = account
        self._settings = settings
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._failed_attempts: dict[str, tuple[int, float]] = {}
        self._window: tuple[int, int] = (0, 0)

    def check(self, request: Request, action: str = "") -> User:
        """Check identity, project, rate and permission of a request; return its user.

        Args:
            action: The action that the user needs permission for; empty for none.

        Raises:
            ServiceRefusal: The request is refused.
        """
        self._count_request()
        user, project = self._identity(request)
        self._check_project(request, project)
        if action and not user.may(action):
            raise ServiceRefusal("ModelArts.0108", action)
        return user

    def check_identity(self, request: Request) -> User:
        """Check the token of a request, or its signature; return its user."""
        return self._identity(request)[0]

    def _identity(self, request: Request) -> tuple[User, str]:
        """Return the user of a request, and the project of its token; empty for all projects."""
        token = request.headers.get("x-auth-token")
        if token:
            return self.check_token(token)
        return self._check_signature(request), ""

    def check_token(self, token: str) -> tuple[User, str]:
        """Check a token; return its user and its project."""
        stored = self._database.token(_hashed(token))
        user = self.account.user(stored.user) if stored else None
        if stored is None or user is None:
            raise ServiceRefusal("APIGW.0301", "decrypt token fail")
        if stored.expires_s <= self._clock():
            raise ServiceRefusal(
                "APIGW.0301", f"token expires, expires_at: {rfc3339(stored.expires_s)}"
            )
        return user, stored.project

    def new_token(self, user: User, project: str) -> tuple[str, float]:
        """Return a new token and when it expires."""
        token = "MII" + secrets.token_urlsafe(96)
        expires_s = self._clock() + self._settings.token_h * 3600
        self._database.add_token(_hashed(token), StoredToken(user.name, project, expires_s))
        return token, expires_s

    def new_key(self, user_name: str, duration_s: float) -> TemporaryKey:
        """Return a new temporary key, which is refused once the account lacks this user."""
        key = TemporaryKey(
            access="HST" + secrets.token_hex(9).upper()[:17],
            secret=secrets.token_urlsafe(30),
            token=secrets.token_urlsafe(200),
            user=user_name,
            expires_s=self._clock() + duration_s,
        )
        self._database.add_key(key)
        return key

    def agency_keys(self, name: str) -> Keys:
        """Return temporary keys with which a job acts as the user of this name."""
        key = self.new_key(name, self._settings.token_h * 3600)
        return Keys(key.access, key.secret, key.token)

    # -- signatures ---------------------------------------------------------------------------

    def _check_signature(self, request: Request) -> User:
        """Check the signature of a request; return its user."""
        authorization = request.headers.get("authorization", "")
        if not authorization:
            raise ServiceRefusal("APIGW.0301", "x-auth-token not found")
        signature = _API_SIGNATURE.match(authorization)
        if signature is None or "x-sdk-date" not in signature[2].split(";"):
            raise ServiceRefusal("APIGW.0301", "signature header is not in the right form")
        access = signature[1]
        self._check_date(request)
        self._check_lock(access)
        signer = self._signer(access, request)
        expected = _api_signature(request, signer.secret, signature[2].split(";"))
        is_valid = _has_digest(request) and secrets.compare_digest(expected, signature[3])
        self._count_failure(access, is_valid=is_valid)
        if not is_valid:
            raise ServiceRefusal("APIGW.0301", "verify aksk signature fail")
        return signer.user

    def _check_date(self, request: Request) -> None:
        text = request.headers.get("x-sdk-date", "")
        now = self._clock()
        try:
            moment = datetime.strptime(text, sigv4.MOMENT).replace(tzinfo=timezone.utc).timestamp()
        except ValueError as error:
            raise ServiceRefusal("APIGW.0301", f"X-Sdk-Date is not a time: {text}") from error
        if abs(now - moment) > SKEW_S:
            server = datetime.fromtimestamp(now, timezone.utc).strftime(sigv4.MOMENT)
            raise ServiceRefusal(
                "APIGW.0301", f"signature expired, signature time:{text}, server time:{server}"
            )

    def _signer(self, access: str, request: Request) -> Credential:
        signer = credential(self.account, self._database, access)
        if signer is None:
            raise ServiceRefusal("APIGW.0301", f"Get secretKey failed,ak:{access},err:ak not exist")
        if signer.token and request.headers.get("x-security-token") != signer.token:
            raise ServiceRefusal("APIGW.0301", "the security token is not that of the access key")
        if signer.expires_s <= self._clock():
            raise ServiceRefusal(
                "APIGW.0301", f"token expires, expires_at: {rfc3339(signer.expires_s)}"
            )
        return signer

    def _check_lock(self, access: str) -> None:
        with self._lock:
            count, since = self._failed_attempts.get(access, (0, 0.0))
        if count > _TRIES and time.monotonic() - since < self._settings.lock_s:
            raise ServiceRefusal("APIGW.0301", "AK access failed to reach the limit,forbidden.")

    def _count_failure(self, access: str, *, is_valid: bool) -> None:
        with self._lock:
            if is_valid:
                self._failed_attempts.pop(access, None)
            else:
                count, since = self._failed_attempts.get(access, (0, 0.0))
                if count > _TRIES and time.monotonic() - since >= self._settings.lock_s:
                    count = 0
                self._failed_attempts[access] = (count + 1, time.monotonic())

    # -- project and rate ---------------------------------------------------------------------

    def _check_project(self, request: Request, of_token: str) -> None:
        project = request.path_params.get("project_id")
        if project is None:
            return
        if project not in self.account.projects.values() or of_token not in ("", project):
            raise ServiceRefusal("ModelArts.2786", project)
        if request.headers.get("x-project-id", project) != project:
            raise ServiceRefusal("ModelArts.0210")

    def _count_request(self) -> None:
        minute = int(time.monotonic() // 60)
        with self._lock:
            at, count = self._window
            self._window = (minute, count + 1 if at == minute else 1)
            count = self._window[1]
        if count > self._settings.requests_per_min:
            raise ServiceRefusal("APIGW.0308", f"{self._settings.requests_per_min},time:1 minute")


def _api_signature(request: Request, secret: str, names: list[str]) -> str:
    """Return the signature that the vendor's signer makes over these headers."""
    from huaweicloudsdkcore.sdk_request import SdkRequest
    from huaweicloudsdkcore.signer.signer import Signer

    path, _, query = request.target.partition("?")
    text = SdkRequest(
        method=request.method,
        resource_path=path,
        query_params=parse_qsl(query, keep_blank_values=True),
        header_params={name: request.headers.get(name, "") for name in names},
        body=request.content,
    )
    headers = Signer(SimpleNamespace(ak="-", sk=secret)).sign(text).header_params["Authorization"]
    return str(headers).rpartition("=")[2]


def _has_digest(request: Request) -> bool:
    """Whether the digest of the body is correct, if the client sends one."""
    digest = request.headers.get("x-sdk-content-sha256", "")
    return digest in ("", "UNSIGNED-PAYLOAD", hashlib.sha256(request.content).hexdigest())


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
