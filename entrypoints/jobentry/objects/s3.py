"""Objects of S3 and of what speaks like it, OBS above all: ``s3://`` and ``obs://``.

A URI holds the key percent-encoded, as ``file://`` holds a path.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import threading
import time
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, TypeVar
from urllib.parse import quote, unquote

from jobentry import private_environ
from jobentry.contract import sigv4
from jobentry.objects import access, listing, remote, web
from jobentry.objects.base import (
    CHUNK_BYTES,
    Entry,
    ObjectError,
    ObjectMissing,
    Stop,
    Tell,
    in_parallel,
    quiet,
    scheme_of,
    translated,
)

Result = TypeVar("Result")

# Up to this size an object goes in one request.
_SINGLE_BYTES = 8 * CHUNK_BYTES
_PART_BYTES = 8 * CHUNK_BYTES
_MOST_PARTS = 10_000
# No server copies more at once.
_MOST_COPIED_BYTES = 5 * 1024**3
_XML_BYTES = 64 * CHUNK_BYTES
_THREADS = 4

_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"))
_SKEWED = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
_ELSEWHERE = frozenset(("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"))


class _Place(NamedTuple):
    scheme: str
    bucket: str
    key: str

    @property
    def uri(self) -> str:
        key = quote(self.key, safe="/~", errors="surrogateescape")
        return f"{self.scheme}://{self.bucket}/{key}"


def check(uri: str) -> None:
    """Raise an ``ObjectError`` for what cannot be a URI, or where nothing says where it is."""
    place = _place(uri)
    access.access(private_environ.environ(), place.scheme)


def fetch(uri: str, path: str, sha256: str = "", tell: Tell = quiet) -> None:
    """Write the object to the file ``path``, whole or not at all."""
    remote.fetch(_source(_object(uri)), path, sha256, tell)


def read(uri: str) -> bytes:
    """Return the object's bytes."""
    return remote.read(_source(_object(uri)))


def read_range(uri: str, offset: int, length: int) -> bytes:
    """Return ``length`` of the object's bytes, fewer where it ends before."""
    return remote.read_range(_source(_object(uri)), offset, length)


def look(uri: str) -> Entry:
    """Return the facts of one object.

    Raises:
        ObjectMissing: There is none.
    """
    place = _object(uri)

    def take(answer: web.Response) -> Entry:
        size = int(answer.headers.get("content-length", "0"))
        at = listing.when(answer.headers.get("last-modified", ""))
        return Entry("", uri, size, answer.headers.get("etag", "").strip('"'), at)

    return _call(_Call("HEAD", place), take, "find object")


