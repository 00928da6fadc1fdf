"""A filter selects whole lines, and loses none between reading and following a log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudjob.cli.screen import Screen
from cloudjob.model.patterns import Pattern
from cloudjob.tracking.blocks import without_overwritten
from cloudjob.tracking.log import LogPiece
from cloudjob.tracking.log_filter import LogFilter
from jobentry.contract import lines

NOW = [
    LogPiece(0, b"jobentry: starting\n[0] loss 1\n[1]+ 50%\n"),
    LogPiece(1, b"[2] loss 2\n[3] a\rb\n"),
    LogPiece(0, b"[0] done\n[1] 100% loss\n"),
]
LATER = LogPiece(1, b"[3] loss 4\n[2] done\n")


class StoredJob:
    """A job whose log has one more piece, ``LATER``, when it is followed."""

    def pieces(
        self, node: int | None = None, *, follow: bool, is_timed: bool = False, **_: object
    ) -> Iterator[LogPiece]:
        for at, piece in enumerate([*NOW, LATER] if follow else NOW):
            if node in (None, piece.node):
                yield piece._replace(at=60.0 * at if at and is_timed else None)


def shown(selection: LogFilter, *, follow: bool = False) -> list[bytes]:
    pieces = selection.pieces(StoredJob(), follow=follow)  # type: ignore[arg-type]
    return b"".join(piece.data for piece in pieces).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("selection", "lines"),
    [
        (LogFilter(nodes="1"), [b"[2] loss 2\n", b"[3] a\r", b"b\n"]),
        (LogFilter(ranks="0,2"), [b"[0] loss 1\n", b"[2] loss 2\n", b"[0] done\n"]),
        (LogFilter(nodes="0-1", ranks="2"), [b"[2] loss 2\n"]),
        (LogFilter(pattern=re.compile(b"^loss")), [b"[0] loss 1\n", b"[2] loss 2\n"]),
        (LogFilter(pattern=re.compile(b"50%100%")), [b"[1]+ 50%\n", b"[1] 100% loss\n"]),
        (LogFilter(tail=2), [b"[3] a\r", b"b\n", b"[0] done\n"]),
        (LogFilter(tail=0), []),
        (LogFilter(ranks="2", tail=9), [b"[2] loss 2\n"]),
        (LogFilter(since="1970-01-01T00:01:30Z"), [b"[0] done\n", b"[1] 100% loss\n"]),
        (LogFilter(since="1970-01-01T00:01:00Z", tail=1), [b"[1] 100% loss\n"]),
        (LogFilter(since="1s"), []),
    ],
)  # fmt: skip
def test_the_selected_lines_are_shown(selection: LogFilter, lines: list[bytes]):
    assert shown(selection) == lines


def test_a_tail_that_is_followed_shows_each_later_line_once():
    assert shown(LogFilter(ranks="2-3", tail=1), follow=True) == [
        b"[3] a\r", b"b\n", b"[3] loss 4\n", b"[2] done\n",
    ]  # fmt: skip


def test_a_log_since_a_time_is_followed_from_there():
    selection = LogFilter(since="1970-01-01T00:02:30Z", tail=5)

    assert shown(selection, follow=True) == [b"[3] loss 4\n", b"[2] done\n"]


def test_selected_lines_keep_their_times():
    selection = LogFilter(pattern=re.compile(b"loss"), tail=3, is_timed=True)
    job: Any = StoredJob()

    assert [(piece.at, piece.data) for piece in selection.pieces(job, follow=False)] == [
        (None, b"[0] loss 1\n"), (60.0, b"[2] loss 2\n"),
        (120.0, b"[1]+ 50%\n"), (120.0, b"[1] 100% loss\n"),
    ]  # fmt: skip


class Log:
    """A job whose log is these pieces."""

    def __init__(self, pieces: list[LogPiece]) -> None:
        self._pieces = pieces

    def pieces(self, *_: object, **__: object) -> Iterator[LogPiece]:
        yield from self._pieces


def last_lines(pieces: list[LogPiece], number: int) -> list[tuple[int, bytes]]:
    """Return the last lines that begin, each with all of its parts, line by line."""
    by_line: list[list[tuple[int, bytes]]] = []
    unfinished: dict[tuple[int, int | None], list[tuple[int, bytes]]] = {}
    for node, data, _ in pieces:
        for text in data.splitlines(keepends=True):
            rank, part = lines.read(text)
            line = unfinished.pop((node, rank), None)
            if line is None:
                line = []
                by_line.append(line)
            line.append((node, text))
            if not part.endswith(b"\n"):
                unfinished[node, rank] = line
    return [text for line in by_line[max(0, len(by_line) - number) :] for text in line]


log_lines = st.sampled_from(
    [b"[0] a\n", b"[1] b\n", b"[0]+ c\n", b"[1]+ d\n", b"[2] ]+ e\n", b"jobentry: f\n", b"\n"]
)
log_pieces = st.builds(
    lambda node, texts: LogPiece(node, b"".join(texts)), st.integers(0, 1), st.lists(log_lines)
)


@given(st.lists(log_pieces, max_size=12), st.integers(0, 9))
@example([LogPiece(1, b"[0]+ c\n[1] b\n"), LogPiece(1, b"[0] a\n")], 1)
def test_the_last_lines_are_whole_however_the_log_arrives(pieces: list[LogPiece], number: int):
    selected = LogFilter(tail=number).pieces(Log(pieces), follow=False)  # type: ignore[arg-type]

    node_lines = [(piece.node, line) for piece in selected for line in piece.data.splitlines(True)]
    assert node_lines == last_lines(pieces, number)


bar_lines = st.sampled_from(
    [b"[0]+ \r1%\n", b"[0]+ \r2%\n", b"[0]+ 3%\r\n", b"[0]+ .\n", b"[0] \r4%\n", b"[0] end\n",
     b"[0] \router\n", b"[0]+ \rinner\x1b[A\n", b"[1]+ \r5%\n", b"[1] x\r\n", b"\n"]
)  # fmt: skip


@given(st.lists(bar_lines, max_size=12))
@example([b"[0]+ \r1%\n", b"[0]+ 3%\r\n", b"[0]+ 3%\r\n"])
def test_what_bars_overwrite_is_left_out_and_a_terminal_shows_the_same(texts: list[bytes]):
    data = b"".join(texts)

    assert on_terminal(without_overwritten(data)) == on_terminal(data)


def test_the_tail_of_a_log_has_few_states_of_each_progress_bar():
    """Each would be read again line by line."""
    bars = b"".join(b"[%d]+ \r%d%%\n" % (rank, n) for n in range(100) for rank in range(8))
    job: Any = Log([LogPiece(0, b"[0]+ .\n" + bars)])

    selected = b"".join(piece.data for piece in LogFilter(tail=9).pieces(job, follow=False))
    assert selected.splitlines(True)[0] == b"[0]+ .\n"
    assert sorted(re.findall(rb"\[(\d)\]\+ \r(\d+)", selected)) == [
        (b"%d" % rank, b"99") for rank in range(8)
    ]


def on_terminal(data: bytes) -> bytes:
    screen = Screen(is_live=False)
    return screen.show(data)[0] + screen.finish()


@pytest.mark.parametrize(
    "pattern", ["^a", "a$", r"\bb", "a|^b", "[^a]b", "x*", r"a\s*b", "^a|b", "é"]
)
@given(st.lists(st.sampled_from(["a", "b", "ab", " ab", "ba", "", "é", "[1] a"]), max_size=30))
def test_a_pattern_selects_the_same_lines_in_a_long_log(pattern: str, texts: list[str]):
    """Most of a long log is searched without looking at each line."""
    data = [f"[0] {text}\n".encode() for text in texts]
    job: Any = Log([LogPiece(0, b"".join(data))])

    selected = LogFilter(pattern=Pattern(pattern)).pieces(job, follow=False)

    expected = [
        line for line, text in zip(data, texts, strict=True) if re.search(pattern, text, re.ASCII)
    ]
    assert b"".join(piece.data for piece in selected) == b"".join(expected)


@pytest.mark.parametrize("pattern", ["(a+)+c$", "(.*)*(.*)*z", "(?:a|b)*a(?:a|b){300}c"])
def test_no_pattern_and_line_take_long_together(pattern: str):
    """With Python's ``re``, the first of these would take longer than a life."""
    lines = [b"a" * 16000, b"ab" * 8000]
    job: Any = Log([LogPiece(0, b"".join(b"[0] %s\n" % line for line in lines))])

    selected = LogFilter(pattern=Pattern(pattern)).pieces(job, follow=False)

    assert not b"".join(piece.data for piece in selected)
