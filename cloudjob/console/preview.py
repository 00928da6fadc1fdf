"""What the console shows of an output file: text, a table or an image, never HTML or a script."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from cloudjob.console.text import displayable

# What is shown of a text, of a table, and the largest image.
MAX_TEXT_BYTES, MAX_ROWS, MAX_COLUMNS = 256 * 1024, 200, 30
MAX_IMAGE_BYTES = 8_000_000
_MAX_CELL = 200
_MAX_INDENTED = 4 * MAX_TEXT_BYTES
# How the files of images begin, with their media types. SVG is missing, as it may hold scripts.
_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_RIFF, _WEBP = b"RIFF", b"WEBP"


class FileKind(Enum):
    """How a file is shown."""

    TEXT = "text"
    TABLE = "table"
    IMAGE = "image"
    NOTHING = "nothing"


class FilePreview(NamedTuple):
    """What is shown of a file.

    Args:
        text: The text, or why there is nothing to show.
        rows: The cells of a table, its header first.
        is_cut: Whether the file has more than is shown.
    """

    kind: FileKind
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    is_cut: bool = False


def media_type(head: bytes) -> str:
    """Return the media type of an image by its first bytes; empty if it is none that is shown."""
    if head.startswith(_RIFF) and head[8:12] == _WEBP:
        return "image/webp"
    return next((kind for start, kind in _IMAGES if head.startswith(start)), "")


def preview(name: str, head: bytes, size_bytes: int) -> FilePreview:
    """Return what is shown of a file.

    Args:
        head: At least its first ``MAX_TEXT_BYTES``, or all of it.
        size_bytes: The size of the whole file.
    """
    if media_type(head):
        if size_bytes > MAX_IMAGE_BYTES:
            return FilePreview(FileKind.NOTHING, "The image is too large to be shown.")
        return FilePreview(FileKind.IMAGE)
    data = head[:MAX_TEXT_BYTES]
    is_cut = size_bytes > len(data)
    if b"\0" in data:
        return FilePreview(FileKind.NOTHING, "It has no preview.")
    text = data.decode("utf-8", "replace")
    ending = name.lower().rpartition(".")[2]
    if ending in ("csv", "tsv"):
        return _table(text, "," if ending == "csv" else "\t", is_cut=is_cut)
    if ending == "json" and not is_cut:
        text = _indented(text)
    return FilePreview(FileKind.TEXT, displayable(text), is_cut=is_cut)


def _table(text: str, delimiter: str, *, is_cut: bool) -> FilePreview:
    lines = text.splitlines()
    # The last line of a part may be incomplete.
    whole = lines[:-1] if is_cut else lines
    try:
        rows = list(csv.reader(io.StringIO("\n".join(whole[: MAX_ROWS + 2])), delimiter=delimiter))
    except csv.Error:
        return FilePreview(FileKind.TEXT, displayable(text), is_cut=is_cut)
    cells = [
        [displayable(cell[:_MAX_CELL]) for cell in row[:MAX_COLUMNS]]
        for row in rows[: MAX_ROWS + 1]
    ]
    is_wide = any(len(row) > MAX_COLUMNS for row in rows)
    is_cut = is_cut or is_wide or len(rows) > len(cells)
    return FilePreview(FileKind.TABLE, rows=cells, is_cut=is_cut)


def _indented(text: str) -> str:
    """Return JSON with a line for each value, unless it is none or its spaces make it large."""
    encoder = json.JSONEncoder(indent=2, ensure_ascii=False)
    pieces, size = list[str](), 0
    try:
        for piece in encoder.iterencode(json.loads(text)):
            size += len(piece)
            if size > _MAX_INDENTED:
                return text
            pieces.append(piece)
    except (ValueError, RecursionError):
        return text
    return "".join(pieces)
