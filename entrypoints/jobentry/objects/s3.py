"""Objects in S3 and compatible services, above all OBS: ``s3://`` and ``obs://``.

A URI contains the percent-encoded key, just as ``file://`` contains a path.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import threading
import time
from functools import partial
from html import escape
from http.client import HTTPResponse
from typing import IO, Callable, Iterator, Sequence, TypeVar
from urllib.parse import quote, unquote

from jobentry.contract import sigv4
from jobentry.objects import access, client, s3_xml
from jobentry.objects.base import (
    CHUNK_BYTES,
    Entry,
    ObjectError,
    ObjectMissing,
    Progress,
    in_parallel,
    no_progress,
    opened,
    scheme_of,
    translated,
)
from jobentry.objects.remote import Call, RemoteObject, md5
from jobentry.secrets import private_environ

Result = TypeVar("Result")

# A larger object is uploaded in parts of this size.
_PART_BYTES = 8 * CHUNK_BYTES
_MAX_PARTS = 10_000
_THREADS = 4
_ABORT_LIMIT_S = 5.0

_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"))
_REGION = "set CLOUDJOB_S3_REGION or AWS_REGION to the region of the bucket"
_CLOCK = "set this node's clock"
_HINTS = {
    "NoSuchBucket": "is the name of the bucket right, and does it belong to this endpoint?",
    "SignatureDoesNotMatch": "is the secret key right? The endpoint must not contain the bucket",
    "InvalidAccessKeyId": "do these keys belong to this endpoint?",
    "ExpiredToken": "the temporary keys have expired; `cloudjob refresh JOB` delivers new ones",
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "EntityTooLarge": "the server accepts no object of this size",
    "QuotaExceeded": "the bucket or the account is full",
}


class S3Object(RemoteObject):
    """An object of a bucket; with an empty key, the bucket itself."""

    is_in_store = True

    def __init__(self, scheme: str, bucket: str, key: str) -> None:
        self.scheme, self.bucket, self.key = scheme, bucket, key
        self.uri = f"{scheme}://{bucket}/{quote(key, safe='/~', errors='surrogateescape')}"

    def with_key(self, key: str) -> S3Object:
        """Return another object of the same bucket."""
        return S3Object(self.scheme, self.bucket, key)

    def request(
        self, call: Call, read: Callable[[HTTPResponse], Result], limit_s: float | None = None
    ) -> Result:
        """Send a signed request, and once more with fresh keys if its keys have expired."""
        doing = f"{call.doing} {self.uri}"
        try:
            return client.send(lambda: self._signed(call), read, doing, _renew_keys, limit_s)
        except client.Refused as error:
            hint = _HINTS.get(error.answer.code, error.hint)
            if error.answer.status in (401, 403) and _keys() is None:
                hint = "no keys are set: deliver AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY as"
                hint += " secrets"
            raise client.Refused(str(error), hint, error.answer) from error

    def put(self, path: str, progress: Progress = no_progress) -> None:
        """Store the file at ``path``; a large one goes in parts, in parallel."""
        with translated("reading", path), opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _PART_BYTES:
                _put_parts(file, path, size, self, progress)
                return
            data = file.read()
        self.request(Call("writing", "PUT", body=data), client.nothing)
        progress(size)

    def copy_to(self, target: S3Object) -> None:
        """Copy the object within the store."""
        copy_source = f"/{self.bucket}/{sigv4.encoded(self.key, '/')}"
        target.request(Call("copying", "PUT", (("x-amz-copy-source", copy_source),)), _values)

    def _signed(self, call: Call) -> client.Request:
        settings = access.access(private_environ.environ(), self.scheme)
        scheme, _, host = settings.endpoint.partition("://")
        path = "/" + sigv4.encoded(self._utf8_key(), "/")
        if settings.addressing == "virtual":
            host = f"{self.bucket}.{host}"
        else:
            path = f"/{self.bucket}{path}"
        headers = {"Host": host, **dict(call.headers)}
        if call.body:
            # SeaweedFS compares this digest, and not the one in the signature of a part.
            digest = md5(call.body).digest()
            headers["Content-MD5"] = base64.b64encode(digest).decode("ascii")
        # OBS refuses a digest in the signature, and an encrypted connection needs none.
        is_unsigned = settings.is_obs or scheme == "https"
        payload = sigv4.UNSIGNED if is_unsigned else hashlib.sha256(call.body).hexdigest()
        keys = _keys()
        if keys is not None:
            scope = sigv4.Scope(settings.region, time.strftime(sigv4.MOMENT, time.gmtime()))
            request = sigv4.Request(call.method, path, call.query, headers)
            headers = sigv4.headers(request, keys, scope, payload)
        query = sigv4.query_text(call.query)
        url = f"{scheme}://{host}{path}" + ("?" + query if query else "")
        return client.Request(
            call.method, url, headers, call.body, is_verified=settings.is_verified
        )

    def _utf8_key(self) -> bytes:
        try:
            return self.key.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ObjectError(
                f"name object: {self.uri!r}: its name is not UTF-8, which S3 requires",
                "rename the file",
            ) from error


def _keys() -> sigv4.Keys | None:
    return access.keys(private_environ.environ())


def _renew_keys(answer: client.Answer) -> bool:
    """Return whether fresh keys may be available after the current ones were refused."""
    is_expired = answer.code in _EXPIRED
    if is_expired:
        access.forget_role_keys()
    is_refused = is_expired or answer.status in (401, 403)
    return (is_refused and private_environ.take_keys()) or is_expired


def check(uri: str) -> None:
    """Raise an ``ObjectError`` if this is not a URI, or its store is not configured."""
    access.access(private_environ.environ(), _located(uri).scheme)


def object_at(uri: str) -> S3Object:
    """Return the object of a URI."""
    target = _located(uri)
    if not target.key:
        raise ObjectError(f"looking for {uri}: it names a bucket, not an object")
    return target


def listed(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``, in the order of the server.

    This is version 1 of the request: OBS leaves out the continuation token of version 2, so that
    listing a large bucket would never end.
    """
    top = _located(prefix)
    marker = ""
    while True:
        query = [("prefix", top.key), ("encoding-type", "url"), ("max-keys", "1000")]
        query += [("marker", marker)] if marker else []
        entries, is_truncated = top.with_key("").request(Call("listing", query=query), _page)
        for entry in entries:
            key = entry.name
            if not key.startswith(top.key):
                raise ObjectError(
                    f"listing {prefix}: the answer has {key!r}, which is not below it"
                )
            yield entry._replace(name=key[len(top.key) :], uri=top.with_key(key).uri)
        if not is_truncated:
            return
        if entries[-1].name == marker:
            raise ObjectError(
                f"listing {prefix}: the next page does not continue where the last one ended"
            )
        marker = entries[-1].name


