"""Objects of S3 and of compatible services, OBS above all: ``s3://`` and ``obs://``.

A URI holds the key percent-encoded, as ``file://`` holds a path.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from functools import partial
from html import escape
from typing import Callable, Iterator, Sequence, TypeVar
from urllib.parse import quote, unquote

from jobentry.contract import sigv4
from jobentry.objects import access, client, s3_xml, transfer
from jobentry.objects.base import (
    CHUNK_BYTES,
    Entry,
    ObjectError,
    ObjectMissing,
    Progress,
    in_parallel,
    no_progress,
    scheme_of,
    translated,
)
from jobentry.objects.transfer import Call
from jobentry.secrets import private_environ

Result = TypeVar("Result")

# Up to this size an object goes in one request.
_SINGLE_BYTES = 8 * CHUNK_BYTES
_PART_BYTES = 8 * CHUNK_BYTES
_MOST_PARTS = 10_000
# No server copies more in one request.
_MOST_COPIED_BYTES = 5 * 1024**3
_THREADS = 4
_ABORT_LIMIT_S = 5.0

_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"))
_SKEWED = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
_HINTS = {
    "NoSuchBucket": "is the name of the bucket right, and does it belong to this endpoint?",
    "SignatureDoesNotMatch": "is the secret key right? The endpoint must not hold the bucket",
    "InvalidAccessKeyId": "do these keys belong to this endpoint?",
    "ExpiredToken": "the temporary keys have expired; `cloudjob refresh JOB` delivers new ones",
    "RequestTimeTooSkewed": "set this node's clock",
    "EntityTooLarge": "the server takes no object of this size",
    "QuotaExceeded": "the bucket or the account is full",
}


class Session:
    """What the requests of this process share: keys, and what servers have corrected."""

    def __init__(self) -> None:
        self.keyring = access.Keyring()
        self.regions: dict[str, str] = {}
        self.clock_offset_s = 0.0


session = Session()


class S3Object(transfer.RemoteObject):
    """An object of a bucket; with an empty key, the bucket itself."""

    is_in_store = True

    def __init__(self, scheme: str, bucket: str, key: str) -> None:
        self.scheme, self.bucket, self.key = scheme, bucket, key
        self.uri = f"{scheme}://{bucket}/{quote(key, safe='/~', errors='surrogateescape')}"

    def with_key(self, key: str) -> S3Object:
        """Return another object of the same bucket."""
        return S3Object(self.scheme, self.bucket, key)

    def request(
        self,
        call: Call,
        read: Callable[[client.Response], Result],
        retries: client.Retries | None = None,
    ) -> Result:
        """Send a signed request; one that only the clock, region or keys spoiled is repeated."""
        doing = f"{call.doing}: {self.uri}"
        try:
            return client.send(lambda: self._signed(call), read, doing, retries, self._correct)
        except client.Refused as error:
            hint = _HINTS.get(error.answer.error.code, error.hint)
            if error.answer.status in (401, 403) and self._keys() is None:
                hint = "no keys are set: deliver AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY as"
                hint += " secrets"
            raise client.Refused(str(error), hint, error.answer) from error

    def put(self, path: str, progress: Progress = no_progress) -> None:
        """Store the file at ``path``; a large one goes in parts, in parallel."""
        with translated("read file", path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _SINGLE_BYTES:
                _put_parts(file.fileno(), path, size, self, progress)
                return
            data = _read_part(file.fileno(), path, 0, size)
        self.request(Call("put object", "PUT", body=data), transfer.nothing)
        progress(size)

    def copy_to(self, target: S3Object) -> None:
        """Copy the object within the store."""
        if self.look().size_bytes > _MOST_COPIED_BYTES:
            text = f"it has more than {_MOST_COPIED_BYTES} bytes"
            raise ObjectError(f"copy object: {self.uri}: {text}")
        place = f"/{self.bucket}/{sigv4.encoded(self.key, '/')}"
        call = Call("copy object", "PUT", lambda: {"x-amz-copy-source": place})
        target.request(call, _values)

    def _keys(self) -> sigv4.Keys | None:
        return session.keyring.keys(private_environ.environ())

    def _signed(self, call: Call) -> client.Request:
        found = access.access(private_environ.environ(), self.scheme)
        scheme, _, host = found.endpoint.partition("://")
        path = "/" + sigv4.encoded(self._utf8_key(), "/")
        if found.addressing == "virtual":
            host = f"{self.bucket}.{host}"
        else:
            path = f"/{self.bucket}{path}"
        headers = {"Host": host, **call.headers()}
        # A file is read first, in parts.
        body = call.body if isinstance(call.body, bytes) else b""
        if body:
            # SeaweedFS compares this digest, and not the one in the signature of a part.
            headers["Content-MD5"] = base64.b64encode(transfer.md5(body).digest()).decode("ascii")
        # OBS refuses a digest in the signature, and an encrypted connection needs none.
        is_unsigned = found.is_obs or scheme == "https"
        payload = sigv4.UNSIGNED if is_unsigned else hashlib.sha256(body).hexdigest()
        keys = self._keys()
        if keys is not None:
            at = time.gmtime(time.time() + session.clock_offset_s)
            region = session.regions.get(self.bucket, found.region)
            scope = sigv4.Scope(region, time.strftime(sigv4.MOMENT, at))
            request = sigv4.Request(call.method, path, call.query, headers)
            headers = sigv4.headers(request, keys, scope, payload)
        query = sigv4.query_text(call.query)
        url = f"{scheme}://{host}{path}" + ("?" + query if query else "")
        return client.Request(call.method, url, headers, body, found.is_verified)

    def _utf8_key(self) -> bytes:
        try:
            return self.key.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ObjectError(
                f"name object: {self.uri!r}: its name is not UTF-8, which S3 requires",
                "rename the file",
            ) from error

    def _correct(self, answer: client.Answer) -> bool:
        """Learn from a refusal; return whether the next request differs in what was wrong."""
        is_refused = answer.error.code in _EXPIRED or answer.status in (401, 403)
        if is_refused and private_environ.take_keys():
            session.keyring.forget()
            return True
        if answer.error.code in _EXPIRED:
            session.keyring.forget()
            return True
        if answer.error.code in _SKEWED and answer.headers.get("date"):
            server_s = s3_xml.when(answer.headers["date"]) / 1e9
            offset_s = server_s - time.time() if server_s else 0.0
            is_new = abs(offset_s - session.clock_offset_s) > 60
            session.clock_offset_s = offset_s
            return is_new
        region = answer.headers.get("x-amz-bucket-region", "") or answer.error.region
        if answer.status not in (301, 307, 400) or not region:
            return False
        is_new = session.regions.get(self.bucket) != region
        session.regions[self.bucket] = region
        return is_new


def check(uri: str) -> None:
    """Raise an ``ObjectError`` if this is no URI, or nothing says where its objects are."""
    access.access(private_environ.environ(), _located(uri).scheme)


def object_at(uri: str) -> S3Object:
    """Return the object of a URI."""
    found = _located(uri)
    if not found.key:
        raise ObjectError(f"find object: {uri}: it names a bucket, and no object in it")
    return found


def listed(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``, in the order of the server."""
    top = _located(prefix)
    # OBS forgets the token of version 2, so the list of a large bucket would never end.
    is_v1 = access.access(private_environ.environ(), top.scheme).is_obs
    following = ""
    while True:
        page, later = _page(top, following, is_v1=is_v1)
        for found in page:
            if not found.key.startswith(top.key):
                raise ObjectError(f"list objects: {prefix}: {found.key!r} came, which is not there")
            name, uri = found.key[len(top.key) :], top.with_key(found.key).uri
            yield Entry(name, uri, found.size_bytes, found.tag, found.modified_ns)
        if not later:
            return
        if later == following or (is_v1 and later < following):
            raise ObjectError(f"list objects: {prefix}: the list does not go on where it ended")
        following = later


