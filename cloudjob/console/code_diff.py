"""How the texts in the packages of two jobs differ, line by line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from cloudjob.console.text import displayable
from cloudjob.tracking import Job
from jobentry.contract.packages import FILE, Entry

# Larger files, further files and further lines are left out: a comparison may take quadratic time.
MAX_BYTES, MAX_LINES, MAX_FILES = 128 * 1024, 2000, 20
_SHOWN_LINES, _LINE_CHARS = 300, 300


class FileDiff(NamedTuple):
    """How one file differs.

    Args:
        lines: As ``diff -u`` has them, without its heading; empty if there is only the note.
        note: Why they are not shown, or not all; may be empty.
    """

    name: str
    lines: tuple[str, ...] = ()
    note: str = ""


def diffs(one: Job, other: Job) -> Iterator[FileDiff]:
    """Yield how files that are in either package differ, by name.

    Raises:
        StoreError: A package cannot be read.
    """
    left, right = _files(one), _files(other)
    names = [n for n in sorted({*left, *right}) if _digest(left, n) != _digest(right, n)]
    chosen = names[:MAX_FILES]
    left_texts = one.code_contents({_digest(left, n) for n in chosen}, limit_bytes=MAX_BYTES)
    right_texts = other.code_contents({_digest(right, n) for n in chosen}, limit_bytes=MAX_BYTES)
    for name in chosen:
        before = _text(left.get(name), left_texts)
        after = _text(right.get(name), right_texts)
        yield _diff(displayable(name), before, after)


def _files(job: Job) -> dict[str, Entry]:
    return {each.name: each for each in job.code_files() if each.kind == FILE}


def _digest(files: dict[str, Entry], name: str) -> str:
    return files[name].digest if name in files else ""


def _text(entry: Entry | None, contents: dict[str, bytes]) -> list[str] | None:
    """Return the lines of a file, none if there is no such file; None if it is no short text."""
    if entry is None:
        return []
    data = contents.get(entry.digest)
    if data is None or b"\0" in data:
        return None
    lines = data.decode("utf-8", "replace").splitlines()
    return [displayable(line) for line in lines] if len(lines) <= MAX_LINES else None


def _diff(name: str, before: list[str] | None, after: list[str] | None) -> FileDiff:
    if before is None or after is None:
        return FileDiff(name, note="no text, or too long to compare by line")
    diff_lines = islice(difflib.unified_diff(before, after, lineterm=""), 2, None)
    lines = [line[:_LINE_CHARS] for line in islice(diff_lines, _SHOWN_LINES + 1)]
    note = f"the first {_SHOWN_LINES} lines" if len(lines) > _SHOWN_LINES else ""
    return FileDiff(name, tuple(lines[:_SHOWN_LINES]), note)
