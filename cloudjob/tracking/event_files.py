"""Reads the scalars in TensorBoard's event files without TensorBoard.

The packages that read these files are TensorBoard itself (with protobuf, grpcio and numpy, more
than 100 MB), packages that need it, and some that are no longer maintained. The format has not
changed since 2016: TFRecord records, each with one ``Event`` message (tensorboard/compat/proto).
Only the fields below are read; others are skipped, as protocol buffers intend.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from cloudjob.errors import UnreadableObject
from cloudjob.store.files import logged_if_unreadable
from cloudjob.tracking.metrics import MetricPoint
from cloudjob.tracking.outputs import OutputLocation, read_each

_PREFIX = "events.out.tfevents."
# The wire types of protocol buffers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LENGTHS = {_FIXED64: 8, _FIXED32: 4}
# The type of a tensor -> the layout of its numbers: float and double.
_TENSORS = {1: "<f", 2: "<d"}
# The values of a message, by the number and the wire type of their field.
_Fields = Mapping[tuple[int, int], list[Any]]


def is_event_file(name: str) -> bool:
    """Whether a file of an output is one of TensorBoard's."""
    return PurePosixPath(name).name.startswith(_PREFIX)


def read_all(locations: Iterable[OutputLocation]) -> list[MetricPoint]:
    """Return the scalars of all event files of outputs.

    Raises:
        StoreError: The outputs cannot be read.
    """
    points: list[MetricPoint] = []
    for location, stored in read_each(locations):
        for file in filter(lambda each: is_event_file(each.name), stored.files):
            # One that is too large does not hide the others.
            with suppress(UnreadableObject), logged_if_unreadable():
                points += read(location.store.get_bytes(file.key), file.name)
    return points


def read(data: bytes, source: str) -> list[MetricPoint]:
    """Return the scalars of an event file; a record that is not yet complete ends it."""
    points: list[MetricPoint] = []
    for record in _records(data):
        try:
            points += _points(record, source)
        except (struct.error, LookupError, ValueError):
            # Checksums are ignored: a damaged record rarely parses, and the next one may be intact.
            continue
    return points


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records: length, checksum of the length, data, checksum of the data."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length
        if end + 4 > len(data):
            return
        yield data[at + 12 : end]
        at = end + 4


def _points(event: bytes, source: str) -> Iterator[MetricPoint]:
    fields = _fields(event)
    (wall_time,) = struct.unpack("<d", _last(fields, 1, _FIXED64, bytes(8)))
    step = _last(fields, 2, _VARINT, 0)
    for summary in fields[5, _BYTES]:
        for value in _fields(summary)[1, _BYTES]:
            parts = _fields(value)
            scalar = _scalar(parts)
            if scalar is not None:
                tag = _last(parts, 1, _BYTES, b"").decode("utf-8", "replace")
                yield MetricPoint(tag, None, step, scalar, wall_time or None, source)


def _scalar(parts: _Fields) -> float | None:
    """Return the number of a ``Summary.Value``: a float, or a tensor of one number."""
    tensor = _fields(_last(parts, 8, _BYTES, b""))
    layout, data = "<f", _last(parts, 2, _FIXED32, b"")
    if not data:
        layout = _TENSORS.get(_last(tensor, 1, _VARINT, 0), "")
        # The raw content, or a packed list of floats or doubles.
        data = b"".join(_last(tensor, number, _BYTES, b"") for number in (4, 5, 6))
    if not data or len(data) != struct.calcsize(layout):
        return None
    number: float = struct.unpack(layout, data)[0]
    return number


def _last(fields: _Fields, number: int, wire: int, default: Any) -> Any:
    return (fields[number, wire] or [default])[-1]


def _fields(message: bytes) -> _Fields:
    values_of: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        value: int | bytes
        if wire == _VARINT:
            value, at = _varint(message, at)
        else:
            length, at = _varint(message, at) if wire == _BYTES else (_LENGTHS[wire], at)
            value = message[at : at + length]
            at += length
            if len(value) < length:
                raise ValueError("a field is cut off")
        values_of[tag >> 3, wire].append(value)
    return values_of


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while shift < 64:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise ValueError("a number is too long")