def _page(top: S3Object, following: str, *, is_v1: bool) -> tuple[list[s3_xml.Found], str]:
    query = [("prefix", top.key), ("encoding-type", "url"), ("max-keys", "1000")]
    if not is_v1:
        query.append(("list-type", "2"))
    if following:
        query.append(("marker" if is_v1 else "continuation-token", following))

    def take(response: client.Response) -> tuple[list[s3_xml.Found], str]:
        try:
            return s3_xml.page(response.read(s3_xml.LIMIT_BYTES))
        except s3_xml.XmlError as error:
            raise OSError(f"the list cannot be read: {error}") from error

    return top.with_key("").request(Call("list objects", query=query), take)


# -- uploads in parts ---------------------------------------------------------------------------


def _put_parts(file: int, path: str, size: int, target: S3Object, progress: Progress) -> None:
    step = max(_PART_BYTES, -(-size // _MOST_PARTS))
    begun = target.request(Call("put object", "POST", query=[("uploads", "")]), _values)
    upload = ("uploadId", begun["UploadId"])

    def send(number: int, offset: int) -> str:
        data = _read_part(file, path, offset, min(step, size - offset))
        call = Call("put object", "PUT", body=data, query=[("partNumber", str(number)), upload])
        tag = target.request(call, lambda response: response.headers.get("etag", ""))
        progress(len(data))
        return tag

    tasks = [partial(send, number, at) for number, at in enumerate(range(0, size, step), 1)]
    try:
        _complete(target, upload, list(in_parallel(tasks, _THREADS)))
    except BaseException:
        _abort(target, upload)
        raise


def _read_part(file: int, path: str, offset: int, length: int) -> bytes:
    pieces = []
    while length:
        data = os.pread(file, min(length, CHUNK_BYTES), offset)
        if not data:
            raise ObjectError(f"read file: {path}: it became shorter while it was read")
        pieces.append(data)
        offset, length = offset + len(data), length - len(data)
    return b"".join(pieces)


def _complete(target: S3Object, upload: tuple[str, str], tags: Sequence[str]) -> None:
    rows = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag, quote=False)}</ETag></Part>"
        for number, tag in enumerate(tags, 1)
    )
    body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode("ascii")
    try:
        target.request(Call("put object", "POST", body=body, query=[upload]), _values)
    except ObjectMissing:
        # The answer to an earlier attempt was lost, and now there is nothing left to complete.
        if target.look().tag != _tag_of(tags):
            raise


