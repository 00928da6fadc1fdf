"""Authentication and rate limits: tokens, keys, signatures, and the project in the path."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote

from cloudjob.emulator.database import Database
from cloudjob.emulator.errors import ApiError
from cloudjob.emulator.proxy import Headers, Refusal
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import Account

if TYPE_CHECKING:
    from cloudjob.emulator.app import Request

SKEW_S = 15 * 60
_DATE_FORMAT = "%Y%m%dT%H%M%SZ"
# More wrong signatures than these in a row lock the key.
_TRIES = 5
_API_SIGNATURE = re.compile(
    r"SDK-HMAC-SHA256 +Access=([^, ]+), *SignedHeaders=([^, ]+), *Signature=([0-9a-f]{64})\Z"
)
_S3_SIGNATURE = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^/]+)/([^/]+)/([^/]+)/aws4_request, ?"
    r"SignedHeaders=([^,\s]+), ?Signature=([0-9a-f]+)\Z"
)
_S3_TOKENS = ("x-amz-security-token", "x-obs-security-token")
# Each chunk of such a body is signed with the key that signs the headers.
_SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256"


class Access:
    """Accepts requests, or refuses them as the service's gateway does.

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
        """Check identity, project and rate of a request.

        Raises:
            ApiError: It is refused.
        """
        self._count()
        self.check_identity(request)
        self._check_project(request)

    def check_identity(self, request: Request) -> None:
        """Check the token of a request, or its signature."""
        token = request.headers.get("x-auth-token")
        if token:
            self.check_token(token)
        else:
            self._check_signature(request)

    def check_token(self, token: str) -> None:
        """Check a token."""
        expires_s = self._database.token(_hashed(token))
        if expires_s is None:
            raise ApiError("APIGW.0301", "decrypt token fail")
        if expires_s <= self._clock():
            raise ApiError("APIGW.0301", f"token expires, expires_at: {rfc3339(expires_s)}")

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

    def _check_signature(self, request: Request) -> None:
        """Check the signature of a request."""
        authorization = request.headers.get("authorization", "")
        if not authorization:
            raise ApiError("APIGW.0301", "x-auth-token not found")
        found = _API_SIGNATURE.match(authorization)
        if found is None or "x-sdk-date" not in found[2].split(";"):
            raise ApiError("APIGW.0301", "signature header is not in the right form")
        access = found[1]
        self._check_date(request)
        self._check_lock(access)
        secret = self._secret(access, request)
        expected = _api_signature(request, secret, found[2].split(";"))
        is_valid = _has_digest(request) and secrets.compare_digest(expected, found[3])
        self._count_wrong(access, is_valid=is_valid)
        if not is_valid:
            raise ApiError("APIGW.0301", "verify aksk signature fail")

    def _check_date(self, request: Request) -> None:
        text = request.headers.get("x-sdk-date", "")
        now = self._clock()
        try:
            moment = datetime.strptime(text, _DATE_FORMAT).replace(tzinfo=timezone.utc).timestamp()
        except ValueError as error:
            raise ApiError("APIGW.0301", f"X-Sdk-Date is not a time: {text}") from error
        if abs(now - moment) > SKEW_S:
            server = datetime.fromtimestamp(now, timezone.utc).strftime(_DATE_FORMAT)
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
            raise ApiError("APIGW.0301", f"token expires, expires_at: {rfc3339(expires_s)}")
        return secret

    def _check_lock(self, access: str) -> None:
        with self._lock:
            count, since = self._wrong.get(access, (0, 0.0))
        if count > _TRIES and time.monotonic() - since < self._settings.lock_s:
            raise ApiError("APIGW.0301", "AK access failed to reach the limit,forbidden.")

    def _count_wrong(self, access: str, *, is_valid: bool) -> None:
        with self._lock:
            if is_valid:
                self._wrong.pop(access, None)
            else:
                count, since = self._wrong.get(access, (0, 0.0))
                if count > _TRIES and time.monotonic() - since >= self._settings.lock_s:
                    count = 0
                self._wrong[access] = (count + 1, time.monotonic())

    # -- project and rate ---------------------------------------------------------------------

    def _check_project(self, request: Request) -> None:
        if request.path.startswith("/v2/manage/"):
            # Images of the registry belong to organisations, not to projects.
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

    # -- OBS ----------------------------------------------------------------------------------

    def sign_again(self, method: str, target: str, headers: Headers) -> Headers | Refusal:
        """Return the headers of a request to OBS, signed with the account's own key.

        SeaweedFS knows this key only, so the signature of a temporary key is verified here. It
        verifies every other signature itself.
        """
        values = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        found = _S3_SIGNATURE.match(values.get("authorization", ""))
        key = self._database.key(found[1]) if found else None
        if found is None or key is None:
            return headers
        secret, token, expires_s = key
        if next((values[name] for name in _S3_TOKENS if name in values), "") != token:
            return Refusal(0, 403, "InvalidToken", "The provided token is malformed or invalid.")
        if expires_s <= self._clock():
            return Refusal(0, 403, "ExpiredToken", "The provided token has expired.")
        if values.get("x-amz-content-sha256", "").startswith(_SIGNED_CHUNKS):
            return Refusal(0, 501, "NotImplemented", "Signed chunks with a temporary key.")
        region, service, names = found[3], found[4], found[5].split(";")
        signed = {name: values.get(name, "") for name in names}
        expected = _s3_signature(secret, region, service, (method, target, signed))
        if not secrets.compare_digest(expected, found[6]):
            return Refusal(0, 403, "SignatureDoesNotMatch", "The request signature does not match.")
        signed = {name: value for name, value in signed.items() if name not in _S3_TOKENS}
        own = self.account
        signature = _s3_signature(own.secret_key, region, service, (method, target, signed))
        authorization = (
            f"AWS4-HMAC-SHA256 Credential={own.access_key}/{found[2]}/{region}/{service}"
            f"/aws4_request, SignedHeaders={';'.join(signed)}, Signature={signature}"
        )
        return [
            (name, authorization.encode("latin-1") if name == b"authorization" else value)
            for name, value in headers
            if name.decode("latin-1") not in _S3_TOKENS
        ]


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
    made = Signer(SimpleNamespace(ak="-", sk=secret)).sign(text).header_params["Authorization"]
    return str(made).rpartition("=")[2]


def _s3_signature(
    secret: str, region: str, service: str, text: tuple[str, str, dict[str, str]]
) -> str:
    """Return the signature that botocore makes.

    Args:
        text: Method, target and signed headers.
    """
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    method, target, headers = text
    path, mark, query = target.partition("?")
    request = AWSRequest(
        method, f"http://obs{quote(unquote(path), safe='/~')}{mark}{query}", headers
    )
    request.context["timestamp"] = headers.get("x-amz-date", "")
    signer = S3SigV4Auth(Credentials("-", secret), service, region)
    return str(
        signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    )


def _has_digest(request: Request) -> bool:
    """Whether the digest of the body, if the client sends one, is true."""
    digest = request.headers.get("x-sdk-content-sha256", "")
    return digest in ("", "UNSIGNED-PAYLOAD", hashlib.sha256(request.content).hexdigest())


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def rfc3339(seconds: float) -> str:
    """Return a time as IAM shows it."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
