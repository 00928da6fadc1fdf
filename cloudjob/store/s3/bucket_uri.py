"""Parse the URI of a bucket: ``s3://bucket/prefix?region=NAME`` or ``obs://…``."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from cloudjob.errors import InvalidKey, StoreError
from cloudjob.model.rules import ADDRESSINGS
from cloudjob.model.text import nearest
from cloudjob.store.files import check_key

OPTIONS = ("endpoint", "region", "addressing", "profile")
# Scheme -> hint if there are no credentials.
CREDENTIALS_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile: ?profile=NAME",
    "obs": "set OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or run `obsutil config`",
}

# The limit of S3 and OBS. The prefix counts too, so a key that passes here may still be too long.
_MAX_KEY_BYTES = 1024
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True, slots=True)
class BucketUri:
    """The parts of a bucket's URI.

    Args:
        scheme: ``s3`` or ``obs``.
        prefix: The start of all keys, without a slash at its end; may be empty.
        options: The ``OPTIONS`` that the URI sets.
    """

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str]

    @property
    def root(self) -> str:
        """The URI without its options, as the node half and messages show it."""
        path = "/" + quoted(self.prefix) if self.prefix else ""
        return f"{self.scheme}://{self.bucket}{path}"

    @property
    def is_obs(self) -> bool:
        """Whether the service is Huawei OBS, which differs from S3 in some points."""
        return self.scheme == "obs"

    def key(self, key: str) -> str:
        """Return the key of an object in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


def quoted(text: str) -> str:
    """Return a key, or a part of one, percent-encoded for a URI."""
    return urllib.parse.quote(text, safe="/~")


def check(doing: str, key: str, *, may_be_temporary: bool = False) -> None:
    """Refuse keys that S3 does not accept, including those that cannot be encoded as UTF-8.

    Raises:
        StoreError: The key is not valid.
    """
    check_key(doing, key, may_be_temporary=may_be_temporary)
    try:
        size_bytes = len(key.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidKey(
            f"{doing} {key!r}: not a valid key: it is not UTF-8",
            hint="use a file:// store, or rename it",
        ) from error
    if size_bytes > _MAX_KEY_BYTES:
        raise InvalidKey(
            f"{doing} {key[:60]!r}...: not a valid key: it has {size_bytes} bytes",
            hint=f"{_MAX_KEY_BYTES} at most",
        )


def read(uri: str) -> BucketUri:
    """Parse ``uri``.

    Raises:
        StoreError: ``uri`` is not the URI of a bucket.
    """
    scheme, _, rest = uri.partition("://")
    where, _, query = rest.partition("?")
    bucket, _, path = where.partition("/")
    if "@" in bucket:
        # The message must not contain the URI, as it holds credentials.
        raise StoreError(
            f"opening the store {scheme}://***: a URI must not contain access keys",
            hint=CREDENTIALS_HINTS[scheme],
        )
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(
            f"opening the store {uri!r}: {bucket!r} is not a bucket name",
            hint=f"{scheme}://bucket/its/prefix",
        )
    prefix = urllib.parse.unquote(path, errors="surrogateescape").strip("/")
    if prefix:
        check(f"opening the store {uri!r}: prefix", prefix)
    return BucketUri(scheme, bucket, prefix, _options(uri, query))


def _options(uri: str, query: str) -> dict[str, str]:
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in OPTIONS:
            guess = nearest(name, OPTIONS)
            allowed = f"allowed: {', '.join(OPTIONS)}"
            raise StoreError(
                f"opening the store {uri!r}: unknown option {name!r}{guess}", hint=allowed
            )
        if name == "addressing" and value not in ADDRESSINGS:
            allowed = f"allowed: {', '.join(ADDRESSINGS)}"
            raise StoreError(
                f"opening the store {uri!r}: unknown addressing {value!r}", hint=allowed
            )
    return {name: value for name, value in options.items() if value not in ("", "auto")}


def with_options(uri: str, options: Mapping[str, object]) -> str:
    """Return ``uri`` with these options added; options that it already has are kept."""
    where, _, query = uri.partition("?")
    of_uri = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    chosen = {name: str(value) for name, value in options.items() if value not in ("", "auto")}
    text = urllib.parse.urlencode({**chosen, **of_uri}, safe=":/")
    return f"{where}?{text}" if text else where