def _page(response: HTTPResponse) -> tuple[list[Entry], bool]:
    try:
        return s3_xml.page(response.read(s3_xml.LIMIT_BYTES + 1))
    except s3_xml.XmlError as error:
        raise OSError(f"the list cannot be read: {error}") from error


# -- uploads in parts ---------------------------------------------------------------------------


def _put_parts(file: IO[bytes], path: str, size: int, target: S3Object, progress: Progress) -> None:
    step = max(_PART_BYTES, -(-size // _MAX_PARTS))
    started = target.request(Call("writing", "POST", query=[("uploads", "")]), _values)
    upload = ("uploadId", started["UploadId"])
    lock = threading.Lock()

    def send(number: int, offset: int) -> str:
        with lock:
            file.seek(offset)
            data = file.read(step)
        if len(data) < min(step, size - offset):
            raise ObjectError(f"reading {path}: it became shorter while it was read")
        call = Call("writing", "PUT", body=data, query=[("partNumber", str(number)), upload])
        tag = target.request(call, lambda response: response.headers.get("etag", ""))
        progress(len(data))
        return tag

    tasks = [partial(send, number, at) for number, at in enumerate(range(0, size, step), 1)]
    try:
        _complete(target, upload, in_parallel(tasks, _THREADS))
    except BaseException:
        # Leave no parts behind; the error that led here is reported, not one from this request.
        with contextlib.suppress(ObjectError):
            call = Call("writing", "DELETE", query=[upload])
            target.request(call, client.nothing, _ABORT_LIMIT_S)
        raise


def _complete(target: S3Object, upload: tuple[str, str], tags: Sequence[str]) -> None:
    rows = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag, quote=False)}</ETag></Part>"
        for number, tag in enumerate(tags, 1)
    )
    body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode("ascii")
    try:
        target.request(Call("writing", "POST", body=body, query=[upload]), _values)
    except ObjectMissing:
        # The answer to an earlier attempt was lost, and now there is nothing left to complete.
        if target.stat().tag != _tag_of(tags):
            raise


def _tag_of(tags: Sequence[str]) -> str:
    """Return the ETag of an object of these parts; empty if the server does not use MD5."""
    try:
        digests = [bytes.fromhex(tag.strip('"')) for tag in tags]
    except ValueError:
        return ""
    return f"{md5(b''.join(digests)).hexdigest()}-{len(digests)}"


def _values(response: HTTPResponse) -> dict[str, str]:
    """Return the values of an answer in XML; S3 also reports errors with status 200."""
    data = response.read(s3_xml.LIMIT_BYTES + 1)
    values = s3_xml.values_of(data)
    code, _ = s3_xml.error(data)
    if code or not values:
        raise OSError(code or "the answer cannot be read")
    return values


def _located(uri: str) -> S3Object:
    scheme = scheme_of(uri)
    bucket, _, path = uri.partition("://")[2].partition("/")
    key = unquote(path, errors="surrogateescape")
    is_bucket = re.match(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,62}\Z", bucket) is not None
    if not is_bucket or "?" in path or "\0" in key:
        raise ObjectError(
            f"looking for {uri.partition('?')[0]!r}: not a URI of the form {scheme}://bucket/key",
            "a bucket has 3 to 63 letters, digits, dots and dashes; a ? in a key is %3F",
        )
    return S3Object(scheme, bucket, key)
