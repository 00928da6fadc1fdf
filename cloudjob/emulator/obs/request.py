"""Reads a request to OBS as a value. No I/O.

The emulator judges this value, and builds the request to the object store from it alone. Whatever
two programs could read differently (a header or a parameter that is there twice, a parameter in
another case, an invalid encoding) is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from cloudjob.emulator.obs.names import is_reserved, stored_name
from jobentry.contract import sigv4

Headers = list[tuple[bytes, bytes]]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error response to a request; without a status, only a delay of the response."""

    status: int = 0
    code: str = ""
    message: str = ""
    delay_s: float = 0.0


class Refused(Exception):
    """OBS refuses a request."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(status, code, message)


class Message(NamedTuple):
    """A request as its client signed it.

    Args:
        path: The path, decoded.
        query: All parameters, decoded, in their order.
        headers: All headers, with names in lower case.
    """

    method: str
    target: str
    path: str
    query: Pairs
    headers: Mapping[str, str]

    def parameters(self) -> dict[str, str]:
        """Return the query with names in lower case."""
        return {name.lower(): value for name, value in self.query}


class Source(NamedTuple):
    """The object that a request copies."""

    bucket: str
    key: str
    version: str


@dataclass(frozen=True, slots=True)
class ObsRequest:
    """A request to OBS.

    Args:
        bucket: Empty in the request for the list of buckets.
        key: Empty in a request for a bucket.
        query: The parameters without those of a signature.
        headers: The headers that the object store gets, with names in lower case.
        payload: The digest of the body, or how it is encoded.
        actions: The actions that the request needs permission for, each with its bucket.
    """

    method: str
    bucket: str
    key: str
    query: Pairs
    headers: Mapping[str, str]
    payload: str
    actions: Pairs
    source: Source | None = None

    @property
    def is_list(self) -> bool:
        """Whether its answer may name objects."""
        return self.method == "POST" or (self.method == "GET" and not self.key)

    @property
    def names_many(self) -> bool:
        """Whether its body names objects to delete."""
        return self.method == "POST" and not self.key

    @property
    def names_parts(self) -> bool:
        """Whether its body names the parts of an object."""
        return self.method == "POST" and bool(self.key) and "uploadId" in dict(self.query)

    def looking(self, method: str, key: str = "") -> ObsRequest:
        """Return a request that only looks at the same bucket or upload."""
        host = {"host": self.headers["host"]}
        query = self.query if key else ()
        return ObsRequest(method, self.bucket, key, query, host, sigv4.UNSIGNED, ())

    @property
    def needs_space(self) -> bool:
        """Whether it needs disk space."""
        return self.method in ("PUT", "POST") and not self.names_many


BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_LISTED, _GET, _PUT, _DELETE = (
    "obs:bucket:ListBucket",
    "obs:object:GetObject",
    "obs:object:PutObject",
    "obs:object:DeleteObject",
)
# Method and sub-resource -> the action that it needs; other combinations are refused.
_OF_BUCKET = {
    **{("GET", name): _LISTED for name in ("", "encryption", "location", "uploads", "versions")},
    ("HEAD", ""): _LISTED,
    ("PUT", ""): "obs:bucket:CreateBucket",
    ("DELETE", ""): "obs:bucket:DeleteBucket",
    ("POST", "delete"): _DELETE,
    **{
        (method, name): f"obs:bucket:{verb}{resource}"
        for name, resource in (
            ("acl", "BucketAcl"),
            ("cors", "BucketCORS"),
            ("lifecycle", "LifecycleConfiguration"),
            ("tagging", "BucketTagging"),
            ("versioning", "BucketVersioning"),
        )
        for method, verb in (("GET", "Get"), ("PUT", "Put"), ("DELETE", "Delete"))
    },
}
_OF_OBJECT = {
    **{(method, ""): _GET for method in ("GET", "HEAD")},
    **{("GET", name): _GET for name in ("acl", "attributes", "tagging")},
    **{("PUT", name): _PUT for name in ("", "acl", "tagging", "partNumber&uploadId")},
    **{("POST", name): _PUT for name in ("uploads", "uploadId")},
    **{("DELETE", name): _PUT for name in ("tagging", "uploadId")},
    # Only who writes parts lists them.
    ("GET", "uploadId"): _PUT,
    # Part of an object, whoever reads it.
    **{(method, "partNumber"): _GET for method in ("GET", "HEAD")},
    ("DELETE", ""): _DELETE,
}
_SUB_RESOURCES = {
    part for table in (_OF_BUCKET, _OF_OBJECT) for _, name in table for part in name.split("&")
} - {""}
_PARAMETERS = {
    *("delimiter", "encoding-type", "fetch-owner", "key-marker", "list-type", "marker"),
    *("continuation-token", "max-keys", "max-parts", "max-uploads", "part-number-marker"),
    *("prefix", "start-after", "upload-id-marker", "version-id-marker", "versionId"),
    *(f"response-{name}" for name in ("cache-control", "content-disposition", "expires")),
    *(f"response-content-{name}" for name in ("encoding", "language", "type")),
}
# Parameters that clients add and OBS ignores.
_IGNORED_PARAMETERS = ("x-id", "x-amz-checksum-mode")
# Parameters of a URL that carry its signature, in lower case.
SIGNATURES = ("x-amz-signature", "signature")
TOKENS = ("x-amz-security-token", "x-obs-security-token")
OF_SIGNATURE = {
    *("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires"),
    *("x-amz-signedheaders", "awsaccesskeyid", "accesskeyid", "expires"),
    *SIGNATURES,
    *TOKENS,
}
_EXACT = {name.lower(): name for name in (*_PARAMETERS, *_SUB_RESOURCES)}
# Headers that the object store gets as they are.
_HEADERS = {
    *("cache-control", "content-disposition", "content-language", "content-length", "content-md5"),
    *("content-type", "expires", "host", "if-match", "if-modified-since", "if-none-match"),
    *("if-unmodified-since", "range", "transfer-encoding"),
    *("x-amz-acl", "x-amz-decoded-content-length", "x-amz-metadata-directive"),
    *("x-amz-mp-object-size", "x-amz-object-attributes", "x-amz-sdk-checksum-algorithm"),
    *("x-amz-storage-class", "x-amz-tagging", "x-amz-tagging-directive", "x-amz-trailer"),
    *("x-amz-checksum-mode", "x-amz-max-parts", "x-amz-part-number-marker"),
}
_ENCRYPTION = "x-amz-server-side-encryption"
_HEADER_STARTS = ("x-amz-meta-", "x-amz-checksum-", _ENCRYPTION)
_COPY = "x-amz-copy-source"
PAYLOAD = "x-amz-content-sha256"
# Headers of S3 that OBS ignores, or that a signature uses.
_IGNORED_HEADERS = {
    *("x-amz-date", "x-amz-expected-bucket-owner", "x-amz-request-payer", "x-amz-user-agent"),
    *(_COPY, PAYLOAD, "x-obs-date", *TOKENS),
}
SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
UNSIGNED_CHUNKS = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_PAYLOADS = (sigv4.UNSIGNED, SIGNED_CHUNKS, SIGNED_CHUNKS + "-TRAILER", UNSIGNED_CHUNKS)
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_CODED = "aws-chunked"
_PART, _LAST_PART = re.compile(r"[1-9][0-9]{0,4}\Z"), 10_000
_KEY_BYTES = 1024
# What OBS accepts in a parameter or header, while SeaweedFS ignores what it does not know.
_VALUES = {
    "encoding-type": re.compile(r"url\Z"),
    "list-type": re.compile(r"2\Z"),
    "x-amz-acl": re.compile(
        r"(private|public-read|public-read-write|authenticated-read|aws-exec-read"
        r"|bucket-owner-read|bucket-owner-full-control|log-delivery-write)\Z"
    ),
}
# Larger numbers count as the largest list; SeaweedFS refuses them.
_COUNTS = ("max-keys", "max-parts", "max-uploads")
_MOST_LISTED, _LARGEST_COUNT = 1000, 2**31 - 1
# Any other range counts as none.
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-[0-9]{1,18})\Z")
_INVALID_ENCODING = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def message_of(method: str, target: str, headers: Headers) -> Message:
    """Return a request, decoded once.

    Raises:
        Refused: Programs could read it in different ways.
    """
    if not target.startswith("/"):
        raise _bad("The target of the request must start with a slash.")
    path, _, query = target.partition("?")
    pairs = tuple(_parameter(text) for text in query.split("&") if text)
    _check_distinct("parameter", (name for name, _ in pairs))
    _check_distinct("header", (name.decode("latin-1") for name, _ in headers))
    texts = {name.decode("latin-1").lower(): _text(value) for name, value in headers}
    if "transfer-encoding" in texts and "content-length" in texts:
        raise _bad("The request has both Content-Length and Transfer-Encoding.")
    return Message(method, target, _decoded(path), pairs, texts)


def read(message: Message) -> ObsRequest:
    """Return what a request asks for.

    Raises:
        Refused: It is invalid, or asks for something that the emulator does not have.
    """
    bucket, _, key = message.path[1:].partition("/")
    _check_names(bucket, key)
    query = tuple(
        (name, _value(name, value)) for name, value in message.query if _is_passed_on(name)
    )
    _check_part(dict(query).get("partNumber"))
    action = _action(message.method, bucket, key, query)
    source = _source(message)
    actions = ((action, bucket),) if action else ()
    if source and (action != _PUT or message.method != "PUT"):
        raise _bad(f"{_COPY} belongs to a PUT of an object.")
    if source:
        actions = (*actions, (_GET, source.bucket))
    return ObsRequest(
        message.method,
        bucket,
        key,
        query,
        {**_headers(message), "host": message.headers.get("host", "")},
        _payload(message),
        actions,
        source,
    )


def stored_path(request: ObsRequest) -> str:
    """Return the path of a request with the object store's names, encoded."""
    key = stored_name(request.key) if request.key else ""
    return sigv4.encoded(f"/{request.bucket}" + (f"/{key}" if key else ""), safe="/")