def put(path: str, uri: str, tell: Tell = quiet) -> None:
    """Store the file at ``path`` as the object ``uri``; a large one goes in parts, in parallel."""
    place = _object(uri)
    with translated("read file", path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _SINGLE_BYTES:
            _put_parts(file.fileno(), path, size, place, tell)
            return
        data = _read_part(file.fileno(), path, 0, size)
    _put(data, place, "put object")
    tell(size)


def write(data: bytes, uri: str) -> None:
    """Store ``data`` as the object ``uri``."""
    _put(data, _object(uri), "write object")


def copy(uri: str, target: str) -> None:
    """Make the object ``target`` the same as ``uri``, without its bytes coming here."""
    source, place = _object(uri), _object(target)
    if look(uri).size_bytes > _MOST_COPIED_BYTES:
        raise ObjectError(f"copy object: {uri}: it has more than {_MOST_COPIED_BYTES} bytes")
    headers = {"x-amz-copy-source": "/" + source.bucket + "/" + sigv4.encoded(source.key, "/")}
    _call(_Call("PUT", place, headers=headers), _done, "copy object")


def delete(uri: str) -> None:
    """Leave no object ``uri``, whether or not there was one."""
    try:
        _call(_Call("DELETE", _object(uri)), _nothing, "delete object")
    except ObjectError as error:
        if type(error) is not ObjectMissing:
            raise


def listed(prefix: str) -> Iterator[Entry]:
    """Yield the objects whose URI begins with ``prefix``, in the order of the server."""
    place = _place(prefix)
    # OBS forgets the token of version 2, so a list of many would never end.
    is_v1 = access.access(private_environ.environ(), place.scheme).is_obs
    following = ""
    while True:
        page = _page(place, following, is_v1=is_v1)
        for found in page.found:
            if not found.key.startswith(place.key):
                raise ObjectError(f"list objects: {prefix}: {found.key!r} came, which is not there")
            yield Entry(
                found.key[len(place.key) :],
                place._replace(key=found.key).uri,
                found.size_bytes,
                found.tag,
                found.modified_ns,
            )
        if not page.following:
            return
        if page.following == following or (is_v1 and page.following < following):
            raise ObjectError(f"list objects: {prefix}: the list does not go on where it ended")
        following = page.following


def _page(place: _Place, following: str, *, is_v1: bool) -> listing.Page:
    query = [("prefix", place.key), ("encoding-type", "url"), ("max-keys", "1000")]
    if not is_v1:
        query.append(("list-type", "2"))
    if following:
        query.append(("marker" if is_v1 else "continuation-token", following))

    def take(answer: web.Response) -> listing.Page:
        try:
            return listing.page(answer.read(_XML_BYTES))
        except listing.XmlError as error:
            raise OSError(f"the list cannot be read: {error}") from error

    bucket = place._replace(key="")
    return _call(_Call("GET", bucket, query), take, "list objects", place.uri)


# -- writing ------------------------------------------------------------------------------------


def _put(data: bytes, place: _Place, doing: str) -> None:
    _call(_Call("PUT", place, body=data), _nothing, doing)


def _put_parts(file: int, path: str, size: int, place: _Place, tell: Tell) -> None:
    doing = "put object"
    upload = _call(_Call("POST", place, [("uploads", "")]), _done, doing)["UploadId"]
    try:
        _complete(place, upload, list(_parts(file, path, size, (place, upload), tell)))
    except BaseException:
        _abort(place, upload)
        raise


def _parts(
    file: int, path: str, size: int, upload: tuple[_Place, str], tell: Tell
) -> Iterator[str]:
    """Send the parts and yield their ETags in order."""
    step = max(_PART_BYTES, -(-size // _MOST_PARTS))
    stop = Stop()

    def task(number: int) -> Callable[[], str]:
        return lambda: send(number)

    def send(number: int) -> str:
        offset = (number - 1) * step
        data = _read_part(file, path, offset, min(step, size - offset))
        query = [("partNumber", str(number)), ("uploadId", upload[1])]
        call = _Call("PUT", upload[0], query, body=data)
        tag: str = _call(call, lambda answer: answer.headers.get("etag", ""), "put object")
        tell(len(data))
        return tag

    count = -(-size // step)
    yield from in_parallel([task(number) for number in range(1, count + 1)], _THREADS, stop)


def _read_part(file: int, path: str, offset: int, length: int) -> bytes:
    pieces = []
    while length:
        data = os.pread(file, min(length, CHUNK_BYTES), offset)
        if not data:
            raise ObjectError(f"read file: {path}: it became shorter while it was read")
        pieces.append(data)
        offset, length = offset + len(data), length - len(data)
    return b"".join(pieces)


def _complete(place: _Place, upload: str, tags: Sequence[str]) -> None:
    rows = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{_escaped(tag)}</ETag></Part>"
        for number, tag in enumerate(tags, 1)
    )
    body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode("ascii")
    try:
        _call(_Call("POST", place, [("uploadId", upload)], body=body), _done, "put object")
    except ObjectMissing:
        # Its answer was lost on the way, and the second time there is nothing left to complete.
        if look(place.uri).tag != _tag_of(tags):
            raise


def _tag_of(tags: Sequence[str]) -> str:
    """Return the ETag that an object of these parts has on every server that tells."""
    digests = [tag.strip('"') for tag in tags]
    if not all(re.match(r"[0-9a-f]{32}\Z", digest) for digest in digests):
        return ""
    whole: str = remote.md5(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()
    return f"{whole}-{len(digests)}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _abort(place: _Place, upload: str) -> None:
    """Leave no parts; who cannot do even that has said already what is wrong."""
    tries = web.Tries(web.patience()._replace(total_s=5.0, stall_s=5.0))
    call = _Call("DELETE", place, [("uploadId", upload)])
    try:
        web.exchange(lambda: _wire(call), _nothing, "", "", tries, listing.fault)
    except ObjectError:
        return


def _nothing(answer: web.Response) -> None:
    answer.read(_XML_BYTES)


def _done(answer: web.Response) -> dict[str, str]:
    """Return what the answer says, by the last name; 200 may still stand over a fault."""
    data = answer.read(_XML_BYTES)
    values = {
        path.rpartition("/")[2]: text for path, text in listing.values_of(data).items() if text
    }
    word = listing.fault(data)[0]
    if word or not values:
        raise OSError(word or "an answer came that cannot be read")
    return values


# -- one request --------------------------------------------------------------------------------


class _Call(NamedTuple):
    method: str
    place: _Place
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = {}
    body: bytes = b""


_keyring = access.Keyring()
_regions: dict[str, str] = {}
_ahead_s = 0.0
_lock = threading.Lock()


def _call(call: _Call, take: web.Read[Result], doing: str, what: str = "") -> Result:
    return _exchange(lambda: call, take, doing, what or call.place.uri, web.Tries(web.patience()))


def _exchange(
    make: Callable[[], _Call], take: web.Read[Result], doing: str, what: str, tries: web.Tries
) -> Result:
    """Make a request; where only the clock, the region or the keys were wrong, once more for each.

    All three may be wrong at once, and the clock twice: a proxy may answer with a time of its own.
    """
    for is_last in (False, False, False, False, True):
        try:
            return web.exchange(lambda: _wire(make()), take, doing, what, tries, listing.fault)
        except web.Refused as error:
            if is_last or not _learnt(error.answer, make().place.bucket):
                raise _explained(error) from error
    raise AssertionError("the last round returns or raises")


def _wire(call: _Call) -> web.Wire:
    place = call.place
    found = access.access(private_environ.environ(), place.scheme)
    scheme, _, host = found.endpoint.partition("://")
    path = "/" + sigv4.encoded(_utf8(place), "/")
    if found.addressing == "virtual":
        host = f"{place.bucket}.{host}"
    else:
        path = f"/{place.bucket}{path}"
    query = sigv4.query_text(call.query)
    headers, payload = _headers(call, found, host)
    keys = _keyring.keys(private_environ.environ())
    if keys is not None:
        at = time.strftime(sigv4.MOMENT, time.gmtime(time.time() + _ahead_s))
        scope = sigv4.Scope(_regions.get(place.bucket, found.region), at)
        request = sigv4.Request(call.method, path, call.query, headers)
        headers = sigv4.headers(request, keys, scope, payload)
    target = path + ("?" + query if query else "")
    origin = f"{scheme}://{host}"
    return web.Wire(call.method, origin, target, headers, call.body, found.is_checked)


def _utf8(place: _Place) -> bytes:
    try:
        return place.key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ObjectError(
            f"name object: {place.uri!r}: its name is no UTF-8, and S3 knows no other names",
            "rename the file",
        ) from error


def _headers(call: _Call, found: access.Access, host: str) -> tuple[dict[str, str], str]:
    """Return the headers before they are signed, and what the signature says of the body."""
    headers = {"Host": host, **call.headers}
    if call.body:
        # SeaweedFS compares this digest, and not the one in the signature of a part.
        digest = remote.md5(call.body).digest()
        headers["Content-MD5"] = base64.b64encode(digest).decode("ascii")
    if found.is_obs or found.endpoint.startswith("https:"):
        # OBS refuses a digest in the signature; where the line is encrypted nobody needs it.
        return headers, sigv4.UNSIGNED
    return headers, hashlib.sha256(call.body).hexdigest()


def _learnt(answer: web.Answer, bucket: str) -> bool:
    """Whether the answer says what was wrong with the way we asked, so that we can ask again."""
    global _ahead_s
    if answer.word in _EXPIRED:
        _keyring.forget()
        return True
    if answer.word in _SKEWED and answer.headers.get("date"):
        server_s = listing.when(answer.headers["date"]) / 1e9
        ahead_s = server_s - time.time() if server_s else 0.0
        is_news = abs(ahead_s - _ahead_s) > 60
        _ahead_s = ahead_s
        return is_news
    region = answer.headers.get("x-amz-bucket-region", "")
    region = region or listing.values_of(answer.body).get("Error/Region", "")
    is_elsewhere = answer.status in (301, 307, 400) and region
    if is_elsewhere and _regions.get(bucket) != region:
        with _lock:
            _regions[bucket] = region
        return True
    return False


_WORDS = {
    "NoSuchBucket": "is the name of the bucket right, and does it belong to this endpoint?",
    "SignatureDoesNotMatch": "is the secret key right? The endpoint must not hold the bucket",
    "InvalidAccessKeyId": "do these keys belong to this endpoint?",
    "ExpiredToken": "the temporary keys are over; deliver fresh ones",
    "RequestTimeTooSkewed": "set this node's clock",
    "EntityTooLarge": "the server takes no object of this size",
    "QuotaExceeded": "the bucket or the account is full",
}


def _explained(error: web.Refused) -> web.Refused:
    hint = _WORDS.get(error.answer.word, error.hint)
    if error.answer.status in (401, 403) and _keyring.keys(private_environ.environ()) is None:
        hint = "there are no keys: deliver AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY as secrets"
    return web.Refused(str(error), hint, error.answer)


def _source(place: _Place) -> remote.Source:
    def exchange(asked: remote.Asked, take: web.Read[Any], tries: web.Tries) -> Any:
        def call() -> _Call:
            return _Call(asked.method, place, headers=asked.headers())

        return _exchange(call, take, asked.doing, place.uri, tries)

    return remote.Source(place.uri, exchange, is_store=True)


# -- URIs ---------------------------------------------------------------------------------------


def _place(uri: str) -> _Place:
    scheme = scheme_of(uri)
    bucket, _, path = uri.partition("://")[2].partition("/")
    key = unquote(path, errors="surrogateescape")
    is_bucket = re.match(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,62}\Z", bucket) is not None
    if not is_bucket or "?" in path or "\0" in key:
        raise ObjectError(
            f"find object: {uri.partition('?')[0]!r}: not a URI of the form {scheme}://bucket/key",
            "a bucket has 3 to 63 letters, digits, dots and dashes; a ? in a key is %3F",
        )
    return _Place(scheme, bucket, key)


def _object(uri: str) -> _Place:
    place = _place(uri)
    if not place.key:
        raise ObjectError(f"find object: {uri}: it names a bucket, and no object in it")
    return place
