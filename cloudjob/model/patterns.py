"""Regular expressions that users, and strangers in a shared store, write.

RE2 searches a text in time linear in its length, whatever the expression; Python's ``re`` can take
years for one line. Lines are searched as UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from cloudjob.model.text import given

# An expression takes up to 2 ns for each byte of a text and each of its own steps.
MAX_STEPS = 4000
_MAX_CHARACTERS = 4000
# Finding every match in one line could otherwise take quadratic time.
_MAX_MATCHES = 100
# What would not mean the same in several lines as in one; a ^ is allowed in [^…].
_OF_ONE_LINE = re.compile(r"\\[AzQ]|\(\?[a-zA-Z]*-|(?<![\[\\])\^")
# No part of such an expression matches a newline, and all of it means the same in several lines.
_WITHIN_LINES = re.compile(
    r"(?:[^\x00-\x1f\\[(^]|\\[dwSbB.*+?|(){}\[\]/-]|\[(?![:^])|\((?!\?)|\(\?(?:i\)|:|P<))*"
)
# Python reads it as {0,3}, RE2 as these characters.
_OPEN_REPEAT = re.compile(r"(?<!\\)\{,\d+\}")
_UNLIMITED = re.compile(
    r"invalid perl operator: \(\?(?:[=!<>(]|P$)"
    r"|bad repetition operator|invalid escape sequence: \\[1-9]"
)


class Value(NamedTuple):
    """What one match of an expression selects.

    Args:
        text: The group ``value``, or else the first group.
        step: The group ``step``; None if there is none.
    """

    text: bytes | None
    step: bytes | None


class Pattern:
    """A regular expression in RE2's syntax, which is that of Python without look-around.

    Args:
        text: The expression; bytes that are not UTF-8 are escaped as by ``os.fsdecode``.
        ignores_case: Whether it matches small and capital letters alike.

    Raises:
        ValueError: It cannot be used; the message begins with ``is not …`` or the like.
    """

    def __init__(self, text: str, *, ignores_case: bool = False) -> None:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(
                f"is too long (given {len(text)} characters; at most {_MAX_CHARACTERS})"
            )
        if _OPEN_REPEAT.search(text):
            raise ValueError(
                f"has a repeat without a beginning (given {given(text)}; write {{0,N}})"
            )
        self._regexp, self._is_utf8 = _compiled(text, ignores_case=ignores_case)
        self.groups: int = self._regexp.groups
        self.steps: int = self._regexp.programsize
        if self.steps > MAX_STEPS:
            raise ValueError(f"is too large (given {given(text)}; smaller repeats {{M,N}} help)")
        names = self._regexp.groupindex
        self._value, self._step = names.get(b"value", 1), names.get(b"step")
        in_lines = _in_lines(text) if self._is_utf8 else ""
        # At the start of a line, it also allows the mark of a rank.
        self._is_exact_in_lines = not text.startswith("^")
        compiled = partial(_compiled, ignores_case=ignores_case)
        self._in_lines = compiled(in_lines, never_nl=True)[0] if in_lines else None
        runs = _runs(text) if self._is_utf8 else ""
        self._runs = compiled(runs)[0] if runs else None

    def search(self, line: bytes) -> bool:
        """Whether a line contains a match."""
        return self._regexp.search(self._readable(line)) is not None

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the first hundred matches in a text begin and end, without empty ones."""
        data = text.encode("utf-8", "replace")
        for match in islice(self._regexp.finditer(data), _MAX_MATCHES):
            start, end = match.span()
            if start < end:
                at = len(data[:start].decode("utf-8", "ignore"))
                yield at, at + len(data[start:end].decode("utf-8", "ignore"))

    def line_starts(self, lines: bytes) -> Iterator[int] | None:
        """Return where those of many lines start that may match, which is fast if few do.

        Args:
            lines: UTF-8 lines; each may begin with the mark of its rank.

        Returns:
            None if each line must be searched on its own.
        """
        return None if self._in_lines is None else _line_starts(lines, self._in_lines)

    def may_match(self, lines: bytes) -> bool:
        """Whether one of many lines may match; each may begin with the mark of its rank."""
        starts = self.line_starts(self._readable(lines))
        return starts is None or next(starts, None) is not None

    def matching_lines(self, lines: bytes) -> Iterator[int]:
        """Yield the numbers, from 0, of the lines that match; each ends with a newline."""
        text = self._readable(lines)
        if self._runs is None:
            search = self._regexp.search
            yield from (n for n, line in enumerate(text.split(b"\n")[:-1]) if search(line))
            return
        number = at = 0
        for match in self._runs.finditer(text):
            start, end = match.span()
            number += text.count(b"\n", at, start)
            count = text.count(b"\n", start, end)
            yield from range(number, number + count)
            number, at = number + count, end

    def values(self, line: bytes) -> Iterator[Value]:
        """Yield what the matches in a line select, of the first hundred matches."""
        return map(
            self._selected, islice(self._regexp.finditer(self._readable(line)), _MAX_MATCHES)
        )

    def values_in_lines(self, lines: bytes) -> list[tuple[int, Value]] | None:
        """Return what ``values`` yields for each of many lines, with the number of the line.

        Args:
            lines: UTF-8 lines without marks of ranks.

        Returns:
            None if each line must be searched on its own.
        """
        if self._in_lines is None or not self._is_exact_in_lines:
            return None
        values: list[tuple[int, Value]] = []
        number = at = matches = 0
        for match in self._in_lines.finditer(lines):
            start = match.start()
            newlines = lines.count(b"\n", at, start)
            matches = 1 if newlines else matches + 1
            if matches > _MAX_MATCHES:
                return None
            number, at = number + newlines, start
            values.append((number, self._selected(match)))
        return values

    def _selected(self, match: Any) -> Value:
        step = None if self._step is None else match[self._step]
        return Value(match[self._value] or match[1], step)

    def _readable(self, text: bytes) -> bytes:
        """Return a text that RE2 can read: it stops at bytes that are not UTF-8."""
        if text.isascii() or not self._is_utf8:
            return text
        return text.decode("utf-8", "replace").encode()


