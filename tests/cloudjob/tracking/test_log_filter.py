"""A filter selects whole lines, and loses none between reading and following a log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from cloudjob.tracking.log import LogPiece
from cloudjob.tracking.log_filter import LogFilter

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
