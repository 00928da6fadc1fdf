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
    # The first range is as long as parts usually are; where they are not, it comes once more.
    begin = head.came_bytes if step == head.came_bytes else 0
    if not begin:
        download.tell(-head.came_bytes)
    tag = answer.headers.get("etag", "")
    digests = in_parallel(
        lambda start: _range(download, start, min(step, size_bytes - start), tag),
        range(begin, size_bytes, step),
        at_once=_AT_ONCE,
        abort=download.wire.abort,
    )
    if begin:
        digests.insert(0, head.md5)
    if part_bytes:
        is_whole = local.combined_etag(digests) == answer.etag
    elif local.is_md5(answer):
        is_whole = Part(download.target, 1, 0, size_bytes).md5().hex() == answer.etag
    else:
        # Nothing says what its bytes should be; there are as many as there should be.
        is_whole = True
    if not is_whole:
        download.tell(-size_bytes)
    return size_bytes if is_whole else None


def _first(download: Download) -> Range:
    """Get the first range, which is often all there is."""
    sink = Range(download.target.write, 0, download.tell)
    headers = {"Range": f"bytes=0-{download.part_bytes - 1}"}
    answer = download.wire.ask(
        Request("GET", download.doing, download.key, headers=headers, sink=sink)
    )
    if answer.refusal is not None and answer.status == _OUT_OF_RANGE:
        # An empty object has no first byte.
        answer = download.wire.ask(Request("GET", download.doing, download.key, sink=sink))
    if answer.refusal is not None:
        raise _refused(download, answer.refusal)
    return sink


def _range(download: Download, start: int, size_bytes: int, tag: str) -> bytes:
    """Get one range of the object that has this tag, and return its digest."""
    sink = Range(download.target.write, start, download.tell)
    headers = {"Range": f"bytes={start}-{start + size_bytes - 1}", "If-Match": tag}
    answer = download.wire.ask(
        Request("GET", download.doing, download.key, headers=headers, sink=sink)
    )
    if answer.refusal is not None:
        if answer.refusal.is_missing or answer.status in (_OUT_OF_RANGE, _PRECONDITION_FAILED):
            raise _Replaced
        raise _refused(download, answer.refusal)
    # Not every service minds If-Match.
    if answer.headers.get("etag", "") != tag or sink.came_bytes != size_bytes:
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
