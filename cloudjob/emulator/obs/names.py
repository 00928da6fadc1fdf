"""Translates names of objects that SeaweedFS would change or refuse.

SeaweedFS stores objects as files: it drops the empty parts of ``a//b``, treats a backslash as a
slash, and refuses parts that are ``.`` or ``..`` or longer than 255 bytes. OBS allows such names,
so clients see them unchanged. The stored names contain characters of a private area of Unicode,
which clients' names must not contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

# Placeholders: for an empty part, a backslash, a cut in a long part, and a dot of ``.`` or ``..``.
_EMPTY, _BACKSLASH, _CUT, _DOT = "\ue000", "\ue001", "\ue002", "\ue003"
_PART_BYTES = 200
_SPECIAL = {"": _EMPTY, ".": _DOT, "..": _DOT * 2}
# Parameters of a list request that contain names of objects.
_PARAMETERS = ("prefix", "marker", "start-after", "continuation-token", "key-marker")
# In percent-encoded lists, the slash may be encoded, too.
_NAMES_IN_ANSWERS = (
    (_CUT + "/", ""),
    (_EMPTY, ""),
    (_BACKSLASH, "\\"),
    (_DOT, "."),
)


def stored_name(key: str, *, is_prefix: bool = False) -> str:
    """Return the name of an object in SeaweedFS.

    Args:
        is_prefix: Whether ``key`` is a prefix, whose last part may be incomplete.
    """
    *folders, last = key.split("/")
    parts = [_part(part) for part in folders]
    # An empty last part marks a folder, which SeaweedFS has as well.
    return "/".join([*parts, _cut_part(last) if is_prefix or not last else _part(last)])


def stored_parameter(name: str, value: str) -> str:
    """Return the value of a parameter with the names of SeaweedFS."""
    return stored_name(value, is_prefix=True) if name in _PARAMETERS else value


def is_reserved(key: str) -> bool:
    """Whether a name contains a character that stands for something else in stored names."""
    return any(mark in key for mark in (_EMPTY, _BACKSLASH, _CUT, _DOT))


def client_names(body: bytes) -> bytes:
    """Return the body of a response with the names that clients use."""
    for name, original in _NAMES_IN_ANSWERS:
        for spelling in (name, quote(name, safe="/"), quote(name, safe="")):
            body = body.replace(spelling.encode(), _spelled_like(spelling, name, original).encode())
    return body


def _spelled_like(spelling: str, name: str, original: str) -> str:
    return original if spelling == name else quote(original, safe="")


def _part(part: str) -> str:
    return _SPECIAL.get(part) or _cut_part(part)


def _cut_part(part: str) -> str:
    return f"{_CUT}/".join(_short_parts(part.replace("\\", _BACKSLASH)))


def _short_parts(part: str) -> Iterator[str]:
    first, size = 0, 0
    for index, letter in enumerate(part):
        size += len(letter.encode("utf-8", "surrogateescape"))
        if size > _PART_BYTES:
            yield part[first:index]
            first, size = index, len(letter.encode("utf-8", "surrogateescape"))
    yield part[first:]
