"""How S3 and OBS are reached: endpoint, region, addressing and keys, from the environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import urllib.parse
from typing import Mapping, NamedTuple

from jobentry.contract import names
from jobentry.contract.sigv4 import Keys
from jobentry.objects import web
from jobentry.objects.base import ObjectError

_PATH, _VIRTUAL = "path", "virtual"
# Temporary keys are asked for again when they hold no longer than this.
_SOON_S = 300.0


class Access(NamedTuple):
    """Where a scheme's objects are.

    Args:
        endpoint: Scheme, host and port, without the bucket.
        is_obs: Whether it is Huawei's OBS, which has limits of its own.
        is_checked: Whether the server must prove who it is.
    """

    endpoint: str
    region: str
    addressing: str
    is_obs: bool
    is_checked: bool = True


def access(environ: Mapping[str, str], scheme: str) -> Access:
    """Return how the objects of ``s3`` or ``obs`` are reached.

    Raises:
        ObjectError: Nothing says where they are.
    """
    endpoint, is_platforms = _endpoint(environ, scheme)
    region = _region(environ, endpoint)
    if not endpoint:
        endpoint = _public(scheme, region)
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
        # The platform says so of its own endpoint, and of no other.
        is_checked=not (is_platforms and environ.get("S3_VERIFY_SSL") == "0"),
    )


def _endpoint(environ: Mapping[str, str], scheme: str) -> tuple[str, bool]:
    platforms = environ.get("S3_ENDPOINT", "")
    others = (environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", ""), False)
    found = [(environ.get(names.CLOUDJOB_S3_ENDPOINT, ""), False)]
    found += [(platforms, True), others] if scheme == "obs" else [others, (platforms, True)]
    return next(((text, is_own) for text, is_own in found if text), ("", False))


def _region(environ: Mapping[str, str], endpoint: str) -> str:
    for name in (names.CLOUDJOB_S3_REGION, "AWS_REGION", "AWS_DEFAULT_REGION"):
        if environ.get(name):
            return environ[name]
    found = re.match(r"(?:s3|obs)[.-]([a-z]+(?:-[a-z0-9]+)+)\.", _host(endpoint))
    return found.group(1) if found else ""


def _public(scheme: str, region: str) -> str:
    if scheme == "s3":
        return f"https://s3.{region or 'us-east-1'}.amazonaws.com"
    if not region:
        raise ObjectError(
            "find objects of obs://: nothing says in which region they are",
            f"set {names.CLOUDJOB_S3_REGION}, to cn-north-4 for example,"
            f" or {names.CLOUDJOB_S3_ENDPOINT}",
        )
    return f"https://obs.{region}.myhuaweicloud.com"


def _host(endpoint: str) -> str:
    text = endpoint if "://" in endpoint else "//" + endpoint
    return urllib.parse.urlsplit(text).hostname or ""


def _addressing(host: str, *, is_obs: bool) -> str:
    """Servers of one's own rarely have a name for every bucket; the public clouds ask for one."""
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


class Keyring:
    """The keys of this node; temporary ones are asked for again before they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: Keys | None = None
        self._until = 0.0

    def keys(self, environ: Mapping[str, str]) -> Keys | None:
        """Return the keys; None where there are none, for what everybody may read.

        Raises:
            ObjectError: Who should give them does not.
        """
        with self._lock:
            if time.time() < self._until:
                return self._keys
            self._keys, self._until = found(environ)
            return self._keys

    def forget(self) -> None:
        """Ask again at once: the server says that these are over."""
        with self._lock:
            self._until = 0.0


def found(environ: Mapping[str, str]) -> tuple[Keys | None, float]:
    """Return the keys of the first source that has any, and until when they are good.

    The order: the variables, the endpoint of a container's role, the file of shared credentials.
    """
    for access_name, secret_name, token_name in _NAMES:
        if environ.get(access_name) and environ.get(secret_name):
            keys = Keys(environ[access_name], environ[secret_name], environ.get(token_name, ""))
            # Cheap to look again, and somebody may have put fresh ones there.
            return keys, 0.0
    uri = _role_uri(environ)
    if uri:
        return _of_role(uri, environ)
    return _of_file(environ), time.time() + 60


def _role_uri(environ: Mapping[str, str]) -> str:
    relative = environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "")
    if relative:
        return "http://169.254.170.2" + relative
    return environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")


def _of_role(uri: str, environ: Mapping[str, str]) -> tuple[Keys, float]:
    """Ask the platform's own endpoint for the keys of the role that this container has."""
    doing, what = "ask for the keys of this container's role", urllib.parse.urlsplit(uri).netloc
    headers = {"Accept": "application/json"}
    token = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    path = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "")
    if path:
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            token = file.read().strip()
    if token:
        headers["Authorization"] = token
    parts = urllib.parse.urlsplit(uri)
    target = parts.path + ("?" + parts.query if parts.query else "")
    wire = web.Wire("GET", f"{parts.scheme}://{parts.netloc}", target or "/", headers)
    tries = web.Tries(web.patience())
    text = web.exchange(lambda: wire, lambda answer: answer.read(1 << 20), doing, what, tries)
    try:
        values = json.loads(text)
        keys = Keys(values["AccessKeyId"], values["SecretAccessKey"], values.get("Token", ""))
        return keys, _seconds(values.get("Expiration", "")) - _SOON_S
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObjectError(f"{doing}: {what}: it answers with something else") from error


def _seconds(text: str) -> float:
    import calendar

    try:
        return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return time.time() + 2 * _SOON_S


def _of_file(environ: Mapping[str, str]) -> Keys | None:
    import configparser

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
