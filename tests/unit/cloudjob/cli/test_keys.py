"""Keys that scroll and sort a view on a terminal."""

from __future__ import annotations

import os
import sys

import pytest

from cloudjob.cli.keys import KeyPress, KeyReader, Position


def test_keys_move_and_sort_and_the_footer_counts_the_hidden_rows():
    position = Position(("age", "state"))

    assert position.footer(8, 8) == "q:quit  s:sort  j/k:scroll  by age"
    position.apply(KeyPress.PAGE_DOWN, 8)
    position.apply(KeyPress.UP, 8)
    assert position.footer(8, 20).startswith("7 above, 5 more  q:quit")
    position.apply(KeyPress.PAGE_DOWN, 100)
    position.limit(20)
    assert position.first == 19
    position.apply(KeyPress.SORT, 8)
    assert (position.first, position.order) == (0, "state")


def test_keys_are_read_from_a_terminal_which_is_then_as_before(monkeypatch: pytest.MonkeyPatch):
    parent_fd, child_fd = os.openpty()
    saved_fd = os.dup(0)
    os.dup2(child_fd, 0)
    monkeypatch.setattr(sys, "stdin", object())
    try:
        import termios

        before = termios.tcgetattr(0)
        with KeyReader() as keys:
            for data, key in (
                (b"j", KeyPress.DOWN),
                (b"\x1b[A", KeyPress.UP),
                (b"xq", None),
                (b"q", KeyPress.QUIT),
            ):
                os.write(parent_fd, data)
                assert keys.wait(30 if key else 0.1) is key
        assert termios.tcgetattr(0) == before
    finally:
        os.dup2(saved_fd, 0)
        for descriptor in (saved_fd, parent_fd, child_fd):
            os.close(descriptor)
