"""Files of variables, one ``NAME=VALUE`` per line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloudjob.config.files import read_bytes, reason
from cloudjob.errors import UsageError
from cloudjob.model.rules import VARIABLE_RULE
from cloudjob.model.text import given, one_line


def read_env_file(path: str | Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file of ``NAME=VALUE`` lines, values taken literally.

    Text in single quotes is literal; in double quotes a backslash before n, r, t, ", $ or backslash
    is an escape. Quoted values may span lines, and keep their line ends.
    ``NAME`` alone takes its value from ``environ`` and is left out if it is not set there.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        data = read_bytes(Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"reading env file: {one_line(str(path))}: {reason(error)}", hint="is the path right?"
        ) from error
    # Values are bytes to the job, so bytes that are not UTF-8 become surrogate escapes.
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    lines = text.split("\n")
    variables: dict[str, str] = {}
    number = 0
    while number < len(lines):
        first = number
        try:
            name, value, number = _assignment(lines, first)
        except ValueError as error:
            raise UsageError(
                f"reading env file: {one_line(str(path))}:{first + 1}: {error}",
                hint="each line is NAME=VALUE, NAME, or a comment that begins with #",
            ) from None
        if value is None:
            value = environ.get(name)
        if name and value is not None:
            variables[name] = value
    return variables


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "$": "$", "\\": "\\"}


def _assignment(lines: Sequence[str], number: int) -> tuple[str, str | None, int]:
    """Return the name and value that begin on a line, and the number of the line after them."""
    line = lines[number].removesuffix("\r").lstrip(" \t")
    if not line or line.startswith("#"):
        return "", None, number + 1
    name, equals, rest = re.sub(r"^export[ \t]+", "", line).partition("=")
    if not equals:
        name = name.rstrip(" \t")
    if not re.fullmatch(VARIABLE_RULE, name):
        raise ValueError(f"{given(name)} is not a variable's name")
    if not equals or rest[:1] not in ("'", '"'):
        return name, rest if equals else None, number + 1
    rest = lines[number].partition("=")[2]
    for end in range(number + 1, len(lines) + 1):
        last = rest[1:] if end == number + 1 else lines[end - 1]
        # Only a line with a quote can close one; trying every line takes quadratic time.
        value = _unquoted("\n".join([rest, *lines[number + 1 : end]])) if rest[0] in last else None
        if value is not None:
            return name, value, end
    raise ValueError(f"the quote {rest[0]} is never closed")


def _unquoted(text: str) -> str | None:
    """Return the quoted text at the start; None if the quotes are not closed."""
    rule = r"'([^']*)'" if text[0] == "'" else r'"((?:[^"\\]|\\.)*)"'
    match = re.match(rule, text, re.DOTALL)
    if not match:
        return None
    if text[match.end() :].removesuffix("\r").strip(" \t"):
        raise ValueError(f"text after the closing quote {text[0]}")
    if text[0] == "'":
        return match[1]
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), match[1], flags=re.DOTALL)