def _tag_of(tags: Sequence[str]) -> str:
    """Return the ETag of an object of these parts; empty if the server does not use MD5."""
    digests = [tag.strip('"') for tag in tags]
    if not all(re.match(r"[0-9a-f]{32}\Z", digest) for digest in digests):
        return ""
    whole = transfer.md5(b"".join(bytes.fromhex(digest) for digest in digests))
    return f"{whole.hexdigest()}-{len(digests)}"


def _abort(target: S3Object, upload: tuple[str, str]) -> None:
    """Leave no parts behind; the error that led here is reported, not one from this request."""
    patience = client.patience()._replace(total_s=_ABORT_LIMIT_S, stall_s=_ABORT_LIMIT_S)
    call = Call("put object", "DELETE", query=[upload])
    try:
        target.request(call, transfer.nothing, client.Retries(patience))
    except ObjectError:
        return


def _values(response: client.Response) -> dict[str, str]:
    """Return the values of an answer in XML; S3 also reports errors with status 200."""
    data = response.read(s3_xml.LIMIT_BYTES)
    values = s3_xml.values_of(data)
    code = s3_xml.error(data).code
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
            f"find object: {uri.partition('?')[0]!r}: not a URI of the form {scheme}://bucket/key",
            "a bucket has 3 to 63 letters, digits, dots and dashes; a ? in a key is %3F",
        )
    return S3Object(scheme, bucket, key)
