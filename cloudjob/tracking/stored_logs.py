"""Reads the logs that nodes have stored beside the exit record."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

from cloudjob.backends.follow import Piece, whole_lines
from cloudjob.errors import ObjectMissing
from cloudjob.store.base import ObjectStore
from jobentry.contract import stored_log
from jobentry.contract.paths import JobPaths
from jobentry.contract.stored_log import Chunk

_LOST = (
    b"cloudjob: a part of this log is missing: it was not stored, or is older than what is kept\n"
)


def find(store: ObjectStore, job: str, nodes: Collection[int]) -> list[Chunk]:
    """Return the stored chunks of the logs of ``nodes``, in the order of the logs.

    Raises:
        StoreError: The store cannot be read.
    """
    folder = JobPaths(job).records
    keys = store.list(folder + stored_log.PREFIX)
    chunks = (stored_log.read_name(key.removeprefix(folder)) for key in keys)
    return sorted(chunk for chunk in chunks if chunk and chunk.node in nodes)


def read(store: ObjectStore, job: str, chunks: Collection[Chunk]) -> Iterator[Piece]:
    """Yield the whole lines of the logs, node by node, attempt by attempt.

    Raises:
        StoreError: The store cannot be read.
    """
    for (node, _), group in groupby(chunks, lambda chunk: chunk[:2]):
        for lines in whole_lines(_bytes(store, JobPaths(job).records, group)):
            yield node, lines


def _bytes(store: ObjectStore, folder: str, chunks: Iterator[Chunk]) -> Iterator[bytes]:
    number = 0
    for chunk in chunks:
        if chunk.number != number:
            yield _LOST
        number = chunk.number + 1
        try:
            data = store.get_bytes(folder + chunk.name)
        except ObjectMissing:
            # The node has deleted it since the list was made.
            yield _LOST
            continue
        yield from stored_log.unpack(data)
