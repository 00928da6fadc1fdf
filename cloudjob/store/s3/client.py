"""Create the boto3 client of a store: endpoint, credentials and retries."""

from __future__ import annotations

import configparser
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob import huawei
from cloudjob.errors import StoreError
from cloudjob.model import times
from cloudjob.retries import WaitNotices
from cloudjob.store import certificates
from cloudjob.store.s3 import errors
from cloudjob.store.s3.bucket_uri import CREDENTIALS_HINTS, BucketUri

# Requests that a store sends in parallel.
AT_ONCE = 16
# Timeouts for connecting and for reading, and the shortest and longest pause between attempts.
_CONNECT_S, _READ_S = 5.0, 20.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.3, 5.0
# Disables botocore's own retries: ``Retries`` decides.
_NO_RETRIES = {"total_max_attempts": 1}

# Bucket names that are valid in a host name and covered by the certificate for *.endpoint.
_HOST_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
# A colon is only in an IPv6 address, as ``hostname`` has no port.
_ADDRESS = re.compile(r"[0-9.]+|.*:.*")
_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")
_REGION_IN_HOST = re.compile(r"(?:obs|s3)[.-]([a-z]{2,}(?:-[a-z0-9]+)+)\.")
_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CREDENTIAL_EXPIRATION",  # as `aws configure export-credentials` writes it
)


class S3Endpoint(NamedTuple):
    """How a bucket is reached.

    Args:
        url: ``https://host`` or ``http://host:port``, without the bucket.
        addressing: ``path`` or ``virtual``: whether the bucket is in the path or in the host name.
    """

    url: str
    region: str
    addressing: str


class S3Keys(NamedTuple):
    """Credentials that boto3 does not find itself.

    Args:
        expires_at: When they expire, in RFC 3339; empty for never or unknown.
    """

    access_key: str
    secret_key: str
    token: str = ""
    expires_at: str = ""


class S3Connection(NamedTuple):
    """A boto3 client, the endpoint that it uses, its credentials, and whom it trusts."""

    client: Any
    endpoint: S3Endpoint
    credentials: Any
    keys: S3Keys | None
    bundle: certificates.Bundle | None = None

    def keys_end_at(self) -> float:
        """Return when the credentials expire, in seconds since 1970; 0 for never or unknown."""
        if self.keys:
            return times.seconds_of(self.keys.expires_at) if self.keys.token else 0.0
        # boto3 knows when keys from SSO, a role or credential_process expire.
        self.credentials.get_frozen_credentials()
        expiry = getattr(self.credentials, "_expiry_time", None)
        return float(expiry.timestamp()) if expiry else 0.0


class Retries:
    """Decides whether to retry a failed request, and reports what a command is waiting for.

    Args:
        retry_s: Seconds to retry a request after its first failure.
    """

    def __init__(self, uri: BucketUri, retry_s: float) -> None:
        self._uri = uri
        self._retry_s = retry_s
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
        failure = errors.transient_failure(response, caught_exception)
        if not failure:
            return None
        now_s = time.monotonic()
        context = request_dict["context"]
        began_s, aborts = context.get("cloudjob", (now_s, self._aborts))
        # From the first failure: on a slow connection the first attempt alone may take minutes.
        failing_since_s = context.setdefault("cloudjob_failing", now_s)
        pause_s = min(_FIRST_PAUSE_S * 2 ** (attempts - 1), _MAX_PAUSE_S)
        if now_s + pause_s - failing_since_s > self._retry_s:
            return None
        self._notices.report(began_s, f"asking {self._uri.root}: {failure}")
        with self._aborted:
            if self._aborted.wait_for(lambda: self._aborts != aborts, pause_s):
                raise StoreError(f"asking {self._uri.root}: interrupted")
        return 0.0


def connect(uri: BucketUri, environ: Mapping[str, str], retries: Retries) -> S3Connection:
    """Return a client for the bucket.

    Raises:
        StoreError: There are no credentials, no such profile, or no usable endpoint.
    """
    import boto3
    from botocore.exceptions import BotoCoreError

    keys = None if "profile" in uri.options else _keys(uri, environ)
    _remove_empty_variables()
    try:
        session = boto3.Session(
            profile_name=uri.options.get("profile"),
            aws_access_key_id=keys and keys.access_key,
            aws_secret_access_key=keys and keys.secret_key,
            aws_session_token=(keys and keys.token) or None,
        )
        credentials = session.get_credentials()
        address = _endpoint(uri, environ, session)
        bundle = certificates.bundle(
            environ, session._session.get_scoped_config().get("ca_bundle", "")
        )
        if bundle:
            certificates.check(bundle)
        client = _client(uri, session, address, bundle)
        if not (uri.is_obs or address.url or _is_amazons(client.meta.endpoint_url)):
            # boto3 itself has found another endpoint in a section of the profile.
            address = address._replace(url=client.meta.endpoint_url)
            client = _client(uri, session, address, bundle)
    except BotoCoreError as error:
        raise _unusable(uri, f"reading credentials: {errors.one_line(str(error))}") from error
    if credentials is None:
        raise _unusable(uri, "no credentials in the environment or in a profile file")
    retries.register(client)
    endpoint = address._replace(url=client.meta.endpoint_url)
    return S3Connection(client, endpoint, credentials, keys, bundle)


def _remove_empty_variables() -> None:
    """Remove variables that boto3 refuses if they are empty, such as ``AWS_PROFILE``.

    boto3 reads them only from the process's environment.
    """
    for name in [name for name, value in os.environ.items() if not value]:
        if name.startswith("AWS_") or name in certificates.VARIABLES:
            os.environ.pop(name, None)


