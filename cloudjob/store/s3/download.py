"""Gets an object: a small one in one request, a large one in ranges at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cloudjob.errors import StoreError
from cloudjob.store.base import Tell
from cloudjob.store.parallel import in_parallel
from cloudjob.store.s3 import local
from cloudjob.store.s3.local import Part, Range
from cloudjob.store.s3.refusals import Refusal
from cloudjob.store.s3.upload import PART_BYTES_HEADER
from cloudjob.store.s3.wire import Answer, Request, Wire

_AT_ONCE = 10
# What is asked for first: it says how long the object is, and the rest waits for that.
_FIRST_BYTES = 1024 * 1024
_TRIES = 4
_OUT_OF_RANGE = 416
_PRECONDITION_FAILED = 412


class Target(Protocol):
    """Where an object goes."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes to their place; the same may come twice."""

    def read(self, offset: int, count: int) -> bytes:
        """Give back up to ``count`` bytes of what was written."""


@dataclass(frozen=True, slots=True)
class Download:
    """What is got.

    Args:
        doing: What it is for, as messages begin.
        key: The object's whole key in the bucket.
        part_bytes: How long ranges are, where the object does not say how long its parts were.
        tell: Hears how many bytes came; less than zero takes some back.
    """

    wire: Wire
    doing: str
    key: str
    target: Target
    part_bytes: int
    tell: Tell


class _Replaced(Exception):
    """Somebody has put another object under the key since we began."""


def get(download: Download) -> int:
    """Get the object and return its size; all of its bytes are of one object.

    Raises:
        StoreError: There is no such object, or it cannot be had.
        LocalError: The bytes cannot be written.
    """
    for _ in range(_TRIES):
        try:
            size_bytes = _got(download)
        except _Replaced:
            continue
        if size_bytes is not None:
            return size_bytes
    raise StoreError(
        f"{download.doing}: what comes is never what was stored",
        hint="is somebody writing it, or a proxy on the way changing what passes?",
    )


def _got(download: Download) -> int | None:
    """Return the size, None when the bytes were not the object's."""
    head = _first(download)
    size_bytes = local.whole_bytes(head.answer) if head.answer else 0
    if head.answer is None or head.came_bytes == size_bytes:
        return size_bytes
    answer = head.answer
    part_bytes = _part_bytes(answer, size_bytes)
    step = part_bytes or download.part_bytes
    # The first part goes on where the first answer ends; one that is shorter comes once more.
    goes_on = head.came_bytes <= step
    if not goes_on:
        download.tell(-head.came_bytes)
    tag = answer.headers.get("etag", "")
    is_digested = bool(part_bytes) or size_bytes <= step

    def digest(start: int) -> bytes:
        before = head if start == 0 and goes_on else None
        end = min(start + step, size_bytes)
        return _range(download, start, end, tag, before=before, is_digested=is_digested)

    digests = in_parallel(
        digest, range(0, size_bytes, step), at_once=_AT_ONCE, abort=download.wire.abort
    )
    if part_bytes:
        is_whole = local.combined_etag(digests) == answer.etag
    elif local.is_md5(answer):
        # It was put as one piece: the digest of its ranges is no digest of it.
        whole = Part(download.target, 1, 0, size_bytes)
        is_whole = (digests[0] if size_bytes <= step else whole.md5()).hex() == answer.etag
    else:
        # Nothing says what its bytes should be; there are as many as there should be.
        is_whole = True
    if not is_whole:
        download.tell(-size_bytes)
    return size_bytes if is_whole else None


def _first(download: Download) -> Range:
    """Get the first range, which is often all there is."""
    sink = Range(download.target.write, 0, download.tell)
    count = min(_FIRST_BYTES, download.part_bytes)
    headers = {"Range": f"bytes=0-{count - 1}"}
    answer = download.wire.ask(
        Request("GET", download.doing, download.key, headers=headers, sink=sink)
    )
    if answer.refusal is not None and answer.status == _OUT_OF_RANGE:
        # An empty object has no first byte.
        answer = download.wire.ask(Request("GET", download.doing, download.key, sink=sink))
    if answer.refusal is not None:
        raise _refused(download, answer.refusal)
    return sink


def _range(
    download: Download,
    start: int,
    end: int,
    tag: str,
    *,
    before: Range | None,
    is_digested: bool,
) -> bytes:
    """Get one range of the object that has this tag, and return its digest.

    Args:
        before: What has come of it already.
    """
    start += before.came_bytes if before is not None else 0
    if before is not None and start == end:
        return before.md5
    sink = Range(
        download.target.write, start, download.tell, before=before, is_digested=is_digested
    )
    headers = {"Range": f"bytes={start}-{end - 1}", "If-Match": tag}
    answer = download.wire.ask(
        Request("GET", download.doing, download.key, headers=headers, sink=sink)
    )
    if answer.refusal is not None:
        if answer.refusal.is_missing or answer.status in (_OUT_OF_RANGE, _PRECONDITION_FAILED):
            raise _Replaced
        raise _refused(download, answer.refusal)
    # Not every service minds If-Match.
    if answer.headers.get("etag", "") != tag or sink.came_bytes != end - start:
        raise _Replaced
    return sink.md5


def _refused(download: Download, refusal: Refusal) -> StoreError:
    return download.wire.refused(download.doing, refusal)


def _part_bytes(answer: Answer, size_bytes: int) -> int:
    """Return how long the parts were whose digests the tag is made of; 0 when nobody knows."""
    said = answer.headers.get(PART_BYTES_HEADER, "")
    part_bytes = int(said) if said.isascii() and said.isdecimal() else 0
    if not part_bytes or not answer.is_digest_tag:
        return 0
    count = -(-size_bytes // part_bytes)
    return part_bytes if answer.etag.endswith(f"-{count}") else 0
