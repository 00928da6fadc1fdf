"""Read the scalars in TensorBoard's event files, so that no TensorBoard is needed for a table.

The packages that read these files are TensorBoard itself (with protobuf, grpcio and numpy, more
than 100 MB), packages that need it, and some that nobody maintains. The format has been the same
since 2016: records of TFRecord, each with one message ``Event`` (tensorboard/compat/proto). Only
the fields below are read; others are skipped, as protocol buffers intend.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import PurePosixPath

from cloudjob.tracking.metrics import MetricPoint

_PREFIX = "events.out.tfevents."
# Wire types of protocol buffers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2
_TENSOR = {_FLOAT: "<f", _DOUBLE: "<d"}


def is_event_file(name: str) -> bool:
    """Whether a file of an output is one of TensorBoard's."""
    return PurePosixPath(name).name.startswith(_PREFIX)


def read(data: bytes, source: str) -> list[MetricPoint]:
    """Return the scalars of an event file; one that is still written ends where it is cut."""
    found = []
    for record in _records(data):
        try:
            found += _points(record, source)
        except (struct.error, IndexError, ValueError):
            # Checksums are not checked: a damaged record rarely parses, and the next one may.
            continue
    return found


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


def _points(event: bytes, source: str) -> list[MetricPoint]:
    wall_time, step, summaries = 0.0, 0, []
    for field, value in _fields(event):
        if field == 1 and isinstance(value, bytes):
            (wall_time,) = struct.unpack("<d", value)
        elif field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            summaries.append(value)
    found = []
    for summary in summaries:
        for field, value in _fields(summary):
            tag, scalar = _scalar(value) if field == 1 and isinstance(value, bytes) else ("", None)
            if scalar is not None:
                found.append(MetricPoint(tag, None, step, scalar, wall_time or None, source))
    return found


def _scalar(value: bytes) -> tuple[str, float | None]:
    """Return the tag and the number of a ``Summary.Value``: a float, or a tensor of one number."""
    tag, scalar = "", None
    for field, item in _fields(value):
        if field == 1 and isinstance(item, bytes):
            tag = item.decode("utf-8", "replace")
        elif field == 2 and isinstance(item, bytes) and len(item) == 4:
            (scalar,) = struct.unpack("<f", item)
        elif field == 8 and isinstance(item, bytes):
            scalar = _tensor(item)
    return tag, scalar


def _tensor(tensor: bytes) -> float | None:
    kind, content = 0, b""
    for field, value in _fields(tensor):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            content = value
    layout = _TENSOR.get(kind)
    if layout is None or len(content) != struct.calcsize(layout):
        return None
    number: float = struct.unpack(layout, content)[0]
    return number


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if wire == _VARINT:
            number, at = _varint(message, at)
            yield tag >> 3, number
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError("an unknown wire type")
        if at + length > len(message):
            raise ValueError("a field is cut off")
        yield tag >> 3, message[at : at + length]
        at += length


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
