"""Tests of how two packages are compared line by line, and arguments by option."""

from __future__ import annotations

import hashlib

import pytest

from cloudjob.console import code_diff
from cloudjob.console.code_diff import FileDiff, diffs
from cloudjob.console.pages.compare import by_option
from jobentry.contract.packages import FILE, FOLDER, Entry


class Job:
    """A job whose package has these files."""

    def __init__(self, **files: bytes) -> None:
        self._files = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        self._entries = [
            Entry(name, FILE, 0o644, len(data), hashlib.sha256(data).hexdigest())
            for name, data in files.items()
        ]

    def code_files(self) -> list[Entry]:
        return [*self._entries, Entry("folder", FOLDER, 0o755)]

    def code_contents(self, digests: set[str], *, limit_bytes: int) -> dict[str, bytes]:
        return {
            digest: data
            for digest, data in self._files.items()
            if digest in digests and len(data) <= limit_bytes
        }


def found(one: Job, other: Job) -> list[FileDiff]:
    return list(diffs(one, other))  # type: ignore[arg-type]


def test_only_lines_that_differ_and_their_neighbours_are_shown():
    one = Job(train=b"a\nb\x1b[2J\n", same=b"x", gone=b"old\n")
    other = Job(train=b"a\nc\n", same=b"x", new=b"\xff\n")

    assert found(one, other) == [
        FileDiff("gone", ("@@ -1 +0,0 @@", "-old")),
        FileDiff("new", ("@@ -0,0 +1 @@", "+\N{REPLACEMENT CHARACTER}")),
        FileDiff("train", ("@@ -1,2 +1,2 @@", " a", "-b", "+c")),
    ]


@pytest.mark.parametrize(
    "data", [b"\0binary", b"x" * (code_diff.MAX_BYTES + 1), b"\n" * (code_diff.MAX_LINES + 1)]
)
def test_what_is_no_short_text_is_not_compared_by_line(data: bytes):
    (diff,) = found(Job(data=data), Job(data=b"text\n"))

    assert diff.lines == ()
    assert "too long" in diff.note


def test_a_long_difference_is_cut():
    many = b"".join(b"line %d\n" % number for number in range(1000))
    (diff,) = found(Job(data=b""), Job(data=many))

    assert len(diff.lines) == 300
    assert diff.note == "the first 300 lines"


def test_few_of_many_files_are_compared():
    files = {f"file{number}": b"x" for number in range(100)}

    assert len(found(Job(), Job(**files))) == code_diff.MAX_FILES


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (["--lr", "0.1", "--fast", "--seed=3"], {"--lr": "0.1", "--fast": "set", "--seed": "3"}),
        (["data", "--shift", "-1.5e3", "more"], {"argument 1": "data", "--shift": "-1.5e3 more"}),
        (["-v", "-v", "--layers", "1", "2"], {"-v": "set set", "--layers": "1 2"}),
        (["--empty", "", "--name=a b"], {"--empty": "''", "--name": "'a b'"}),
    ],
)
def test_arguments_are_named_by_their_options(args: list[str], options: dict[str, str]):
    assert by_option(args) == options
