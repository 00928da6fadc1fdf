"""Patterns of ignore files: matches a path against many at once, exactly as git does.

A pattern is bytes, as names of files are: ``?`` and ``[^a]`` match one byte. The time for a path
depends neither on the length of a pattern nor on how its wildcards could match; most patterns of a
long list are never looked at.

The rules are those of git's ``wildmatch.c`` and ``dir.c``, with their oddities: ``a**/b`` matches
``ab``, and a pattern with an incomplete or unknown ``[...]`` matches nothing.
"""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Linux allows no longer paths, so a pattern that needs more bytes matches nothing.
_LONGEST_PATH_BYTES = 4096
# Patterns with wildcards are found by this many bytes that a path must contain.
_GRAM_BYTES = 3
_NOTHING = -1
_SLASH = ord("/")
_SPECIAL = re.compile(rb"[*?\[\\]")


class GlobPattern(NamedTuple):
    """One pattern, without the ``!`` of a line and without the ``/`` at its end.

    Args:
        only_folders: Whether the ``/`` at the end limits it to folders.
    """

    text: bytes
    only_folders: bool


class Globs:
    """A list of patterns, of which the last that matches decides.

    Args:
        folds_case: Whether ``A`` matches ``a``, as with git's ``core.ignoreCase``.
    """

    def __init__(self, patterns: Sequence[GlobPattern], *, folds_case: bool = False) -> None:
        self._folds_case = folds_case
        self._names: _Table = defaultdict(_none)
        self._paths: _Table = defaultdict(_none)
        self._suffixes: _Table = defaultdict(_none)
        name_globs: list[_Glob] = []
        path_globs: list[_Glob] = []
        # Of equal patterns only the last one can decide; globs are looked at from the last one on.
        last_of = {pattern: index for index, pattern in enumerate(patterns)}
        for pattern, index in sorted(last_of.items(), key=lambda item: item[1]):
            text = pattern.text.lower() if folds_case else pattern.text
            is_path = b"/" in text
            if not _SPECIAL.search(text):
                table = self._paths if is_path else self._names
                _note(table, text.removeprefix(b"/"), index, pattern.only_folders)
            elif not is_path and text[:1] == b"*" and not _SPECIAL.search(text, 1):
                _note(self._suffixes, text[1:], index, pattern.only_folders)
            else:
                text = pattern.text.removeprefix(b"/")
                if glob := _parse(text, index, pattern.only_folders, folds_case):
                    (path_globs if is_path else name_globs).append(glob)
        self._suffix_lengths = sorted({len(suffix) for suffix in self._suffixes})
        self._name_globs = _GlobIndex(name_globs)
        self._path_globs = _GlobIndex(path_globs)

    def last_match(self, path: bytes, is_folder: bool) -> int:
        """Return the position of the last pattern that matches a path; -1 if none does."""
        path = path.lower() if self._folds_case else path
        name = path[path.rfind(b"/") + 1 :]
        best = max(
            self._names[name][is_folder] if name in self._names else _NOTHING,
            self._paths[path][is_folder] if path in self._paths else _NOTHING,
        )
        for length in self._suffix_lengths:
            if length > len(name):
                break
            suffix = name[len(name) - length :]
            if suffix in self._suffixes:
                best = max(best, self._suffixes[suffix][is_folder])
        best = max(best, self._name_globs.last_match(name, is_folder))
        return max(best, self._path_globs.last_match(path, is_folder))


# The last pattern for files, and for folders, by a text without wildcards.
_Table = defaultdict[bytes, list[int]]


def _none() -> list[int]:
    return [_NOTHING, _NOTHING]


def _note(table: _Table, text: bytes, index: int, only_folders: bool) -> None:
    last = table[text]
    last[True] = max(last[True], index)
    if not only_folders:
        last[False] = max(last[False], index)


# ---- patterns with wildcards ---------------------------------------------------------------------


class _Glob(NamedTuple):
    """A pattern as the steps of an automaton: step ``n`` leads from place ``n`` to ``n + 1``.

    Args:
        position: Of the pattern in its list.
        steps: The bytes that each step accepts; None for all but ``/``.
        waits: The places at which any bytes but ``/`` may pass: a ``*``.
        waits_across: The places at which any bytes may pass: a ``**``.
        skips: The places before an optional step: the ``**/`` that matches no folder.
    """

    position: int
    only_folders: bool
    steps: list[bytes | None]
    waits: set[int]
    waits_across: set[int]
    skips: set[int]


