"""Puts an object: in one request, or in parts at the same time that outlive a killed process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

from cloudjob.errors import StoreError
from cloudjob.store.base import Tell
from cloudjob.store.parallel import in_parallel
from cloudjob.store.s3 import local
from cloudjob.store.s3.local import Part, Source
from cloudjob.store.s3.wire import Refused, Request, Wire, document, query, text

_MIB = 1024 * 1024
PART_BYTES = 8 * _MIB
_MOST_PARTS = 10_000
_AT_ONCE = 10
# The name under which a reader finds how long the parts were, which their tag alone does not say.
PART_BYTES_HEADER = "x-amz-meta-cloudjob-part-bytes"
# How long an upload that broke off waits for somebody to go on with it.
KEPT_S = 24 * 3600.0
_TRIES = 4
# With these there is nothing to go on with.
_HOPELESS = frozenset(
    ("NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall", "EntityTooLarge")
)


@dataclass(frozen=True, slots=True)
class Upload:
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
        upload.source.check()
    else:
        _put_in_parts(upload)


def _put_at_once(upload: Upload) -> None:
    part = local.parts(upload.source, upload.part_bytes)[0]
    request = Request("PUT", upload.doing, upload.key, body=part, tell=upload.tell)
    _sent(upload.wire, request, part)


def _sent(wire: Wire, request: Request, part: Part) -> str:
    """Send a part until the service has the bytes that were meant, and return its tag."""
    for _ in range(_TRIES):
        digest = part.md5()
        headers = {"Content-MD5": local.content_md5(digest)}
        answer = wire.send(replace(request, headers=headers))
        # A service that checks Content-MD5 has refused other bytes; not every one does.
        if not local.is_md5(answer) or answer.etag == digest.hex():
            return answer.etag
        request.tell(-part.size_bytes)
    raise StoreError(
        f"{request.doing}: the bytes did not arrive as they were sent, again and again",
        hint="is there a proxy on the way that changes what passes?",
    )


# -- in parts ---------------------------------------------------------------------------------


def _put_in_parts(upload: Upload) -> None:
    _abort_stale_notes(upload.wire, upload.folder)
    with _noted(upload) as note:
        found = _sent_before(upload, note.upload_id)
        if found is None:
            note.write(_begun(upload))
        try:
            _send_parts(upload, note.upload_id, found or {})
        except (Refused, local.SourceChanged) as error:
            if isinstance(error, local.SourceChanged) or error.code in _HOPELESS:
                abort(upload.wire, upload.key, note.upload_id)
                note.forget()
            raise
        note.forget()


def _send_parts(upload: Upload, upload_id: str, found: dict[int, tuple[int, str]]) -> None:
    parts = local.parts(upload.source, _part_bytes(upload))

    def send(part: Part) -> tuple[str, bytes]:
        digest = part.md5()
        if found.get(part.number) == (part.size_bytes, digest.hex()):
            upload.tell(part.size_bytes)
            return digest.hex(), digest
        asked = query(partNumber=part.number, uploadId=upload_id)
        request = Request("PUT", upload.doing, upload.key, asked, body=part, tell=upload.tell)
        return _sent(upload.wire, request, part), digest

    sent = in_parallel(send, parts, at_once=_AT_ONCE, abort=upload.wire.abort)
    upload.source.check()
    _complete(upload, upload_id, [etag for etag, _ in sent], [digest for _, digest in sent])


def _part_bytes(upload: Upload) -> int:
    """Return how long the parts of an object are: longer when there would be too many."""
    least = -(-upload.source.size_bytes // _MOST_PARTS)
    return max(upload.part_bytes, -(-least // _MIB) * _MIB if least > upload.part_bytes else 0)


def _begun(upload: Upload) -> str:
    headers = {PART_BYTES_HEADER: str(_part_bytes(upload))}
    request = Request("POST", upload.doing, upload.key, (("uploads", ""),), headers)
    upload_id = text(document(upload.wire.send(request), upload.doing), "UploadId")
    if not upload_id:
        raise StoreError(f"{upload.doing}: the service begins no upload in parts")
    return upload_id


def _complete(upload: Upload, upload_id: str, etags: list[str], digests: list[bytes]) -> None:
    rows = "".join(
        f'<Part><PartNumber>{number}</PartNumber><ETag>"{etag}"</ETag></Part>'
        for number, etag in enumerate(etags, 1)
    )
    body = local.Bytes(f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode())
    request = Request(
        "POST",
        upload.doing,
        upload.key,
        query(uploadId=upload_id),
        {"Content-Type": "application/xml"},
        body=Part(body, 1, 0, body.size_bytes),
    )
    refusal = upload.wire.ask(request).refusal
    # A first try may have done it, and only its answer was lost.
    is_lost = refusal is not None and refusal.code == "NoSuchUpload"
    if refusal is not None and not (is_lost and _is_there(upload, digests)):
        raise upload.wire.refused(upload.doing, refusal)


def _is_there(upload: Upload, digests: list[bytes]) -> bool:
    answer = upload.wire.send(Request("HEAD", upload.doing, upload.key))
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
        self.upload_id = str(values["upload_id"]) if is_same else ""

    def write(self, upload_id: str) -> None:
        """Note an upload that was begun."""
        self.upload_id = upload_id
        if self._descriptor >= 0:
            data = json.dumps({**self._values, "upload_id": upload_id}).encode("ascii")
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
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


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
