"""Tests of how a job's log is shown, on a terminal and in a file."""

from __future__ import annotations

import pytest

from cloudjob.cli.screen import Screen

ESC = b"\x1b"


def shown(*pieces: bytes, is_live: bool = True) -> bytes:
    """Return everything that is shown for the ranks' output."""
    screen = Screen(is_live=is_live)
    return b"".join([screen.show(piece)[0] for piece in pieces]) + screen.finish()


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        (b"plain", b"plain"),
        ("tab\tand é ✓".encode(), "tab\tand é ✓".encode()),
        (ESC + b"[31mred" + ESC + b"[0m", ESC + b"[31mred" + ESC + b"[0m" + ESC + b"[0m"),
        (ESC + b"[38;2;1;2;3mx", ESC + b"[38;2;1;2;3mx" + ESC + b"[0m"),
        (b"a" + ESC + b"]52;c;ZXZpbA==\x07b", b"ab"),
        (b"a" + ESC + b"]0;title" + ESC + b"\\b", b"ab"),
        (b"a" + ESC + b"]0;never ended", b"a"),
        (b"a" + ESC + b"[2J" + ESC + b"[1;1H" + ESC + b"[?1049hb", b"ab"),
        (b"a" + ESC + b"cb" + ESC + b"(0c" + ESC, b"abc"),
        (ESC + ESC + b"[31m]0;x\x07", ESC + b"[31m]0;x" + ESC + b"[0m"),
        (ESC + b"P1$q" + ESC + b"\\a", b"a"),
        (b"a\x07\x08\x0b\x0c\x00\x7fb", b"ab"),
        (b"a\xc2\x9b2Jb", b"a2Jb"),
        (b"a\x9b2J\xffb", b"a2J\xffb"),
        ("a\u202eb\u2066".encode(), b"ab"),
        (ESC + b"[" + b"1;" * 100 + b"m", b""),
    ],
)
def test_only_colours_of_a_rank_reach_a_terminal(text: bytes, safe: bytes):
    for piece, end in ((b"[0] " + text + b"\n", b"\n"), (b"[0]+ " + text + b"\n", b"\n")):
        assert shown(piece) == b"[0] " + safe + end
        assert shown(piece, is_live=False) == b"[0] " + text + b"\n"


def test_a_sequence_that_comes_in_two_parts_does_not_reach_a_terminal():
    for cut in range(1, 12):
        text = b"\x1b]0;title\x07"
        text_shown = shown(b"[0]+ " + text[:cut] + b"\n", b"[0]+ " + text[cut:] + b"\n")
        assert ESC not in text_shown
        assert b"\x07" not in text_shown


@pytest.mark.parametrize(
    "pieces",
    [
        [b"[0] a\r[1] forged\n"],
        [b"[0]+ a\r[1] forged\n"],
        [b"[0]+ a\n", b"[0]+ \r[1] forged\n"],
        [b"[0]+ a\r\n", b"[0] [1] forged\n"],
        [b"[0]+ a\n", b"[0] \r[1] forged\r\n"],
    ],
)
def test_a_carriage_return_cannot_forge_a_mark(pieces: list[bytes]):
    """The rank's mark is repeated before the text after a carriage return."""
    text_shown = shown(*pieces)

    assert text_shown.endswith(b"[0] [1] forged\n")
    assert text_shown.count(b"\r[1]") == 0


@pytest.mark.parametrize("is_live", [True, False])
def test_the_last_state_of_a_progress_bar_keeps_its_mark(is_live: bool):
    bar = b"[0]+ \r 10%\n", b"[1]+ \r 20%\n", b"[0]+ \r 30%\n[1] \r 40%\n"

    assert shown(*bar, b"[0] \r100%\n", is_live=is_live) == b"[1]  40%\n[0] 100%\n"
    assert shown(*bar, is_live=is_live) == b"[1]  40%\n[0]  30%\n"
    assert shown(b"[0] 10%\r 20%\r100%\n", is_live=is_live) == b"[0] 100%\n"