def _parse(pattern: bytes, position: int, only_folders: bool, folds_case: bool) -> _Glob | None:
    """Read a pattern; None if it matches nothing."""
    glob = _Glob(position, only_folders, [], set(), set(), set())
    first = _SPECIAL.search(pattern)
    at, begin = 0, first.start() if first else 0
    while at < len(pattern):
        if len(glob.steps) > _LONGEST_PATH_BYTES:
            return None
        char = pattern[at : at + 1]
        if char == b"*":
            at = _add_stars(glob, pattern, at, begin)
            continue
        accepted: bytes | None
        if char == b"[":
            at, accepted = _bracket(pattern, at + 1, folds_case)
        elif char == b"\\":
            at, accepted = at + 1, pattern[at + 1 : at + 2]
        else:
            accepted = None if char == b"?" else char.lower() if folds_case else char
        if accepted == b"":
            return None
        glob.steps.append(accepted)
        at += 1
    return glob


def _add_stars(glob: _Glob, pattern: bytes, at: int, begin: int) -> int:
    """Add one or more ``*``; return where the pattern goes on.

    Args:
        begin: Where the first wildcard is: git takes it for the beginning of the pattern.
    """
    end = at
    while pattern[end : end + 1] == b"*":
        end += 1
    place, rest = len(glob.steps), pattern[end : end + 2]
    is_alone = (at == begin or pattern[at - 1 : at] == b"/") and (
        rest in (b"", b"\\/") or rest[:1] == b"/"
    )
    if end - at == 1 or not is_alone:
        glob.waits.add(place)
        return end
    if rest[:1] != b"/":
        glob.waits_across.add(place)
        return end
    # A second **/ in a row changes nothing.
    if place - 1 not in glob.skips:
        glob.waits_across.add(place)
        glob.skips.add(place)
        glob.steps.append(b"/")
    return end + 1


_LOWER, _UPPER = string.ascii_lowercase.encode(), string.ascii_uppercase.encode()
_DIGITS = string.digits.encode()
_PUNCTUATION = string.punctuation.encode()
_CLASSES = {
    b"alnum": _LOWER + _UPPER + _DIGITS,
    b"alpha": _LOWER + _UPPER,
    b"blank": b" \t",
    b"cntrl": bytes(range(32)) + b"\x7f",
    b"digit": _DIGITS,
    b"graph": _LOWER + _UPPER + _DIGITS + _PUNCTUATION,
    b"lower": _LOWER,
    b"print": _LOWER + _UPPER + _DIGITS + _PUNCTUATION + b" ",
    b"punct": _PUNCTUATION,
    b"space": b" \t\n\r",
    b"upper": _UPPER,
    b"xdigit": string.hexdigits.encode(),
}
_NONE = (0, b"")


def _bracket(pattern: bytes, at: int, folds_case: bool) -> tuple[int, bytes]:
    """Read a ``[...]``; return where its ``]`` is, and the bytes that it accepts.

    The bytes are empty if nothing matches: the set is incomplete, or names an unknown class.
    """
    is_negated = pattern[at : at + 1] in (b"!", b"^")
    at += is_negated
    accepted: set[int] = set()
    first, close = at, 0
    while at == first or pattern[at : at + 1] != b"]":
        close = close if close >= at + 2 else pattern.find(b"]", at + 1)
        if close < 0 or at >= len(pattern):
            return _NONE
        if pattern[at : at + 2] == b"[:" and at + 2 < close and pattern[close - 1] == ord(":"):
            characters = _CLASSES.get(pattern[at + 2 : close - 1], b"")
            if not characters:
                return _NONE
            at = close + 1
        else:
            # Of [z-a], git accepts the z.
            at, begin, characters = _range(pattern, at)
            accepted.add(begin)
        # git folds the case of ranges and classes, and not of single characters.
        accepted.update(characters, characters.lower() if folds_case else b"")
    selected = (byte for byte in range(1, 256) if (byte in accepted) != is_negated)
    return at, bytes(byte for byte in selected if byte != _SLASH)


def _range(pattern: bytes, at: int) -> tuple[int, int, bytes]:
    """Read a character or a range; return where the pattern goes on, the first, and the range."""
    at, begin = _character(pattern, at)
    if pattern[at : at + 1] != b"-" or pattern[at + 1 : at + 2] in (b"", b"]"):
        return at, begin, b""
    at, end = _character(pattern, at + 1)
    return at, begin, bytes(range(begin, end + 1))


def _character(pattern: bytes, at: int) -> tuple[int, int]:
    at += pattern[at : at + 1] == b"\\"
    return at + 1, pattern[at] if at < len(pattern) else 0


