"""Reads the commands of shell scripts, without running or expanding anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

# A shell script written by hand is shorter; what follows is data.
_MAX_LETTERS = 100_000
_OPERATORS = "();<>|&"
# Words that may precede a command.
_PREFIXES = frozenset(
    (
        *("!", "{", "time", "exec", "nohup", "env", "sudo", "nice", "command", "eval"),
        *("then", "do", "else", "elif", "if", "while", "until"),
    )
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
SHELLS = frozenset(("bash", "sh", "dash", "source", "."))


class Command(NamedTuple):
    """A command of a shell script.

    Args:
        is_repeated: Whether it is in a loop.
        is_background: Whether the script continues while it runs (``&``).
        is_failure_ignored: Whether the Python script that starts it ignores its exit code.
    """

    argv: tuple[str, ...]
    line: int
    is_repeated: bool = False
    is_background: bool = False
    is_failure_ignored: bool = False


def commands(text: str) -> list[Command]:
    """Return the commands in the text of a shell script."""
    found: list[Command] = []
    depth = 0
    for line, words, operator in _simple_commands(text[:_MAX_LETTERS]):
        if words:
            depth = max(0, depth + (words[0] == "do") - (words[0] == "done"))
            found += _unwrapped(words, line, is_repeated=depth > 0)
        if found and operator.startswith("&") and not operator.startswith("&&"):
            found[-1] = found[-1]._replace(is_background=True)
    return found


def _unwrapped(words: list[str], line: int, *, is_repeated: bool) -> list[Command]:
    """Return a command without what precedes it; for ``bash -c TEXT``, those of the text."""
    at = 0
    while at < len(words) and (words[at] in _PREFIXES or _ASSIGNMENT.match(words[at])):
        at += 1
    argv = tuple(words[at:])
    if not argv:
        return []
    inner: list[Command] = []
    if argv[0].rpartition("/")[2] in SHELLS:
        texts = [text for option, text in pairwise(argv[1:]) if re.fullmatch(r"-\w*c", option)]
        inner = commands(texts[0]) if texts else []
    return [each._replace(line=line) for each in inner] or [Command(argv, line, is_repeated)]


def _simple_commands(text: str) -> Iterator[tuple[int, list[str], str]]:
    """Yield ``(line, words, operator)``: a command without redirections, and what follows it."""
    for line, tokens in _lines(text):
        words: list[str] = []
        is_target = False
        for token in tokens:
            if not token or token.strip(_OPERATORS):
                words += [] if is_target else [token]
                is_target = False
            elif "<" in token or ">" in token:
                is_target = True
            else:
                yield line, words, token
                words = []
        yield line, words, ""


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words and operators of each line; a word in quotes may have several lines."""
    numbered = enumerate(text.splitlines(), 1)
    for number, line in numbered:
        while line.endswith("\\"):
            line = line[:-1] + next(numbered, (0, ""))[1]
        lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
        lexer.whitespace_split, lexer.commenters = True, ""
        tokens: list[str] = []
        try:
            for token in lexer:
                if token.startswith("#"):
                    break
                tokens.append(token)
        except ValueError:
            tokens.append(lexer.token + _until(getattr(lexer, "state", "'"), numbered))
        yield number, tokens
        for operator, word in pairwise(tokens):
            if operator == "<<" and re.fullmatch(r"-?[A-Za-z_]\w*", word):
                _skip_document(word.lstrip("-"), numbered)


def _until(quote: str, numbered: Iterator[tuple[int, str]]) -> str:
    """Return the rest of a word in quotes that ends in a later line."""
    text = ""
    for _, line in numbered:
        before, end, _ = line.partition(quote)
        text += f"\n{before}"
        if end:
            break
    return text


def _skip_document(end: str, numbered: Iterator[tuple[int, str]]) -> None:
    next((line for _, line in numbered if line.strip() == end), None)
