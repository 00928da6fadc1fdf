"""Puts an object: in one request, or in parts at the same time that outlive a killed process."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from cloudjob import locks
from cloudjob.errors import StoreError
from cloudjob.store.base import Tell
from cloudjob.store.parallel import in_parallel
from cloudjob.store.s3 import local
from cloudjob.store.s3.local import Part, Source
from cloudjob.store.s3.wire import (
    PIECE_BYTES,
    Refused,
    Request,
    Wire,
    document,
    query,
    text,
)

_MIB = 1024 * 1024
PART_BYTES = 8 * _MIB
_MOST_PARTS = 10_000
_AT_ONCE = 10
# The name under which a reader finds how long the parts were, which their tag alone does not say.
PART_BYTES_HEADER = "x-amz-meta-cloudjob-part-bytes"
CRC32_HEADER = "x-amz-checksum-crc32"
_ALGORITHM_HEADER = "x-amz-checksum-algorithm"
_CRC32 = "CRC32"
# How long an upload that broke off waits for somebody to go on with it.
KEPT_S = 24 * 3600.0
_TRIES = 4
# With these there is nothing to go on with.
_NO_SUCH_UPLOAD = "NoSuchUpload"
_HOPELESS = frozenset(
    (_NO_SUCH_UPLOAD, "InvalidPart", "InvalidPartOrder", "EntityTooSmall", "EntityTooLarge")
)


class Upload(NamedTuple):
    """What is put where.

    Args:
        doing: What it is for, as messages begin.
        key: The object's whole key in the bucket.
        part_bytes: How long parts are, and the longest object that goes in one request.
        folder: Where this machine notes the uploads that it has begun.
        tell: Hears how many bytes were sent; less than zero takes some back.
    """

    wire: Wire
    doing: str
    key: str
    source: Source
    part_bytes: int
    folder: Path
    tell: Tell


def put(upload: Upload) -> None:
    """Put the object; it is there as a whole when this returns, and not before.

    Raises:
        StoreError: The service refuses, or cannot be reached.
        LocalError: The source cannot be read.
        SourceChanged: The source changed on the way.
    """
    if upload.source.size_bytes <= upload.part_bytes:
        _put_at_once(upload)
    else:
        _put_in_parts(upload)


def _put_at_once(upload: Upload) -> None:
    source, size_bytes = upload.source, upload.source.size_bytes
    if size_bytes <= PIECE_BYTES:
        # A small one is read once, and sent as it was then.
        data = b"".join(Part(source, 1, 0, size_bytes).pieces())
        source.check()
        source = local.Bytes(data)
    part = Part(source, 1, 0, size_bytes)
    request = Request("PUT", upload.doing, upload.key, body=part, tell=upload.tell)
    _sent(upload.wire, request, part, part.digest(local.md5))
    source.check()


def _sent(wire: Wire, request: Request, part: Part, digest: bytes) -> str:
    """Send a part until the service has the bytes with this MD5, and return its tag."""
    headers = {"content-md5": local.base64_text(digest)}
    for _ in range(_TRIES):
        answer = wire.send(request._replace(headers=headers))
        # A service that checks Content-MD5 has refused other bytes; not every one does.
        if not local.is_md5(answer) or answer.etag == digest.hex():
            return answer.etag
        request.tell(-part.size_bytes)
        headers = {"content-md5": local.base64_text(part.digest(local.md5))}
    raise _never_arrived(request)


def _sent_with_crc32(wire: Wire, request: Request, part: Part, digest: bytes) -> str:
    """Send a part until the service says that it has the bytes with this CRC-32."""
    said = local.base64_text(digest)
    for _ in range(_TRIES):
        answer = wire.send(request._replace(headers={CRC32_HEADER: said}))
        heard = answer.headers.get(CRC32_HEADER, "")
        # One that keeps it to itself is judged by its tag.
        is_judged = not heard and local.is_md5(answer)
        if heard == said or (is_judged and answer.etag == part.digest(local.md5).hex()):
            return answer.etag
        if not heard and not is_judged:
            return answer.etag
        request.tell(-part.size_bytes)
    raise _never_arrived(request)


def _never_arrived(request: Request) -> StoreError:
    return StoreError(
        f"{request.doing}: the bytes did not arrive as they were sent, again and again",
        hint="is there a proxy on the way that changes what passes?",
    )


# -- in parts ---------------------------------------------------------------------------------


class _Begun(NamedTuple):
    """An upload that was begun.

    Args:
        has_crc32: Whether its parts are proven by CRC-32; else by MD5, which costs far more, and
            which every service checks.
    """

    id: str
    has_crc32: bool


def _put_in_parts(upload: Upload) -> None:
    _abort_stale_notes(upload.wire, upload.folder)
    with _noted(upload) as note:
        try:
            found = _sent_before(upload, note.begun.id)
            if found is None or not _has_gone_on(upload, note.begun, found):
                note.write(_begun(upload))
                _send_parts(upload, note.begun, {})
        except (Refused, local.SourceChanged) as error:
            if isinstance(error, local.SourceChanged) or error.code in _HOPELESS:
                abort(upload.wire, upload.key, note.begun.id)
                note.forget()
            raise
        note.forget()


def _has_gone_on(upload: Upload, begun: _Begun, found: dict[int, tuple[int, str]]) -> bool:
    """Send what is missing of what a killed writer has begun, and say whether that could be done.

    The last request of that writer may still be on its way, and end the upload under our hands.
    """
    told: list[int] = []

    def tell(count: int) -> None:
        told.append(count)
        upload.tell(count)

    try:
        _send_parts(upload._replace(tell=tell), begun, found)
    except Refused as error:
        if error.code != _NO_SUCH_UPLOAD:
            raise
        upload.tell(-sum(told))
        return False
    return True


def _send_parts(upload: Upload, begun: _Begun, found: dict[int, tuple[int, str]]) -> None:
    parts = local.parts(upload.source, _part_bytes(upload))
    kind, send = (local.Crc32, _sent_with_crc32) if begun.has_crc32 else (local.md5, _sent)

    def sent(part: Part) -> tuple[str, bytes]:
        digest = part.digest(kind)
        if part.number in found:
            tag = (part.digest(local.md5) if begun.has_crc32 else digest).hex()
            if found[part.number] == (part.size_bytes, tag):
                upload.tell(part.size_bytes)
                return tag, digest
        asked = query(partNumber=part.number, uploadId=begun.id)
        request = Request("PUT", upload.doing, upload.key, asked, body=part, tell=upload.tell)
        return send(upload.wire, request, part, digest), digest

    rows = in_parallel(sent, parts, at_once=_AT_ONCE, abort=upload.wire.abort)
    upload.source.check()
    _complete(upload, begun, rows)


def _part_bytes(upload: Upload) -> int:
    """Return how long the parts of an object are: longer when there would be too many."""
    least = -(-upload.source.size_bytes // _MOST_PARTS)
    return max(upload.part_bytes, -(-least // _MIB) * _MIB if least > upload.part_bytes else 0)


def _begun(upload: Upload) -> _Begun:
    headers = {PART_BYTES_HEADER: str(_part_bytes(upload))}
    if upload.wire.has_checksums:
        headers[_ALGORITHM_HEADER] = _CRC32
    request = Request("POST", upload.doing, upload.key, (("uploads", ""),), headers)
    answer = upload.wire.send(request)
    upload_id = text(document(answer, upload.doing), "UploadId")
    if not upload_id:
        raise StoreError(f"{upload.doing}: the service begins no upload in parts")
    # Who does not know of it says nothing of it.
    return _Begun(upload_id, answer.headers.get(_ALGORITHM_HEADER) == _CRC32)


def _complete(upload: Upload, begun: _Begun, sent: list[tuple[str, bytes]]) -> None:
    rows = "".join(
        f'<Part><PartNumber>{number}</PartNumber><ETag>"{etag}"</ETag>'
        + f"<ChecksumCRC32>{local.base64_text(digest)}</ChecksumCRC32>" * begun.has_crc32
        + "</Part>"
        for number, (etag, digest) in enumerate(sent, 1)
    )
    body = local.Bytes(f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode())
    request = Request(
        "POST",
        upload.doing,
        upload.key,
        query(uploadId=begun.id),
        {"content-type": "application/xml"},
        body=Part(body, 1, 0, body.size_bytes),
    )
    refusal = upload.wire.ask(request).refusal
    # A first try may have done it, and only its answer was lost.
    is_lost = refusal is not None and refusal.code == _NO_SUCH_UPLOAD
    if refusal is not None and not (is_lost and _is_there(upload, [etag for etag, _ in sent])):
        raise upload.wire.refused(upload.doing, refusal)


def _is_there(upload: Upload, etags: list[str]) -> bool:
    answer = upload.wire.send(Request("HEAD", upload.doing, upload.key))
    try:
        digests = [bytes.fromhex(etag) for etag in etags]
    except ValueError:
        return False
    return answer.refusal is None and answer.etag == local.combined_etag(digests)


def _sent_before(upload: Upload, upload_id: str) -> dict[int, tuple[int, str]] | None:
    """Return size and tag of each part that is there already; None when there is no such upload."""
    if not upload_id:
        return None
    found: dict[int, tuple[int, str]] = {}
    marker = 0
    while True:
        asked = query(uploadId=upload_id, part_number_marker=marker)
        answer = upload.wire.ask(Request("GET", upload.doing, upload.key, asked))
        if answer.refusal is not None:
            return None
        listed = document(answer, upload.doing)
        for part in listed.iterfind("{*}Part"):
            number = int(text(part, "PartNumber"))
            found[number] = int(text(part, "Size")), text(part, "ETag").strip('"')
        last = int(text(listed, "NextPartNumberMarker") or 0)
        if text(listed, "IsTruncated") != "true" or last <= marker:
            return found
        marker = last


def abort(wire: Wire, key: str, upload_id: str) -> None:
    """Remove an upload that was begun, as far as the service lets us."""
    with suppress(StoreError):
        wire.ask(Request("DELETE", "remove an upload", key, query(uploadId=upload_id)))


def abort_stale(wire: Wire, doing: str, prefix: str, older_than_s: float) -> int:
    """Remove every upload below ``prefix`` that was begun so long ago, and return their number."""
    before_s = time.time() - wire.skew_s - older_than_s
    count = 0
    for key, upload_id, begun_at in list(_uploads(wire, doing, prefix)):
        if datetime.fromisoformat(begun_at.replace("Z", "+00:00")).timestamp() <= before_s:
            abort(wire, key, upload_id)
            count += 1
    return count


def _uploads(wire: Wire, doing: str, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, id and begin of each upload that is not complete."""
    asked: tuple[tuple[str, str], ...] = ()
    while True:
        first = (("uploads", ""), ("prefix", prefix), ("encoding-type", "url"))
        listed = document(wire.send(Request("GET", doing, query=first + asked)), doing)
        is_encoded = text(listed, "EncodingType") == "url"
        for found in listed.iterfind("{*}Upload"):
            key = text(found, "Key")
            key = unquote_plus(key) if is_encoded else key
            yield key, text(found, "UploadId"), text(found, "Initiated")
        marker = text(listed, "NextKeyMarker")
        marker = unquote_plus(marker) if is_encoded else marker
        following = query(key_marker=marker, upload_id_marker=text(listed, "NextUploadIdMarker"))
        if text(listed, "IsTruncated") != "true" or following == asked:
            return
        asked = following


