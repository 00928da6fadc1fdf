"""Conversion between paths and ``file://`` URIs, and checks for text that JSON cannot hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote_from_bytes, unquote_to_bytes


def file_path(uri: str) -> str:
    """Return the path of a ``file://`` URI; empty for every other URI."""
    if not uri.startswith("file://"):
        return ""
    path = uri.removeprefix("file://").removeprefix("localhost")
    return os.fsdecode(unquote_to_bytes(os.fsencode(path))).rstrip("/")


def file_uri(path: str, kept: str = "") -> str:
    """Return the URI of a path, in which ``~`` and the characters ``kept`` are as they were."""
    return "file://" + quote_from_bytes(os.fsencode(path), safe=f"/~{kept}")


def is_utf8(text: str) -> bool:
    """Whether JSON can hold a text; a surrogate represents a byte that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def argument_problems(argv: Sequence[str], why: str) -> Iterator[str]:
    """Yield which arguments of a job's command are not UTF-8.

    Args:
        why: The end of the message, which says what cannot hold them.
    """
    for index, argument in enumerate(argv):
        if not is_utf8(argument):
            key = f"args[{index - 1}]" if index else "script"
            yield f"{key}: contains bytes that are not UTF-8, which {why}"


def undeclared_variables(
    variables: Mapping[str, str], secret_names: Sequence[str]
) -> dict[str, str]:
    """Return the variables that no configuration may hold: secrets, and values JSON cannot hold."""
    return {
        name: value
        for name, value in variables.items()
        if name in secret_names or not is_utf8(value)
    }
