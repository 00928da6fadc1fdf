"""Conversion of paths to URIs, and a test for text that JSON can hold."""

from __future__ import annotations

import os
from urllib.parse import quote_from_bytes, unquote_to_bytes


def file_path(uri: str) -> str:
    """Return the path of a ``file://`` URI; empty for every other URI."""
    if not uri.startswith("file://"):
        return ""
    path = uri.removeprefix("file://").removeprefix("localhost")
    return os.fsdecode(unquote_to_bytes(os.fsencode(path))).rstrip("/")


def file_uri(path: str) -> str:
    """Return the URI of a folder; a path that begins with ``~`` is left as it is."""
    return "file://" + quote_from_bytes(os.fsencode(path), safe="/~")


def is_utf8(text: str) -> bool:
    """Whether JSON can hold a text; a surrogate stands for a byte that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