# -- what a killed process leaves for the next ------------------------------------------------


class _Note:
    """What this machine knows of one upload; whoever holds its lock may go on with it.

    Args:
        descriptor: Of the note's file, -1 when somebody else holds it or it cannot be written.
    """

    def __init__(self, upload: Upload, path: Path, descriptor: int) -> None:
        endpoint = upload.wire.endpoint
        self._values = {
            "endpoint": endpoint.url,
            "bucket": endpoint.bucket,
            "key": upload.key,
            "size_bytes": upload.source.size_bytes,
            "part_bytes": _part_bytes(upload),
        }
        self._path = path
        self._descriptor = descriptor
        values = _read(descriptor)
        is_same = all(values.get(name) == value for name, value in self._values.items())
        has_crc32 = values.get("checksum") == _CRC32
        self.begun = _Begun(str(values["upload_id"]) if is_same else "", has_crc32)

    def write(self, begun: _Begun) -> None:
        """Note an upload that was begun."""
        self.begun = begun
        if self._descriptor >= 0:
            checksum = _CRC32 if begun.has_crc32 else ""
            values = {**self._values, "upload_id": begun.id, "checksum": checksum}
            data = json.dumps(values).encode("ascii")
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, data, 0)

    def forget(self) -> None:
        """Leave no note: the upload is complete, or removed."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)


@contextmanager
def _noted(upload: Upload) -> Iterator[_Note]:
    endpoint = upload.wire.endpoint
    name = "\n".join((endpoint.url, endpoint.bucket, upload.key))
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    path = upload.folder / f"{digest}.json"
    descriptor = _locked(path)
    try:
        yield _Note(upload, path, descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _locked(path: Path, flags: int = os.O_CREAT) -> int:
    """Return a descriptor of a note with its lock, -1 when it is not to be had."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = locks.take(path, flags)
    except OSError:
        return -1
    return -1 if descriptor is None else descriptor


def _read(descriptor: int) -> dict[str, Any]:
    """Return what a note says; nothing when its writer was killed over it."""
    with suppress(ValueError, OSError):
        values = json.loads(os.pread(descriptor, 100_000, 0))
        if isinstance(values, dict) and isinstance(values.get("upload_id"), str):
            return values
    return {}


def _abort_stale_notes(wire: Wire, folder: Path) -> None:
    """Remove the uploads to this bucket with which nobody has gone on for a day."""
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < KEPT_S:
                continue
        descriptor = _locked(path, 0)
        values = _read(descriptor)
        endpoint = wire.endpoint
        if (values.get("endpoint"), values.get("bucket")) == (endpoint.url, endpoint.bucket):
            abort(wire, str(values["key"]), values["upload_id"])
            path.unlink(missing_ok=True)
        if descriptor >= 0:
            os.close(descriptor)
