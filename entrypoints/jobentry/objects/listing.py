"""What S3 says in XML, read without trust: no entities, no depth, no end that never comes."""

from __future__ import annotations

import calendar
import time
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.parsers import expat

# Deeper than anything that S3 says.
_DEEPEST = 8


class XmlError(Exception):
    """The text is no XML, or of a kind that nobody sends in good faith."""


class Found(NamedTuple):
    """One object of a list."""

    key: str
    size_bytes: int
    tag: str
    modified_ns: int


class Page(NamedTuple):
    """A part of a list.

    Args:
        following: Where the next part begins; empty when this is the last.
    """

    found: tuple[Found, ...]
    following: str


def texts(data: bytes) -> list[tuple[str, str]]:
    """Return the text of every element that has any, behind its path (``Error/Code``).

    An element that begins a new group stands there too, with an empty text.

    Raises:
        XmlError: It cannot be read, or it declares things.
    """
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        raise XmlError(f"no XML: {error}") from error
    return reader.found


class _Reader:
    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._path: list[str] = []
        self._text: list[str] = []

    def refuse(self, *_facts: object) -> None:
        raise XmlError("it declares a document type")

    def start(self, name: str, _attributes: object) -> None:
        self._path.append(name.rpartition(":")[2])
        if len(self._path) > _DEEPEST:
            raise XmlError("it is too deep")
        self._text.clear()
        self.found.append(("/".join(self._path), ""))

    def end(self, _name: str) -> None:
        text = "".join(self._text)
        if text:
            path = "/".join(self._path)
            if self.found and self.found[-1] == (path, ""):
                self.found.pop()
            self.found.append((path, text))
        self._text.clear()
        self._path.pop()

    def text(self, data: str) -> None:
        self._text.append(data)


def fault(data: bytes) -> tuple[str, str]:
    """Return the code and the message of an error; both empty when it is none."""
    values = values_of(data)
    return values.get("Error/Code", ""), values.get("Error/Message", "")


def values_of(data: bytes) -> dict[str, str]:
    """Return the texts by their paths; empty for what cannot be read."""
    try:
        return dict(texts(data)) if data.lstrip()[:1] == b"<" else {}
    except XmlError:
        return {}


def page(data: bytes) -> Page:
    """Return what an answer to ListObjects or ListObjectsV2 says.

    Raises:
        XmlError: It is no such answer.
    """
    found: list[dict[str, str]] = []
    result: dict[str, str] = {}
    for path, text in texts(data):
        first, _, rest = path.partition("/")
        if first != "ListBucketResult":
            raise XmlError(f"it is a {first[:40]!r}, and no list")
        name, _, field = rest.partition("/")
        if name == "Contents" and not field:
            found.append({})
        elif name == "Contents":
            found[-1][field] = text
        else:
            result[name] = text
    is_encoded = result.get("EncodingType", "") == "url"
    objects = tuple(_found(values, is_encoded=is_encoded) for values in found)
    return Page(objects, _following(result, objects, is_encoded=is_encoded))


def _following(result: dict[str, str], objects: tuple[Found, ...], *, is_encoded: bool) -> str:
    if result.get("IsTruncated", "").strip().lower() != "true":
        return ""
    if "NextContinuationToken" in result:
        return result["NextContinuationToken"]
    if "NextMarker" in result:
        return _decoded(result["NextMarker"], is_encoded=is_encoded)
    # Version 1 names no marker where nothing is grouped: it is the last key.
    if not objects:
        raise XmlError("it goes on, and says nothing of where")
    return objects[-1].key


def _found(values: dict[str, str], *, is_encoded: bool) -> Found:
    try:
        return Found(
            key=_decoded(values["Key"], is_encoded=is_encoded),
            size_bytes=int(values["Size"]),
            tag=values.get("ETag", "").strip('"'),
            modified_ns=when(values.get("LastModified", "")),
        )
    except (KeyError, ValueError) as error:
        raise XmlError(f"an object in it lacks {error}") from error


def _decoded(text: str, *, is_encoded: bool) -> str:
    return unquote_plus(text, errors="surrogateescape") if is_encoded else text


def when(text: str) -> int:
    """Return a time of XML or of a header in nanoseconds since 1970; 0 for what is none."""
    for form in ("%Y-%m-%dT%H:%M:%S", "%a, %d %b %Y %H:%M:%S"):
        for end in (text[:19], text[:25]):
            try:
                return calendar.timegm(time.strptime(end, form)) * 10**9
            except ValueError:
                continue
    return 0
