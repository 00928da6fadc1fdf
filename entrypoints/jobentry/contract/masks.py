"""Which values are masked, and how a node's log marks secrets that the laptop shows as ``***``.

The log keeps every byte of the ranks. Before a line that contains secrets, the entry writes their
positions: ``jobentry# {"mask":[3,60,17,31]}`` means that in the next line of rank 3, which has 60
bytes after the rank's prefix, the bytes from 17 up to, but not including, 31 are a secret. More
pairs may follow. A platform may change a line (bytes that are not UTF-8); a line with another
length is masked as a whole.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Iterable, Sequence, Tuple

from jobentry.contract import journal, lines

MASK = "***"
# The offset of the first byte of a secret, and of the byte after its last one.
Range = Tuple[int, int]

_MASK = re.compile(rb'\{"mask":\[(\d{1,9}),(\d{1,9}(?:,\d{1,9},\d{1,9})+)\]\}')
# A line with more secrets is masked from the first to the last.
_MAX_RANGES = 1000
# A shorter value occurs by chance too often.
_MIN_SECRET_BYTES = 8
# A shorter value of letters in one case is an ordinary word: "password", "production".
_MAX_WORD_LENGTH = 16
_NAME_ENDS = (
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
    "API_KEY",
    "APIKEY",
    "ACCESS_KEY",
    "ACCESS_KEY_ID",
    "SECRET_KEY",
    "PRIVATE_KEY",
    "SSH_KEY",
)


def is_secret_name(name: str) -> bool:
    """Whether a variable with this name usually holds a secret."""
    return name.upper().endswith(_NAME_ENDS)


def secret_forms(values: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the byte strings to mask for these values, line by line; the longest is first.

    With this order, a value inside another one is not replaced before it.
    """
    found = {line.strip() for value in values for line in value.split(b"\n")}
    forms = {form for line in found if _is_secret(line) for form in _forms(line)}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _is_secret(line: bytes) -> bool:
    """Whether a line is long enough, and neither an ordinary word nor the header of a key."""
    is_word = line.isalpha() and len(line) < _MAX_WORD_LENGTH
    is_word = is_word and (line.islower() or line.isupper() or line.istitle())
    return len(line) >= _MIN_SECRET_BYTES and not is_word and not line.startswith(b"-----")


def _forms(value: bytes) -> set[bytes]:
    """Return a value as it is, in base64, in percent encoding, and escaped as in JSON."""
    from base64 import b64encode
    from json import dumps
    from urllib.parse import quote, quote_plus

    escaped = dumps(value.decode("utf-8", "surrogateescape"))[1:-1].encode()
    return {
        value,
        b64encode(value).rstrip(b"="),
        quote(value, safe="").encode(),
        quote_plus(value).encode(),
        escaped,
    }


def write(rank: int, data: bytes, ranges: Iterable[Range]) -> bytes:
    """Return the stream text of complete lines with the marks of ``ranges``, which are in order."""
    pieces, at = [], 0
    for begin, group in groupby(ranges, lambda each: data.rfind(b"\n", 0, each[0]) + 1):
        pieces.append(lines.write(rank, data[at:begin])[0])
        size = data.index(b"\n", begin) - begin
        pieces.append(_mark(rank, size, [(start - begin, end - begin) for start, end in group]))
        at = begin
    pieces.append(lines.write(rank, data[at:])[0])
    return b"".join(pieces)


def write_part(rank: int, data: bytes, ranges: Sequence[Range]) -> bytes:
    """Return the stream text of an incomplete line with the marks of ``ranges``."""
    text = lines.write_part(rank, data)
    return _mark(rank, len(data), ranges) + text if ranges else text


def _mark(rank: int, size_bytes: int, ranges: Sequence[Range]) -> bytes:
    if len(ranges) > _MAX_RANGES:
        ranges = [(ranges[0][0], ranges[-1][1])]
    pairs = b"".join(b",%d,%d" % each for each in ranges)
    return journal.MARK + b'{"mask":[%d,%d%s]}\n' % (rank, size_bytes, pairs)


class Splitter:
    """Splits the log of one node into its text, with secrets masked, and its journal."""

    def __init__(self) -> None:
        # The size of the next line of a rank, and the ranges in it.
        self._next: dict[int, list[int]] = {}

    def split(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Return whole lines of the log, and those of the journal among them without their mark."""
        if not self._next and journal.MARK not in data:
            return data, []
        others, found = [], []
        for text, line in journal.parts(data):
            others.append(self._masked_lines(text) if self._next else text)
            match = _MASK.fullmatch(line) if line is not None else None
            if match is not None:
                self._next[int(match[1])] = [int(text) for text in match[2].split(b",")]
            elif line is not None:
                found.append(line)
        return b"".join(others), found

    def _masked_lines(self, text: bytes) -> bytes:
        """Return lines with their secrets masked; those after the last secret stay as they are."""
        at, masked = 0, []
        while self._next and at < len(text):
            end = text.find(b"\n", at)
            end = len(text) if end < 0 else end
            masked += [self._masked(text[at:end]), text[end : end + 1]]
            at = end + 1
        return b"".join(masked) + text[at:]

    def _masked(self, line: bytes) -> bytes:
        rank, data = lines.read(line)
        if rank not in self._next:
            return line
        size_bytes, *places = self._next.pop(rank)
        if size_bytes != len(data):
            places = [0, len(data)]
        at, pieces = 0, [line[: len(line) - len(data)]]
        for start, end in zip(places[::2], places[1::2]):
            pieces += [data[at:start], MASK.encode()]
            at = end
        return b"".join((*pieces, data[at:]))
