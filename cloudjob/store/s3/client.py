"""Create the boto3 client of a store: endpoint, credentials and retries."""

from __future__ import annotations

import configparser
import ipaddress
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob import times
from cloudjob.errors import StoreError
from cloudjob.retries import WaitNotices
from cloudjob.store.s3 import errors
from cloudjob.store.s3.bucket_uri import BucketUri

# Requests that a store sends in parallel.
AT_ONCE = 16
# Timeouts for connecting and for reading, and the shortest and longest pause between attempts.
_CONNECT_S, _READ_S = 5.0, 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.3, 5.0
# Disables botocore's own retries: ``Retries`` decides.
_NO_RETRIES = {"total_max_attempts": 1}

# Bucket names that are valid in a host name and covered by the certificate for *.endpoint.
_HOST_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_REGION_IN_HOST = re.compile(r"(?:obs|s3)[.-]([a-z]{2,}(?:-[a-z0-9]+)+)\.")
_OBS_VARIABLES = (
    ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN"),
    ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN"),
    ("HW_ACCESS_KEY", "HW_SECRET_KEY", "HW_SECURITY_TOKEN"),
)
_AWS_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Endpoint(NamedTuple):
    """How a bucket is reached.

    Args:
        url: ``https://host`` or ``http://host:port``, without the bucket.
        addressing: ``path`` or ``virtual``: whether the bucket is in the path or in the host name.
    """

    url: str
    region: str
    addressing: str


class Connection(NamedTuple):
    """A boto3 client, the endpoint that it uses, and its credentials."""

    client: Any
    endpoint: Endpoint
    credentials: Any


class Retries:
    """Decides whether a failed request is sent again, and reports what a command waits for.

    Args:
        patience_s: Seconds to retry a request after its first failure.
    """

    def __init__(self, uri: BucketUri, patience_s: float) -> None:
        self._uri = uri
        self._patience_s = patience_s
        self._notices = WaitNotices()
        self._aborts = 0
        self._aborted = threading.Condition()
        # Seconds by which this machine's clock is ahead of the service's.
        self.clock_ahead_s = 0.0

    def abort(self) -> None:
        """Fail every request that is waiting for its next attempt."""
        with self._aborted:
            self._aborts += 1
            self._aborted.notify_all()

    def register(self, client: Any) -> None:
        """Make ``client`` use these retries."""
        client.meta.events.register("before-sign.s3", self._begin)
        client.meta.events.register("needs-retry.s3", self._after_attempt)

    def _begin(self, request: Any, **_: Any) -> None:
        request.context.setdefault("cloudjob", (time.monotonic(), self._aborts))

    def _after_attempt(
        self,
        response: Any,
        attempts: int,
        caught_exception: Exception | None,
        request_dict: Mapping[str, Any],
        **_: Any,
    ) -> float | None:
        """Wait, then return 0 to send the request again at once; return None to give up."""
        if response is not None:
            self.clock_ahead_s = errors.clock_ahead_s(response[0].headers.get("date", ""))
        found = errors.transient_failure(response, caught_exception)
        if not found:
            return None
        now_s = time.monotonic()
        context = request_dict["context"]
        began_s, aborts = context.get("cloudjob", (now_s, self._aborts))
        # From the first failure: on a slow connection the first attempt alone may take minutes.
        failing_since_s = context.setdefault("cloudjob_failing", now_s)
        pause_s = min(_FIRST_PAUSE_S * 2 ** (attempts - 1), _LONGEST_PAUSE_S)
        if now_s + pause_s - failing_since_s > self._patience_s:
            return None
        self._notices.report(began_s, f"asking {self._uri.root}: {found}")
        with self._aborted:
            if self._aborted.wait_for(lambda: self._aborts != aborts, pause_s):
                raise StoreError(f"asking {self._uri.root}: interrupted")
        return 0.0


def connect(uri: BucketUri, environ: Mapping[str, str], retries: Retries) -> Connection:
    """Return a client for the bucket.

    Raises:
        StoreError: There are no credentials, no such profile, or no usable endpoint.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, NoCredentialsError

    profile = uri.options.get("profile")
    try:
        session = boto3.Session(profile_name=profile, **_credentials(uri, environ))
        credentials = session.get_credentials()
        if credentials is None:
            raise NoCredentialsError
        found = _endpoint(uri, environ, session)
        obs = {"payload_signing_enabled": False} if uri.is_obs else {}
        client = session.client(
            "s3",
            endpoint_url=found.url or None,
            region_name=found.region,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": found.addressing, **obs},
                # OBS stores checksums that it does not know as part of the object.
                request_checksum_calculation="when_required" if uri.is_obs else None,
                response_checksum_validation="when_required" if uri.is_obs else None,
                retries=_NO_RETRIES,
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                max_pool_connections=AT_ONCE,
            ),
        )
    except BotoCoreError as error:
        raise errors.unusable(uri, error) from error
    retries.register(client)
    return Connection(client, found._replace(url=client.meta.endpoint_url), credentials)


# -- credentials -------------------------------------------------------------------------------


def _credentials(uri: BucketUri, environ: Mapping[str, str]) -> dict[str, str]:
    """Return credentials for boto3's session; none if boto3 is to find them itself."""
    if "profile" in uri.options:
        return {}
    found = next(filter(None, _of_obs(environ)), None) if uri.is_obs else None
    found = found or _complete(*(environ.get(name, "") for name in _AWS_VARIABLES))
    if found is None:
        return {}
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    return {name: value for name, value in zip(names, found, strict=True) if value}