@pytest.mark.parametrize(
    ("part", "state"),
    [
        (b"\r 10%\n[0]+ \r 20%", b" 20%"),
        (b"10%\r\n[0]+ 20%\r", b"20%"),
        (b"no \n[0]+ bar", b"no bar"),
        (b"10%\n[0]+ \r    \r", None),
    ],
)
def test_the_last_incomplete_line_of_each_rank_is_its_progress_bar(
    part: bytes, state: bytes | None
):
    screen = Screen(is_live=True)
    screen.show(b"[0]+ " + part + b"\n[2]+ \r\x1b[31m 5%\x1b[2J\n")

    expected = {} if state is None else {0: state}
    assert screen.bars == {**expected, 2: b"\x1b[31m 5%\x1b[0m"}
    assert screen.finish().count(b"[0]") == len(expected)


def test_the_line_ends_of_windows_stay_in_a_file():
    assert shown(b"[0] a\r\n[0] b\r\n", is_live=False) == b"[0] a\r\n[0] b\r\n"


def test_each_line_starts_with_its_time():
    screen = Screen(is_live=False)

    assert screen.show(b"[0] a\njobentry: b\n[1]+ c\n", b"10:00 ") == (
        b"10:00 [0] a\n", b"10:00 jobentry: b\n"
    )  # fmt: skip
    assert screen.finish(b"10:01 ") == b"10:01 [1] c\n"


def test_our_own_text_is_safe_on_a_terminal():
    text = b"jobentry: the script \x1b]0;x\x07.py\n"

    assert Screen(is_live=False).show(text) == (b"", b"jobentry: the script .py\n")
    assert Screen(is_live=True, are_messages_live=False).show(text) == (b"", text)


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("part", [b"x" * 100_000, b"\r" + b"x" * 100_000])
def test_a_line_without_an_end_costs_little_memory(is_live: bool, part: bytes):
    """A file gets all text, in one line unless another rank writes, but only a bar's last state."""
    screen = Screen(is_live=is_live)
    pieces = []
    for _ in range(50):
        pieces.append(screen.show(b"[0]+ " + part + b"\n")[0])
        assert sum(map(len, screen._parts.values())) < 2 * 1024 * 1024
    pieces.append(screen.show(b"[1] other\n")[0])
    pieces.append(screen.show(b"[0] end\n")[0] + screen.finish())

    if part.startswith(b"\r"):
        assert b"".join(pieces) == b"[1] other\n[0] " + part[1:] + b"end\n"
    elif not is_live:
        assert b"".join(pieces) == b"[0] " + part * 50 + b"\n[1] other\n[0] end\n"


def test_nested_bars_leave_one_line_and_the_text_behind_them():
    # The output of tqdm for an outer bar and an inner one with position=1 and leave=False.
    written = b"\router: 0/2"
    for epoch in (b"1", b"2"):
        written += (
            b"\n\rinner: 0/2\x1b[A\n\rinner: 1/2\x1b[A\n\r          \x1b[A\router: %s/2" % epoch
        )
    *lines, rest = (written + b"\nepochs done\n").split(b"\n")
    pieces = [b"[0] " + line + b"\n" for line in lines]
    assert rest == b""

    for is_live in (True, False):
        assert (
            shown(*pieces, is_live=is_live) == b"[0] outer: 0/2\n[0] outer: 2/2\n[0] epochs done\n"
        )
        assert shown(*pieces[:2], is_live=is_live) == b"[0] outer: 0/2\n[0] inner: 0/2\n"
    screen = Screen(is_live=True)
    assert screen.show(b"".join(pieces[:4]))[0] == b"[0] outer: 0/2\n"
    assert screen.bars == {0: b"outer: 1/2"}
    cut = [b"[0]+ " + bytes([byte]) + b"\n" for byte in b"\rinner: 1/2\x1b[A"]
    assert shown(*cut, b"[0] \n", *pieces[-2:]) == b"[0] outer: 2/2\n[0] epochs done\n"


def test_text_between_nested_bars_is_shown():
    # A rank prints at the cursor, so its text follows the cursor movement of the inner bar.
    pieces = (b"[0] \rinner: 1/2\x1b[Aepoch 1\n", b"[0]+ \rinner: 2/2\x1b[A\n", b"[0] epoch 2\n")
    for is_live in (True, False):
        assert shown(*pieces, is_live=is_live) == b"[0] epoch 1\n[0] epoch 2\n"
    assert shown(b"[0] a\x1b[Ab\n", is_live=False) == b"[0] a\x1b[Ab\n"