def _client(
    uri: BucketUri, session: Any, endpoint: S3Endpoint, bundle: certificates.Bundle | None
) -> Any:
    """Return boto3's client for an endpoint."""
    from botocore.config import Config

    obs = {"payload_signing_enabled": False} if uri.is_obs else {}
    # Since 2025, boto3 adds checksums that other services refuse; OBS stores one that it does not
    # support as part of the object. None leaves the choice to the user's own settings.
    is_amazons = not uri.is_obs and (not endpoint.url or _is_amazons(endpoint.url))
    checksums = None if is_amazons else "when_required"
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": endpoint.addressing, **obs},
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        retries=_NO_RETRIES,
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        max_pool_connections=AT_ONCE,
    )
    return session.client(
        "s3",
        endpoint_url=endpoint.url or None,
        region_name=endpoint.region,
        verify=bundle.path if bundle else None,
        config=config,
    )


def _is_amazons(url: str) -> bool:
    return (urllib.parse.urlsplit(url).hostname or "").endswith(_AMAZON)


def _unusable(uri: BucketUri, reason: str) -> StoreError:
    return StoreError(f"opening the store {uri.root}: {reason}", hint=CREDENTIALS_HINTS[uri.scheme])


# -- credentials -------------------------------------------------------------------------------


def _keys(uri: BucketUri, environ: Mapping[str, str]) -> S3Keys | None:
    """Return the first complete keys in variables or, for OBS, in the files of its own tools.

    None if boto3 should look for others.

    Raises:
        UsageError: The credentials file of Huawei's SDKs cannot be read, or others can read it.
    """
    keys = (_keys_of_obs(environ) if uri.is_obs else None) or S3Keys(
        *(environ.get(name, "") for name in _AWS_VARIABLES)
    )
    return keys if keys.access_key and keys.secret_key else None


def _keys_of_obs(environ: Mapping[str, str]) -> S3Keys | None:
    keys = huawei.keys_in_variables(huawei.Service.OBS, environ)
    if keys:
        return S3Keys(*keys)
    tool = _obsutil()
    if tool.get("ak") and tool.get("sk"):
        return S3Keys(tool["ak"], tool["sk"], tool.get("token") or "")
    section = huawei.read_file(huawei.file_of(environ, Path.home()))
    keys = huawei.keys_in(section)
    return S3Keys(*keys, expires_at=section.get("expires_at", "")) if keys else None


def _obsutil() -> Mapping[str, str]:
    """Return the settings that ``obsutil config`` writes, in a file without sections."""
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    path = Path.home() / ".obsutilconfig"
    try:
        parser.read_string(f"[basic]\n{path.read_text(encoding='utf-8', errors='replace')}")
    except (OSError, configparser.Error):
        return {}
    return parser["basic"]


# -- endpoint ----------------------------------------------------------------------------------


def _endpoint(uri: BucketUri, environ: Mapping[str, str], session: Any) -> S3Endpoint:
    """Return the bucket's endpoint; its URL is empty for AWS's default endpoint."""
    profile = session._session.get_scoped_config()
    if uri.is_obs:
        # ModelArts sets S3_ENDPOINT in its containers and notebooks.
        configured = environ.get("OBS_ENDPOINT") or environ.get("S3_ENDPOINT")
        if not configured and "region" not in uri.options:
            configured = _obsutil().get("endpoint")
    else:
        # boto3 reads these two only from the process's environment.
        configured = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        configured = configured or profile.get("endpoint_url")
    url = uri.options.get("endpoint") or configured
    url = _checked(uri, url) if url else ""
    host = urllib.parse.urlsplit(url).hostname or ""
    region = uri.options.get("region") or _region(uri, environ, session, host)
    if uri.is_obs and not url:
        url = f"https://obs.{region}.myhuaweicloud.com"
    s3 = profile.get("s3")
    style = s3.get("addressing_style", "auto") if isinstance(s3, dict) else "auto"
    addressing = uri.options.get("addressing", style)
    return S3Endpoint(url, region, _addressing(uri, host) if addressing == "auto" else addressing)


def _region(uri: BucketUri, environ: Mapping[str, str], session: Any, host: str) -> str:
    match = _REGION_IN_HOST.match(host)
    host_region = match[1] if match else ""
    if not uri.is_obs:
        configured = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        return configured or session.region_name or host_region or "us-east-1"
    # An OBS endpoint belongs to one region, so its region takes precedence over the variable.
    region = host_region or environ.get("HW_REGION_NAME")
    if "profile" in uri.options:
        region = region or session.region_name
    if not region:
        hint = f"{uri.root}?region=cn-north-4, or set HW_REGION_NAME"
        # If an endpoint is set, its host names no region.
        raise StoreError(
            f"opening the store {uri.root}: no region",
            hint=hint if host else f"{hint}, or OBS_ENDPOINT",
        )
    return region


def _checked(uri: BucketUri, url: str) -> str:
    if "://" not in url:
        url = f"https://{url}"
    doing = f"opening the store {uri.root}: endpoint {url!r}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = bool(parts.scheme in ("http", "https") and parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.path.strip("/") or parts.query or parts.username:
        raise StoreError(f"{doing}: not https://host or http://host:port", hint="?endpoint=URL")
    host = parts.netloc.removeprefix(f"{uri.bucket}.")
    if host != parts.netloc:
        # The service would treat the bucket as part of the key and reject the signature.
        raise StoreError(
            f"{doing}: it contains the bucket name", hint=f"use {parts.scheme}://{host}"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _addressing(uri: BucketUri, host: str) -> str:
    """Return the addressing that the service at ``host``, or the default one, supports."""
    is_public = uri.is_obs or not host or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    is_local = host == "localhost" or _ADDRESS.fullmatch(host)
    is_virtual = is_public and not is_local and _HOST_BUCKET.fullmatch(uri.bucket)
    return "virtual" if is_virtual else "path"
