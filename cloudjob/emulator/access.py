"""Who asks: tokens, keys, signatures, the project in the path, and how often one may ask."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from cloudjob.emulator import signing
from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.database import Database
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.web import Request

SKEW_S = 15 * 60
# More wrong signatures in a row lock the key.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Account:
    """The one account of the emulator."""

    access_key: str
    secret_key: str
    password: str
    project_id: str
    domain_id: str
    user_id: str


class Access:
    """Lets requests in, or refuses them as the service's gateway does.

    Args:
        clock: Seconds since the epoch, as the service sees it.
    """

    def __init__(
        self, account: Account, settings: Settings, database: Database, clock: Callable[[], float]
    ) -> None:
        self.account = account
        self._settings = settings
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._wrong: dict[str, tuple[int, float]] = {}
        self._window: tuple[int, int] = (0, 0)

    def check(self, request: Request) -> None:
        """Let a request in.

        Raises:
            ApiError: It is refused.
        """
        self._count()
        token = request.headers.get("x-auth-token")
        if token:
            self.check_token(token)
        else:
            self.check_signature(request)
        self._check_project(request)

    def check_token(self, token: str) -> None:
        """Let the bearer of a token in."""
        expires_s = self._database.token(_hashed(token))
        if expires_s is None:
            raise ApiError("APIGW.0301", "decrypt token fail")
        if expires_s <= self._clock():
            raise ApiError("APIGW.0301", f"token expires, expires_at: {_rfc3339(expires_s)}")

    def new_token(self) -> tuple[str, float]:
        """Return a new token and when it expires."""
        token = "MII" + secrets.token_urlsafe(96)
        expires_s = self._clock() + self._settings.token_h * 3600
        self._database.add_token(_hashed(token), expires_s)
        return token, expires_s

    def new_key(self, duration_s: float) -> tuple[str, str, str, float]:
        """Return a temporary key: access key, secret key, security token and when it expires."""
        access = "HST" + secrets.token_hex(9).upper()[:17]
        secret, token = secrets.token_urlsafe(30), secrets.token_urlsafe(200)
        expires_s = self._clock() + duration_s
        self._database.add_key(access, secret, token, expires_s)
        return access, secret, token, expires_s

    def is_key(self, access: str, secret: str) -> bool:
        """Whether this is the account's own key."""
        account = self.account
        return secrets.compare_digest(
            f"{access}\n{secret}".encode(),
            f"{account.access_key}\n{account.secret_key}".encode(),
        )

    # -- signatures ---------------------------------------------------------------------------

    def check_signature(self, request: Request) -> None:
        """Let in who has signed a request."""
        authorization = request.headers.get("authorization", "")
        if not authorization:
            raise ApiError("APIGW.0301", "x-auth-token not found")
        signed = signing.parse(authorization)
        if signed is None or "x-sdk-date" not in signed.headers:
            raise ApiError("APIGW.0301", "signature header is not in the right form")
        self._check_date(request)
        self._check_lock(signed.access)
        secret = self._secret(signed.access, request)
        text = signing.Text(request.method, request.target, request.headers, request.body)
        is_valid = signing.is_valid(text, signed, secret)
        self._note(signed.access, is_valid=is_valid)
        if not is_valid:
            raise ApiError("APIGW.0301", "verify aksk signature fail")

    def _check_date(self, request: Request) -> None:
        text = request.headers.get("x-sdk-date", "")
        moment = signing.moment(text)
        now = self._clock()
        if moment is None:
            raise ApiError("APIGW.0301", f"X-Sdk-Date is not a time: {text}")
        if abs(now - moment) > SKEW_S:
            server = datetime.fromtimestamp(now, timezone.utc).strftime(signing.DATE_FORMAT)
            raise ApiError(
                "APIGW.0301", f"signature expired, signature time:{text}, server time:{server}"
            )

    def _secret(self, access: str, request: Request) -> str:
        if access == self.account.access_key:
            return self.account.secret_key
        found = self._database.key(access)
        if found is None:
            raise ApiError("APIGW.0301", f"Get secretKey failed,ak:{access},err:ak not exist")
        secret, token, expires_s = found
        if request.headers.get("x-security-token") != token:
            raise ApiError("APIGW.0301", "the security token is not that of the access key")
        if expires_s <= self._clock():
            raise ApiError("APIGW.0301", f"token expires, expires_at: {_rfc3339(expires_s)}")
        return secret

    def _check_lock(self, access: str) -> None:
        with self._lock:
            count, since = self._wrong.get(access, (0, 0.0))
        if count > _TRIES and time.monotonic() - since < self._settings.lock_s:
            raise ApiError("APIGW.0301", "AK access failed to reach the limit,forbidden.")

    def _note(self, access: str, *, is_valid: bool) -> None:
        with self._lock:
            if is_valid:
                self._wrong.pop(access, None)
            else:
                count, since = self._wrong.get(access, (0, 0.0))
                if count > _TRIES and time.monotonic() - since >= self._settings.lock_s:
                    count = 0
                self._wrong[access] = (count + 1, time.monotonic())

    def unlock(self) -> None:
        """Forget wrong signatures."""
        with self._lock:
            self._wrong.clear()

    # -- the project, and how often -----------------------------------------------------------

    def _check_project(self, request: Request) -> None:
        if request.path.startswith("/v2/manage/"):
            # The registry's: its images belong to organisations and not to projects.
            return
        asked = request.path.split("/")[2:3]
        own = self.account.project_id
        if asked != [own]:
            raise ApiError("ModelArts.2786", asked[0] if asked else "")
        if request.headers.get("x-project-id", own) != own:
            raise ApiError("ModelArts.0210")

    def _count(self) -> None:
        minute = int(time.monotonic() // 60)
        with self._lock:
            at, count = self._window
            self._window = (minute, count + 1 if at == minute else 1)
            count = self._window[1]
        if count > self._settings.requests_per_min:
            raise ApiError("APIGW.0308", f"{self._settings.requests_per_min},time:1 minute")


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _rfc3339(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
