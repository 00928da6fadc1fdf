"""Gets an object: a small one in one request, a large one in ranges at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cloudjob.errors import StoreError
from cloudjob.store.base import Tell
from cloudjob.store.parallel import in_parallel
from cloudjob.store.s3 import local
from cloudjob.store.s3.local import Part, Range
from cloudjob.store.s3.refusals import Refusal
from cloudjob.store.s3.upload import CRC32_HEADER, PART_BYTES_HEADER
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


class Download(NamedTuple):
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
    proof = _proof(download, head.answer, size_bytes)
    step = proof.step_bytes
    # The first part goes on where the first answer ends; one that is shorter comes once more.
    goes_on = head.came_bytes <= step
    if not goes_on:
        download.tell(-head.came_bytes)
    tag = head.answer.headers.get("etag", "")

    def digest(start: int) -> bytes:
        begun = proof.kind() if proof.kind else None
        end = min(start + step, size_bytes)
        if start == 0 and goes_on:
            start = head.came_bytes
            if begun is not None:
                begun.update(download.target.read(0, start))
        return _range(download, start, end, tag, begun)

    digests = in_parallel(
        digest, range(0, size_bytes, step), at_once=_AT_ONCE, abort=download.wire.abort
    )
    is_whole = proof.holds(digests)
    if not is_whole:
        download.tell(-size_bytes)
    return size_bytes if is_whole else None


def _first(download: Download) -> Range:
    """Get the first range, which is often all there is."""
    sink = Range(download.target.write, 0, download.tell, local.md5())
    count = min(_FIRST_BYTES, download.part_bytes)
    headers = {"range": f"bytes=0-{count - 1}"}
    answer = download.wire.ask(
        Request("GET", download.doing, download.key, headers=headers, sink=sink)
    )
    if answer.refusal is not None and answer.status == _OUT_OF_RANGE:
        # An empty object has no first byte.
        answer = download.wire.ask(Request("GET", download.doing, download.key, sink=sink))
    if answer.refusal is not None:
        raise _refused(download, answer.refusal)
    return sink


def _range(download: Download, start: int, end: int, tag: str, begun: local.Digest | None) -> bytes:
    """Get one range of the object that has this tag, and return its digest.

    Args:
        begun: The digest of what has come of it already.
    """
    if start == end:
        return begun.digest() if begun else b""
    sink = Range(download.target.write, start, download.tell, begun)
    headers = {"range": f"bytes={start}-{end - 1}", "if-match": tag}
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
    return sink.digest


# -- what proves that the bytes are the object's ----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Proof:
    """How an object is got so that its bytes can be proven.

    Args:
        step_bytes: How long its ranges are.
        kind: What digest each of them needs; None when they need none.
        holds: Whether these digests are those of the object.
    """

    step_bytes: int
    kind: local.Kind | None
    holds: Callable[[list[bytes]], bool]


def _proof(download: Download, answer: Answer, size_bytes: int) -> _Proof:
    """Return the cheapest proof that there is for an object."""
    part_bytes = _part_bytes(answer, size_bytes)
    crc32 = _crc32(download, answer) if part_bytes else ""
    if crc32:
        return _Proof(
            part_bytes, local.Crc32, lambda digests: local.combined_crc32(digests) == crc32
        )
    if part_bytes and answer.is_digest_tag:
        return _Proof(
            part_bytes, local.md5, lambda digests: local.combined_etag(digests) == answer.etag
        )
    if not local.is_md5(answer):
        # Nothing says what its bytes should be; there are as many as there should be.
        return _Proof(download.part_bytes, None, lambda _: True)
    if size_bytes <= download.part_bytes:
        return _Proof(
            download.part_bytes, local.md5, lambda digests: digests[0].hex() == answer.etag
        )
    # It was put as one piece: the digest of its ranges is no digest of it.
    whole = Part(download.target, 1, 0, size_bytes)
    return _Proof(download.part_bytes, None, lambda _: whole.digest(local.md5).hex() == answer.etag)


def _crc32(download: Download, answer: Answer) -> str:
    """Return what the service says of the object with this tag; empty when it says nothing.

    It says nothing along with a range, so it is asked once more.
    """
    if not download.wire.has_checksums:
        return ""
    headers = {"x-amz-checksum-mode": "ENABLED"}
    asked = Request("HEAD", download.doing, download.key, headers=headers)
    said = download.wire.ask(asked)
    if said.refusal is not None or said.etag != answer.etag:
        return ""
    found = said.headers.get(CRC32_HEADER, "")
    return found if found.endswith(f"-{answer.etag.rpartition('-')[2]}") else ""


def _refused(download: Download, refusal: Refusal) -> StoreError:
    return download.wire.refused(download.doing, refusal)


def _part_bytes(answer: Answer, size_bytes: int) -> int:
    """Return how long the parts were that the object was put in; 0 when nobody knows."""
    said = answer.headers.get(PART_BYTES_HEADER, "")
    part_bytes = int(said) if said.isascii() and said.isdecimal() else 0
    if not part_bytes:
        return 0
    count = -(-size_bytes // part_bytes)
    return part_bytes if answer.etag.endswith(f"-{count}") else 0