def _of_obs(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str] | None]:
    """Yield the credentials in the variables and files of OBS's own tools, best first."""
    for names in _OBS_VARIABLES:
        yield _complete(*(environ.get(name, "") for name in names))
    obsutil = _obsutil()
    yield _complete(*(obsutil.get(name, "") for name in ("ak", "sk", "token")))
    basic = _huaweicloud(environ)
    yield _complete(*(basic.get(name, "") for name in ("ak", "sk", "security_token")))


def _huaweicloud(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the credentials file of Huawei's SDKs; empty if there is none."""
    named = environ.get("HUAWEICLOUD_SDK_CREDENTIALS_FILE")
    parser = configparser.RawConfigParser()
    try:
        parser.read(named or Path.home() / ".huaweicloud" / "credentials", encoding="utf-8")
        return parser["basic"]
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError):
        return {}


def _complete(access_key: str, secret_key: str, token: str) -> tuple[str, str, str] | None:
    return (access_key, secret_key, token) if access_key and secret_key else None


def keys_end_at(credentials: Any, environ: Mapping[str, str]) -> float:
    """Return when credentials expire, in seconds since 1970; 0 for never or unknown.

    boto3 knows it of the keys that it gets itself: of SSO, roles and ``credential_process``.
    """
    keys = credentials.get_frozen_credentials()
    known = getattr(credentials, "_expiry_time", None)
    if known is not None:
        return float(known.timestamp())
    if not keys.token:
        return 0.0
    basic = _huaweicloud(environ)
    if keys.access_key == environ.get(_AWS_VARIABLES[0]):
        # As `aws configure export-credentials` writes it.
        return times.seconds_of(environ.get("AWS_CREDENTIAL_EXPIRATION", ""))
    return (
        times.seconds_of(basic.get("expires_at", "")) if basic.get("ak") == keys.access_key else 0.0
    )


def _obsutil() -> dict[str, str]:
    """Return the settings of ``obsutil config``: ``endpoint``, ``ak``, ``sk``, ``token``."""
    try:
        text = (Path.home() / ".obsutilconfig").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith(("#", "[")))
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}


# -- endpoint ----------------------------------------------------------------------------------


def _endpoint(uri: BucketUri, environ: Mapping[str, str], session: Any) -> Endpoint:
    """Return the bucket's endpoint; its URL is empty for AWS's default endpoint."""
    settings = session._session.get_scoped_config() if session.profile_name else {}
    url = uri.options.get("endpoint") or _endpoint_url(uri, environ, session)
    url = _checked(uri, url) if url else ""
    region = uri.options.get("region") or _region(uri, environ, session, url)
    if uri.is_obs:
        url = url or f"https://obs.{region}.myhuaweicloud.com"
    s3 = settings.get("s3")
    style = s3.get("addressing_style", "") if isinstance(s3, dict) else ""
    addressing = uri.options.get("addressing") or style or _addressing(uri, url)
    return Endpoint(url, region, addressing if addressing != "auto" else _addressing(uri, url))


def _endpoint_url(uri: BucketUri, environ: Mapping[str, str], session: Any) -> str:
    if uri.is_obs:
        # ModelArts sets S3_ENDPOINT in its containers and notebooks.
        found = environ.get("OBS_ENDPOINT") or environ.get("S3_ENDPOINT") or ""
        if not found and "region" not in uri.options:
            found = _obsutil().get("endpoint", "")
        return found
    # boto3 reads these two only from the process's environment.
    found = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    if not found:
        provider = session._session.get_component("config_store")
        found = provider.get_config_variable("endpoint_url") or ""
    return found


def _region(uri: BucketUri, environ: Mapping[str, str], session: Any, url: str) -> str:
    in_host = _REGION_IN_HOST.match(_host(url))
    own = in_host[1] if in_host else ""
    if not uri.is_obs:
        named = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        return named or session.region_name or own or "us-east-1"
    # An OBS endpoint belongs to one region, so its region takes precedence over the variable.
    found = own or environ.get("HW_REGION_NAME") or ""
    if "profile" in uri.options:
        found = found or session.region_name or ""
    if not found:
        raise StoreError(
            f"open store {uri.root}: no region",
            hint=f"{uri.root}?region=cn-north-4, or set HW_REGION_NAME, or OBS_ENDPOINT",
        )
    return found


def _checked(uri: BucketUri, url: str) -> str:
    if "://" not in url:
        url = f"https://{url}"
    parts = urllib.parse.urlsplit(url)
    doing = f"open store {uri.root}: endpoint {url!r}"
    try:
        is_url = bool(parts.scheme in ("http", "https") and parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.path.strip("/") or parts.query or parts.username:
        raise StoreError(f"{doing}: not https://host or http://host:port", hint="?endpoint=URL")
    if parts.netloc.startswith(f"{uri.bucket}."):
        # The service would treat the bucket as part of the key and reject the signature.
        rest = parts.netloc.removeprefix(f"{uri.bucket}.")
        raise StoreError(
            f"{doing}: it contains the bucket name", hint=f"use {parts.scheme}://{rest}"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _addressing(uri: BucketUri, url: str) -> str:
    host = _host(url)
    is_public = uri.is_obs or not url or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    is_virtual = is_public and host != "localhost" and not _is_address(host)
    return "virtual" if is_virtual and _HOST_BUCKET.fullmatch(uri.bucket) else "path"


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