def stored_source(source: Source) -> str:
    """Return the source of a copy with the object store's names, encoded."""
    path = sigv4.encoded(f"/{source.bucket}/{stored_name(source.key)}", safe="/")
    return f"{path}?versionId={sigv4.encoded(source.version)}" if source.version else path


# -- parts ----------------------------------------------------------------------------------------


def _action(method: str, bucket: str, key: str, query: Pairs) -> str:
    """Return the action of a request; empty for the list of buckets, which everyone may see."""
    resource = "&".join(sorted(name for name, _ in query if name in _SUB_RESOURCES))
    if not bucket:
        if (method, resource) != ("GET", ""):
            raise _not_implemented(f"{method} of the list of buckets")
        return ""
    action = (_OF_OBJECT if key else _OF_BUCKET).get((method, resource))
    if action is None:
        where = "an object" if key else "a bucket"
        raise _not_implemented(f"{method} of {where}" + (f" with {resource}" if resource else ""))
    return action


def _check_names(bucket: str, key: str) -> None:
    if bucket and not BUCKET.match(bucket):
        raise Refused(400, "InvalidBucketName", "The specified bucket is not valid.")
    if len(key.encode()) > _KEY_BYTES:
        raise Refused(400, "KeyTooLongError", "Your key is too long.")
    if is_reserved(key):
        raise Refused(400, "InvalidURI", "Couldn't parse the specified URI.")


