"""Where a store of S3 or OBS is, and how it is reached: the URI first, then the environment."""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudjob.errors import StoreError
from cloudjob.spec import ADDRESSINGS, nearest
from cloudjob.store.files import check_key

OPTIONS = ("endpoint", "region", "addressing", "profile")

# Of S3 and of OBS; the prefix counts too, so a key below one may be too long all the same.
_LONGEST_KEY_BYTES = 1024
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# A name that can be a part of a host name, and that the certificate for *.endpoint covers.
_HOST_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_REGION_IN_HOST = re.compile(r"(?:obs|s3)[.-]([a-z]{2,}(?:-[a-z0-9]+)+)\.")


@dataclass(frozen=True, slots=True)
class Place:
    """What the URI of a store says.

    Args:
        scheme: ``s3`` or ``obs``.
        prefix: What all keys begin with, without a slash at its end; may be empty.
        options: Those of ``OPTIONS`` that the URI gives.
    """

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str]

    @property
    def root(self) -> str:
        """The URI without its options: what the container half is told, and what people read."""
        path = "/" + quoted(self.prefix) if self.prefix else ""
        return f"{self.scheme}://{self.bucket}{path}"

    @property
    def is_obs(self) -> bool:
        """Whether it is Huawei's service, which differs from S3 in places."""
        return self.scheme == "obs"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a bucket is reached.

    Args:
        url: ``https://host`` or ``http://host:port``, without the bucket.
        region: What requests are signed for.
        addressing: ``path`` (the bucket stands first in the path) or ``virtual`` (in the host).
        bucket: The bucket.
    """

    url: str
    region: str
    addressing: str
    bucket: str

    @property
    def host(self) -> str:
        """Host and port that a request of this bucket names."""
        host = urllib.parse.urlsplit(self.url).netloc
        return f"{self.bucket}.{host}" if self.addressing == "virtual" else host

    def target(self, key: str) -> str:
        """Return the path of the object ``key`` of the bucket, or of the bucket itself."""
        bucket = "" if self.addressing == "virtual" else f"/{self.bucket}"
        return f"{bucket}/{quoted(key)}" if key or not bucket else bucket


def quoted(text: str) -> str:
    """Return a key, or a part of one, as URIs and requests hold it."""
    return urllib.parse.quote(text, safe="/~")


def check(verb: str, key: str) -> None:
    """Refuse what is no key of S3: to what no store has it adds bytes that are no text.

    Raises:
        StoreError: It is none.
    """
    check_key(verb, key)
    try:
        size_bytes = len(key.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise StoreError(
            f"{verb} {key!r}: not a key: it is no UTF-8", hint="use a file:// store, or rename it"
        ) from error
    if size_bytes > _LONGEST_KEY_BYTES:
        raise StoreError(
            f"{verb} {key[:60]!r}...: not a key: it has {size_bytes} bytes",
            hint=f"{_LONGEST_KEY_BYTES} at most",
        )


def read(uri: str) -> Place:
    """Return what ``uri`` says.

    Raises:
        StoreError: It is no URI of a bucket.
    """
    scheme, _, rest = uri.partition("://")
    where, _, query = rest.partition("?")
    bucket, _, path = where.partition("/")
    if "@" in bucket:
        # The URI itself would show them.
        raise StoreError(
            f"open store {scheme}://***: keys do not belong into a URI", hint=KEYS_HINTS[scheme]
        )
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(
            f"open store {uri!r}: {bucket!r} is no bucket", hint=f"{scheme}://bucket/its/prefix"
        )
    prefix = urllib.parse.unquote(path, errors="surrogateescape").strip("/")
    if prefix:
        check(f"open store {uri!r}: prefix", prefix)
    return Place(scheme, bucket, prefix, _options(uri, query))


def _options(uri: str, query: str) -> dict[str, str]:
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in OPTIONS:
            guess = nearest(name, OPTIONS)
            allowed = f"allowed: {', '.join(OPTIONS)}"
            raise StoreError(f"open store {uri!r}: no option {name!r}{guess}", hint=allowed)
        if name == "addressing" and value not in ADDRESSINGS:
            allowed = f"allowed: {', '.join(ADDRESSINGS)}"
            raise StoreError(f"open store {uri!r}: addressing {value!r} is not known", hint=allowed)
    return {name: value for name, value in options.items() if value not in ("", "auto")}


def with_options(uri: str, options: Mapping[str, object]) -> str:
    """Return ``uri`` with these options, as far as it does not give them itself."""
    where, _, query = uri.partition("?")
    own = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    given = {name: str(value) for name, value in options.items() if value not in ("", "auto")}
    text = urllib.parse.urlencode({**given, **own}, safe=":/")
    return f"{where}?{text}" if text else where


KEYS_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile: ?profile=NAME",
    "obs": "set OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or run `obsutil config`",
}


# -- how it is reached ------------------------------------------------------------------------


def endpoint(
    place: Place, environ: Mapping[str, str], profile: Mapping[str, str], home: Path
) -> Endpoint:
    """Return how the bucket is reached.

    Args:
        profile: ``endpoint``, ``region`` and ``addressing`` of the profile in use, where it says.
        home: The home folder of the user.

    Raises:
        StoreError: Something is missing, or makes no sense.
    """
    given = place.options
    url = given.get("endpoint") or _endpoint(place, environ, profile, home)
    url = _checked(place, url) if url else ""
    region = given.get("region") or _region(place, environ, profile, url)
    url = url or _public(place, region)
    addressing = given.get("addressing") or profile.get("addressing") or _addressing(place, url)
    return Endpoint(url, region, addressing, place.bucket)


def _endpoint(
    place: Place, environ: Mapping[str, str], profile: Mapping[str, str], home: Path
) -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if place.is_obs:
        # The second is what ModelArts sets in its containers and notebooks.
        names = ("OBS_ENDPOINT", "S3_ENDPOINT")
    found = next((environ[name] for name in names if environ.get(name)), "")
    found = found or profile.get("endpoint", "")
    if not found and place.is_obs and "region" not in place.options:
        found = obsutil(home).get("endpoint", "")
    return found


def _region(place: Place, environ: Mapping[str, str], profile: Mapping[str, str], url: str) -> str:
    names = ("HW_REGION_NAME",) if place.is_obs else ("AWS_REGION", "AWS_DEFAULT_REGION")
    in_host = _REGION_IN_HOST.match(_host(url))
    own = in_host[1] if in_host else ""
    named = next((environ[name] for name in names if environ.get(name)), profile.get("region", ""))
    # An OBS endpoint belongs to one region, whatever a variable says.
    found = (own or named) if place.is_obs else (named or own)
    if found or not place.is_obs:
        return found or "us-east-1"
    raise StoreError(
        f"open store {place.root}: no region",
        hint=f"{place.root}?region=cn-north-4, or set HW_REGION_NAME, or OBS_ENDPOINT",
    )


def _public(place: Place, region: str) -> str:
    if place.is_obs:
        return f"https://obs.{region}.myhuaweicloud.com"
    return f"https://s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _checked(place: Place, url: str) -> str:
    if "://" not in url:
        url = f"https://{url}"
    parts = urllib.parse.urlsplit(url)
    doing = f"open store {place.root}: endpoint {url!r}"
    try:
        is_url = bool(parts.scheme in ("http", "https") and parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.path.strip("/") or parts.query or parts.username:
        raise StoreError(f"{doing}: not https://host or http://host:port", hint="?endpoint=URL")
    if parts.netloc.startswith(f"{place.bucket}."):
        # The service would take the bucket for a part of the key, and refuse the signature.
        rest = parts.netloc.removeprefix(f"{place.bucket}.")
        raise StoreError(f"{doing}: it names the bucket", hint=f"give {parts.scheme}://{rest}")
    return f"{parts.scheme}://{parts.netloc}"


def _addressing(place: Place, url: str) -> str:
    host = _host(url)
    if host == "localhost" or _is_address(host):
        return "path"
    is_public = place.is_obs or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    return "virtual" if is_public and _HOST_BUCKET.fullmatch(place.bucket) else "path"


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url if "://" in url else f"//{url}").hostname or ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def obsutil(home: Path) -> dict[str, str]:
    """Return what `obsutil config` has written for this user: ``endpoint``, ``ak``, ``sk``..."""
    try:
        text = (home / ".obsutilconfig").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith(("#", "[")))
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip()}
