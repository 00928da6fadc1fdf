"""Makes texts of jobs safe to show on a page."""

from __future__ import annotations

import re
from typing import NamedTuple

from cloudjob.model import bars

# Terminal sequences and control characters, which have no meaning on a page, and marks that change
# the direction of the following text.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def displayable(text: str) -> str:
    """Return a text without terminal sequences and without marks that change its direction.

    Bytes that are not UTF-8, which arguments, file names and messages may contain, are escaped,
    because NiceGUI refuses them.
    """
    return _CONTROL.sub("", text.encode("utf-8", "backslashreplace").decode("utf-8"))


def displayable_line(line: bytes) -> str:
    """Return the final state of a log line on a terminal."""
    text = bars.last_state(line).rstrip(b"\r\n")
    return displayable(text.decode("utf-8", "replace"))


class Span(NamedTuple):
    """A part of a line that is shown with these classes of the style sheet."""

    start: int
    end: int
    classes: str


_COLOUR = re.compile(r"\x1b\[([0-9;]{0,40})m")
_BOLD, _NOT_BOLD, _NO_COLOUR, _OTHER_COLOURS = 1, 22, 39, (38, 48)
# The numbers of the eight colours of a terminal, and of their bright variants.
_COLOURS = {30 + n: n for n in range(8)} | {90 + n: n for n in range(8)}


def coloured_line(line: bytes) -> tuple[str, list[Span]]:
    """Return what ``displayable_line`` returns, and its parts in colour or bold.

    Only the eight colours of a terminal are shown; others depend on its background.
    """
    if b"\x1b[" not in line:
        return displayable_line(line), []
    line_text = bars.last_state(line).rstrip(b"\r\n").decode("utf-8", "replace")
    text, spans = "", list[Span]()
    colour, is_bold = None, False
    at = 0
    for match in _COLOUR.finditer(line_text):
        text = _append(text, line_text[at : match.start()], colour, is_bold, spans)
        colour, is_bold = _style(match[1], colour, is_bold)
        at = match.end()
    return _append(text, line_text[at:], colour, is_bold, spans), spans


def _append(text: str, part: str, colour: int | None, is_bold: bool, spans: list[Span]) -> str:
    part = displayable(part)
    classes = [*([] if colour is None else [f"ansi-{colour}"]), *(["ansi-bold"] if is_bold else [])]
    if part and classes:
        spans.append(Span(len(text), len(text) + len(part), " ".join(classes)))
    return text + part


def _style(codes: str, colour: int | None, is_bold: bool) -> tuple[int | None, bool]:
    """Return the colour and the weight after a sequence."""
    for code in (int(each or 0) for each in codes.split(";")):
        if code in _OTHER_COLOURS:
            # What follows are the parts of that colour.
            return None, is_bold
        if code == 0:
            colour, is_bold = None, False
        elif code in (_BOLD, _NOT_BOLD):
            is_bold = code == _BOLD
        elif code == _NO_COLOUR or code in _COLOURS:
            colour = _COLOURS.get(code)
    return colour, is_bold
