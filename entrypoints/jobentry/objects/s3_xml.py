"""Parses the XML of S3 as untrusted input: lists of objects, and errors."""

from __future__ import annotations

import calendar
import time
import xml.etree.ElementTree as ElementTree
from functools import partial
from typing import Callable
from urllib.parse import unquote_plus

from jobentry.objects.base import Entry

# A thousand keys of 1,024 bytes, percent-encoded, take less.
LIMIT_BYTES = 4 * 1024 * 1024


class XmlError(ValueError):
    """The text is not XML, or not of the expected kind."""


def error(data: bytes) -> tuple[str, str]:
    """Return code and message of the error that the body of an answer reports; empty if none."""
    values = values_of(data) if data.lstrip()[:1] == b"<" else {}
    if values.get("") != "Error":
        return "", ""
    return values.get("Code", ""), values.get("Message", "")


def values_of(data: bytes) -> dict[str, str]:
    """Return the texts of the root's children by name, and the root's name under ``""``.

    Data that is not XML has no values.
    """
    try:
        root = _parsed(data)
    except XmlError:
        return {}
    return {"": _name(root), **_fields(root)}


def page(data: bytes) -> tuple[list[Entry], bool]:
    """Return the objects in an answer to ListObjects, by their keys, and whether more follow.

    Raises:
        XmlError: It is not such an answer.
    """
    root = _parsed(data)
    if _name(root) != "ListBucketResult":
        raise XmlError(f"it is <{_name(root)[:40]}>, not a list of objects")
    result = _fields(root)
    # Some servers percent-encode the keys although XML could hold them, and report that.
    is_encoded = result.get("EncodingType", "") == "url"
    decoded = partial(unquote_plus, errors="surrogateescape") if is_encoded else str
    entries = [_entry(_fields(child), decoded) for child in root if _name(child) == "Contents"]
    is_truncated = result.get("IsTruncated", "").strip().lower() == "true"
    if is_truncated and not entries:
        raise XmlError("the list is incomplete, and empty")
    return entries, is_truncated


def when(text: str) -> int:
    """Return a time from XML or from a header in nanoseconds since 1970; 0 if it is neither."""
    for length, form in ((19, "%Y-%m-%dT%H:%M:%S"), (25, "%a, %d %b %Y %H:%M:%S")):
        try:
            return calendar.timegm(time.strptime(text[:length], form)) * 10**9
        except ValueError:
            continue
    return 0


def _parsed(data: bytes) -> ElementTree.Element:
    """Return the root; a document type is refused, so no entity can be declared or expanded."""
    try:
        # S3 sends white space while it completes an upload.
        text = data.decode("utf-8-sig").strip()
        if len(data) > LIMIT_BYTES or "<!DOCTYPE" in text:
            raise XmlError("it is too long, or declares a document type")
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise XmlError(f"not XML: {error}") from error


def _name(element: ElementTree.Element) -> str:
    """Return the name without its namespace, which servers write in different ways."""
    return element.tag.rpartition("}")[2].rpartition(":")[2]


def _fields(element: ElementTree.Element) -> dict[str, str]:
    return {_name(child): child.text or "" for child in element}


def _entry(values: dict[str, str], decoded: Callable[[str], str]) -> Entry:
    try:
        tag = values.get("ETag", "").strip('"')
        modified_ns = when(values.get("LastModified", ""))
        return Entry(decoded(values["Key"]), "", int(values["Size"]), tag, modified_ns)
    except (KeyError, ValueError) as error:
        raise XmlError(f"an object in it lacks {error}") from error