def _line_starts(lines: bytes, regexp: Any) -> Iterator[int]:
    at = 0
    while at < len(lines) and (match := regexp.search(lines, at)):
        start = lines.rfind(b"\n", 0, match.start()) + 1
        # An empty match can be at the end of everything, where no line begins.
        if start >= len(lines):
            return
        yield start
        at = lines.find(b"\n", start) + 1 or len(lines)


def _in_lines(text: str) -> str:
    """Return an expression that matches many lines wherever ``text`` matches one; else empty."""
    rest = text.removeprefix("^")
    if _OF_ONE_LINE.search(rest) or (rest != text and "|" in rest):
        return ""
    return f"(?m)^(?:\\[[0-9]+\\] )?(?:{rest})" if rest != text else f"(?m)(?:{rest})"


def _runs(text: str) -> str:
    """Return an expression that matches as many lines as follow each other, else empty.

    It is fast if most lines match.
    """
    rest = text.removeprefix("^")
    if not _WITHIN_LINES.fullmatch(rest) or (rest != text and "|" in rest):
        return ""
    return rf"(?m)(?:^{'.*' if rest == text else ''}(?:{rest}).*\n)+"


def _compiled(text: str, *, ignores_case: bool = False, never_nl: bool = False) -> tuple[Any, bool]:
    """Return the expression for RE2, and whether it is UTF-8; else it matches bytes.

    Args:
        ignores_case: It matches small and capital letters alike.
        never_nl: No part of it matches a newline.
    """
    try:
        import re2
    except ImportError:
        raise ValueError("needs the package google-re2, which is not installed here") from None
    data = text.encode("utf-8", "surrogateescape")
    options = re2.Options()
    options.log_errors = False
    options.never_nl = never_nl
    options.case_sensitive = not ignores_case
    is_utf8 = not any("\udc80" <= character <= "\udcff" for character in text)
    if not is_utf8:
        options.encoding = re2.Options.Encoding.LATIN1
    try:
        return re2.compile(data, options), is_utf8
    except re2.error as error:
        reason = error.args[0]
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    lacks = "; look-around, back references and possessive repeats would take unlimited time"
    raise ValueError(
        f"is not a regular expression of RE2: {reason} (given {given(text)}"
        f"{lacks if _UNLIMITED.match(reason) else ''})"
    )
