"""The access to S3 and OBS, from the environment: endpoint, region, addressing and keys."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import time
import urllib.parse
from typing import Mapping, NamedTuple

from jobentry.contract import names
from jobentry.contract.sigv4 import Keys
from jobentry.objects import client
from jobentry.objects.base import ObjectError
from jobentry.objects.s3_xml import when

_PATH, _VIRTUAL = "path", "virtual"
# Temporary keys are replaced this long before they expire.
_EXPIRY_MARGIN_S = 300.0


class Access(NamedTuple):
    """How to reach the objects of a scheme.

    Args:
        endpoint: Scheme, host and port, without the bucket.
        is_obs: Whether it is Huawei's OBS, which has limits of its own.
        is_verified: Whether the server's certificate is checked.
    """

    endpoint: str
    region: str
    addressing: str
    is_obs: bool
    is_verified: bool = True


def access(environ: Mapping[str, str], scheme: str) -> Access:
    """Return how to reach the objects of ``s3`` or ``obs``.

    Raises:
        ObjectError: The environment does not configure how.
    """
    endpoint, is_platforms = _endpoint(environ, scheme)
    region = _region(environ, endpoint)
    if not endpoint:
        endpoint = _public_endpoint(scheme, region)
    if "://" not in endpoint:
        is_plain = is_platforms and environ.get("S3_USE_HTTPS") == "0"
        endpoint = ("http://" if is_plain else "https://") + endpoint
    host = _host(endpoint)
    is_obs = scheme == "obs" or host.startswith("obs.") or ".obs." in host
    return Access(
        endpoint=endpoint.rstrip("/"),
        region=region or "us-east-1",
        addressing=environ.get(names.CLOUDJOB_S3_ADDRESSING) or _addressing(host, is_obs=is_obs),
        is_obs=is_obs,
        # The platform's variable applies to the platform's endpoint only.
        is_verified=not (is_platforms and environ.get("S3_VERIFY_SSL") == "0"),
    )


def _endpoint(environ: Mapping[str, str], scheme: str) -> tuple[str, bool]:
    """Return the endpoint, and whether it is the platform's own."""
    endpoint = environ.get(names.CLOUDJOB_S3_ENDPOINT, "")
    platforms = environ.get("S3_ENDPOINT", "")
    aws = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    if endpoint or (aws and not (scheme == "obs" and platforms)):
        return endpoint or aws, False
    return platforms, bool(platforms)


def _region(environ: Mapping[str, str], endpoint: str) -> str:
    for name in (names.CLOUDJOB_S3_REGION, "AWS_REGION", "AWS_DEFAULT_REGION"):
        if environ.get(name):
            return environ[name]
    match = re.match(r"(?:s3|obs)[.-]([a-z]+(?:-[a-z0-9]+)+)\.", _host(endpoint))
    return match.group(1) if match else ""


def _public_endpoint(scheme: str, region: str) -> str:
    if scheme == "s3":
        return f"https://s3.{region or 'us-east-1'}.amazonaws.com"
    if not region:
        raise ObjectError(
            "looking for obs:// objects: no region is set",
            "use an obs:// store, which gives the nodes its region and keys,"
            " or set AWS_REGION, for example to cn-north-4",
        )
    return f"https://obs.{region}.myhuaweicloud.com"


def _host(endpoint: str) -> str:
    text = endpoint if "://" in endpoint else "//" + endpoint
    return urllib.parse.urlsplit(text).hostname or ""


def _addressing(host: str, *, is_obs: bool) -> str:
    """Return the addressing style: public clouds require a DNS name for every bucket.

    Private servers rarely have one.
    """
    is_address = re.match(r"[\d.]+\Z", host) is not None or ":" in host or host == "localhost"
    is_public = is_obs or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    return _VIRTUAL if is_public and not is_address else _PATH


# -- keys ---------------------------------------------------------------------------------------

_NAMES = (
    (
        names.CLOUDJOB_S3_ACCESS_KEY,
        names.CLOUDJOB_S3_SECRET_KEY,
        names.CLOUDJOB_S3_SESSION_TOKEN,
    ),
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN"),
    ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "S3_SECURITY_TOKEN"),
    ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SECURITY_TOKEN"),
)


def keys(environ: Mapping[str, str]) -> Keys | None:
    """Return the keys of this node; None if there are none, for public objects.

    The order: variables, the endpoint of the container's role, the file of shared credentials.

    Raises:
        ObjectError: The endpoint of the container's role does not give any.
    """
    for access_name, secret_name, token_name in _NAMES:
        if environ.get(access_name) and environ.get(secret_name):
            return Keys(environ[access_name], environ[secret_name], environ.get(token_name, ""))
    uri = environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
    if not uri:
        return _keys_of_file(environ)
    keys_of_uri, until = _of_role.get(uri, (None, 0.0))
    if time.time() >= until:
        keys_of_uri, until = _of_role[uri] = _keys_of_role(uri, environ)
    return keys_of_uri


# The keys of each role's endpoint, and when to replace them.
_of_role: dict[str, tuple[Keys, float]] = {}


def forget_role_keys() -> None:
    """Forget the keys of a role, which have expired according to the server."""
    _of_role.clear()


def _keys_of_role(uri: str, environ: Mapping[str, str]) -> tuple[Keys, float]:
    doing = f"getting the keys of this container's role from {urllib.parse.urlsplit(uri).netloc}"
    token = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    path = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "")
    if path:
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            token = file.read().strip()
    headers = {"Accept": "application/json", **({"Authorization": token} if token else {})}
    request = client.Request("GET", uri, headers)
    text = client.send(lambda: request, lambda response: response.read(), doing)
    try:
        values = json.loads(text)
        keys_of_role = Keys(
            values["AccessKeyId"], values["SecretAccessKey"], values.get("Token", "")
        )
        expiry = when(values.get("Expiration", "")) / 1e9
        return keys_of_role, (expiry or time.time() + 2 * _EXPIRY_MARGIN_S) - _EXPIRY_MARGIN_S
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObjectError(f"{doing}: the answer contains no keys") from error


def _keys_of_file(environ: Mapping[str, str]) -> Keys | None:
    home = environ.get("HOME", "")
    path = environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.join(home, ".aws/credentials")
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
        section = parser[environ.get("AWS_PROFILE") or "default"]
        token = section.get("aws_session_token", "")
        return Keys(section["aws_access_key_id"], section["aws_secret_access_key"], token)
    except (configparser.Error, KeyError, OSError, ValueError):
        return None