class _GlobIndex:
    """Finds the patterns that could match a path by three bytes that both contain."""

    def __init__(self, globs: Iterable[_Glob]) -> None:
        by_gram: defaultdict[bytes, list[_Glob]] = defaultdict(list)
        others: list[_Glob] = []
        for glob in globs:
            breaks = {*glob.waits, *glob.waits_across, *(place + 1 for place in glob.skips)}
            grams = _grams(glob.steps, breaks)
            # The rarest, so that few patterns are tried for a path that contains it.
            rarest = min(grams, key=lambda gram: len(by_gram.get(gram, ())), default=None)
            (others if rarest is None else by_gram[rarest]).append(glob)
        self._by_gram: dict[bytes, list[_Glob]] = dict(by_gram)
        self._automata: dict[bytes, _Automaton] = {}
        self._others = _Automaton(others) if others else None

    def last_match(self, text: bytes, is_folder: bool) -> int:
        """Return the position of the last pattern that matches; -1 if none does."""
        best = self._others.last_match(text, is_folder) if self._others else _NOTHING
        if self._by_gram:
            last = len(text) - _GRAM_BYTES + 1
            grams = {text[at : at + _GRAM_BYTES] for at in range(last)}
            for gram in self._by_gram.keys() & grams:
                if gram not in self._automata:
                    self._automata[gram] = _Automaton(self._by_gram[gram])
                best = max(best, self._automata[gram].last_match(text, is_folder))
        return best


def _grams(steps: Sequence[bytes | None], breaks: set[int]) -> Iterator[bytes]:
    """Yield every three bytes that follow each other in each path that a pattern matches."""
    run = b""
    for place, accepted in enumerate(steps):
        if place in breaks:
            run = b""
        is_literal = accepted is not None and len(accepted) == 1
        run = run[-_GRAM_BYTES + 1 :] + accepted if accepted and is_literal else b""
        if len(run) == _GRAM_BYTES:
            yield run


class _Automaton:
    """Matches a path against several patterns in one pass: a bit for each place of each pattern.

    Args:
        globs: In their order in the list.
    """

    def __init__(self, globs: Sequence[_Glob]) -> None:
        size = sum(len(glob.steps) + 1 for glob in globs)
        starts, waits, across, skips, any_byte = (_Bits(size) for _ in range(5))
        ends = _Bits(size), _Bits(size)
        accepted: defaultdict[int, _Bits] = defaultdict(lambda: _Bits(size))
        self._index: dict[int, int] = {}
        begin = 0
        for glob in globs:
            end = begin + len(glob.steps)
            starts.add(begin)
            for bits, places in (
                (waits, glob.waits), (across, glob.waits_across), (skips, glob.skips),
            ):  # fmt: skip
                for place in places:
                    bits.add(begin + place)
            for place, characters in enumerate(glob.steps, begin + 1):
                if characters is None:
                    any_byte.add(place)
                for byte in characters or b"":
                    accepted[byte].add(place)
            self._index[end] = glob.position
            ends[True].add(end)
            if not glob.only_folders:
                ends[False].add(end)
            begin = end + 1
        self._skips = skips.number()
        self._start = self._skipped(starts.number())
        self._across = across.number()
        self._waits = waits.number() | self._across
        self._any = any_byte.number()
        self._ends = ends[False].number(), ends[True].number()
        self._accepted = {byte: bits.number() | self._any for byte, bits in accepted.items()}
        # No wildcard but ** matches a slash.
        self._accepted[_SLASH] = self._accepted.get(_SLASH, 0) & ~self._any

    def last_match(self, text: bytes, is_folder: bool) -> int:
        """Return the position of the last pattern that matches; -1 if none does."""
        reached = self._start
        for byte in text:
            waits = self._waits if byte != _SLASH else self._across
            arrived = (reached << 1) & self._accepted.get(byte, self._any)
            reached = self._skipped(arrived) | (reached & waits)
            if not reached:
                return _NOTHING
        matched = reached & self._ends[is_folder]
        return self._index[matched.bit_length() - 1] if matched else _NOTHING

    def _skipped(self, arrived: int) -> int:
        return arrived | ((arrived & self._skips) << 1) if self._skips else arrived


class _Bits:
    """A number whose bits are set one by one."""

    def __init__(self, size: int) -> None:
        self._bytes = bytearray(size // 8 + 1)

    def add(self, bit: int) -> None:
        self._bytes[bit >> 3] |= 1 << (bit & 7)

    def number(self) -> int:
        return int.from_bytes(self._bytes, "little")