def _check_part(number: str | None) -> None:
    """Check the number of a part: with another one, SeaweedFS takes the part for the object."""
    if number is not None and not (_PART.match(number) and int(number) <= _LAST_PART):
        raise Refused(400, "InvalidArgument", f"Part numbers are those from 1 to {_LAST_PART}.")


def _is_passed_on(name: str) -> bool:
    """Whether the object store gets a parameter.

    Raises:
        Refused: OBS has no such parameter.
    """
    lower = name.lower()
    if lower in OF_SIGNATURE or lower in _IGNORED_PARAMETERS:
        return False
    if _EXACT.get(lower, "") != name:
        if lower in _EXACT:
            raise _bad(f"The parameter {_EXACT[lower]} is spelled {_shown(name)}.")
        raise _not_implemented(f"the parameter {_shown(name)}")
    return True


def _value(name: str, value: str) -> str:
    """Return the value of a parameter that the object store gets.

    Raises:
        Refused: OBS does not accept it, or the emulator does not.
    """
    _check_value(name, value)
    if name == "delimiter" and len(value) > 1:
        raise _not_implemented("delimiters of several characters")
    is_large = name in _COUNTS and re.match(r"[0-9]{4,10}\Z", value) is not None
    if is_large and _MOST_LISTED < int(value) <= _LARGEST_COUNT:
        return str(_MOST_LISTED)
    return value


def _check_value(name: str, value: str) -> None:
    allowed = _VALUES.get(name)
    if allowed and not allowed.match(value):
        raise Refused(400, "InvalidArgument", f"The value of {name} is invalid.")


def _is_range(text: str) -> bool:
    match = _RANGE.match(text)
    return match is not None and not (match[2] and int(match[2]) < int(match[1]))


def _headers(message: Message) -> dict[str, str]:
    """Return the headers that the object store gets.

    Raises:
        Refused: A header asks for something that the emulator does not have.
    """
    if message.headers.get(_ENCRYPTION, "AES256") != "AES256":
        raise _not_implemented("keys of the service for encryption")
    kept = {}
    for name, value in message.headers.items():
        _check_value(name, value)
        if name == "range" and not _is_range(value):
            continue
        if name in _HEADERS or name.startswith((*_HEADER_STARTS, f"{_COPY}-")):
            kept[name] = value
        elif name.startswith(("x-amz-", "x-obs-")) and name not in _IGNORED_HEADERS:
            raise _not_implemented(f"the header {_shown(name)}")
    codings = [text.strip() for text in message.headers.get("content-encoding", "").split(",")]
    if rest := [text for text in codings if text not in ("", _CODED)]:
        kept["content-encoding"] = ",".join(rest)
    return kept


def _payload(message: Message) -> str:
    text = message.headers.get(PAYLOAD, sigv4.UNSIGNED)
    if text in _PAYLOADS or _DIGEST.match(text):
        return text
    raise _bad(f"The header {PAYLOAD} is invalid.")


def _source(message: Message) -> Source | None:
    text = message.headers.get(_COPY)
    if text is None:
        return None
    path, mark, query = text.partition("?")
    bucket, _, key = _decoded(path).removeprefix("/").partition("/")
    _check_names(bucket, key)
    name, _, version = query.partition("=")
    if not (bucket and key) or (mark and name != "versionId"):
        raise _bad(f"The header {_COPY} must be /BUCKET/KEY.")
    return Source(bucket, key, _decoded(version))


def _parameter(text: str) -> tuple[str, str]:
    name, _, value = text.replace("+", " ").partition("=")
    return _decoded(name), _decoded(value)


def _decoded(text: str) -> str:
    """Decode percent-encoded text.

    Raises:
        Refused: It is not valid.
    """
    raw = text.encode("utf-8")
    if _INVALID_ENCODING.search(raw):
        raise _bad("The request has an invalid percent-encoding.")
    return _text(unquote_to_bytes(raw))


def _text(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad("The request is not valid UTF-8.") from error
    if "\0" in text:
        raise _bad("The request contains a NUL character.")
    return text


def _check_distinct(what: str, names: Iterable[str]) -> None:
    seen_names: set[str] = set()
    for name in map(str.lower, names):
        if name in seen_names:
            raise _bad(f"The {what} {_shown(name)} is there twice.")
        seen_names.add(name)


def _shown(name: str) -> str:
    return re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII)


def _bad(message: str) -> Refused:
    return Refused(400, "InvalidRequest", message)


def _not_implemented(what: str) -> Refused:
    return Refused(501, "NotImplemented", f"The emulator does not support {what}.")
